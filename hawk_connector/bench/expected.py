"""What must lie in the pools after a transfer, worked out from the cache's formula and not from its bytes.

The pages are those of the torch reference; where they lie in a pool is counted in pages, which knows nothing of
parcels, streams and segments.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from hawk_connector.errors import LocalError
from hawk_connector.layout.kv_pool import KVPoolLayout
from hawk_connector.plan.pairing import chip_heads
from hawk_connector.transform.encoding import encode_pages
from hawk_connector.transform.program import compile_program
from hawk_connector.transform.reference import LayerSource, to_pages

from .cache import CacheShape, value_table
from .device import BenchPools

__all__ = ["ExpectedPages", "Landed"]


@dataclass(frozen=True)
class Landed:
    """A transfer that has come: ``tokens`` tokens from prefill's blocks ``table`` in decode's blocks ``block_ids``."""

    tokens: int
    table: tuple[int, ...]
    block_ids: tuple[int, ...]


class ExpectedPages:
    """Expected content for transfers out of a cache of ``shape`` that was made with ``seed``."""

    def __init__(self, shape: CacheShape, seed: int) -> None:
        self._shape = shape
        self._values = value_table(shape.torch_dtype, seed)

    def values(self, landed: Landed, kv: int, layer: int, heads: Sequence[int], first: int, count: int) -> torch.Tensor:
        """Tokens ``first`` .. ``first + count - 1`` of some heads: ``[heads, count, head_dim]``, zeros past the end."""
        shape, size = self._shape, self._shape.block_size
        found = torch.zeros((len(heads), count, shape.head_dim), dtype=shape.torch_dtype)
        end = min(first + count, landed.tokens)
        for block in range(first // size, -(-end // size)):
            begin, stop = max(first, block * size), min(end, (block + 1) * size)
            for row, head in enumerate(heads):
                place = shape.place(kv, layer, landed.table[block], head)[begin - block * size : stop - block * size]
                found[row, begin - first : stop - first] = self._values[torch.from_numpy(place % len(self._values))]
        return found

    def check(self, pools: BenchPools, landed: Landed, samples: int, seed: int) -> int:
        """Compares all pages of ``samples`` drawn rows (a block's K or V of one layer on one chip), the last one
        included; the number of pages compared.  LocalError where one is not what it must be."""
        layout = pools.layout
        pages = 0
        for block, layer, kv, chip in _rows(layout, len(landed.block_ids), samples, seed):
            heads = chip_heads(self._shape.kv_heads, layout.chips)
            assert heads is not None
            wanted = self._pages(layout, landed, block, layer, kv, heads[chip])
            first = landed.block_ids[block] * layout.pages_per_unit + layout.first_page_of(layer)
            where = (first + layout.tensor_layout(kv).head_pages).reshape(-1)
            found = pools.content(chip, layout.pool_of(layer, kv), where)
            if not np.array_equal(found, wanted):
                wrong = int((found != wanted).any(axis=1).argmax())
                raise LocalError(
                    "a transfer landed other bytes than it must",
                    expected=f"the reference's page {wrong} of block {block}, layer {layer}, {'KV'[kv]}, chip {chip}",
                    got=found[wrong, :16].tobytes().hex(" ") + " ...",
                    fix="This is a bug, in the product or in its benchmark; the figures mean nothing.",
                )
            pages += len(where)
        return pages

    def check_cache(self, layers: Sequence[LayerSource], landed: Landed, samples: int, seed: int) -> int:
        """The same for a cache like the prefill side's, block by block; rows past the last token are not looked at."""
        shape = self._shape
        size, heads = shape.block_size, range(shape.kv_heads)
        total = len(landed.block_ids) * shape.layers * 2
        drawn = set(random.Random(seed).sample(range(total), min(samples, total))) | {total - 1}
        for number in sorted(drawn):
            block, layer, kv = (
                int(index) for index in np.unravel_index(number, (total // 2 // shape.layers, shape.layers, 2))
            )
            rows = min(size, landed.tokens - block * size)
            wanted = self.values(landed, kv, layer, heads, block * size, rows)
            found = layers[layer].kind(kv)[landed.block_ids[block], :, :rows]
            if not torch.equal(found, wanted):
                raise LocalError(
                    "a transfer landed other bytes than it must",
                    expected=f"the values of block {block}, layer {layer}, {'KV'[kv]}",
                    got=f"{int((found != wanted).sum())} of {wanted.numel()} that differ",
                    fix="This is a bug, in the product or in its benchmark; the figures mean nothing.",
                )
        return len(drawn)

    def _pages(
        self, layout: KVPoolLayout, landed: Landed, block: int, layer: int, kv: int, heads: Sequence[int]
    ) -> NDArray[np.uint8]:
        size = layout.block_size
        values = self.values(landed, kv, layer, heads, block * size, size)
        program = compile_program(layout, kv, len(heads))
        encoded = encode_pages(to_pages(values[None], program), program.codec)
        pages: NDArray[np.uint8] = encoded.reshape(-1, layout.page_bytes).numpy()
        return pages


def _rows(layout: KVPoolLayout, blocks: int, samples: int, seed: int) -> Iterator[tuple[int, int, int, int]]:
    """(block, layer, kv, chip), each at most once."""
    extents = (blocks, layout.layers, 2, layout.chips)
    total = blocks * layout.layers * 2 * layout.chips
    drawn = set(random.Random(seed).sample(range(total), min(samples, total))) | {total - 1}
    for number in sorted(drawn):
        block, layer, kv, chip = (int(index) for index in np.unravel_index(number, extents))
        yield block, layer, kv, chip
