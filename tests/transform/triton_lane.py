"""Packs for the tests of the Triton kernels, as functions of plain values: another process may run them.

Triton decides when it is first imported whether it compiles for a GPU or interprets on the CPU, and so does everything
in that process.  So the interpreter has a process of its own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hawk_connector.layout.kv_pool import KVPoolLayout
from hawk_connector.plan.parcel import ChipShare, ParcelPlan
from hawk_connector.transform.gpu_triton import TritonPacker
from hawk_connector.transform.reference import LayerSource
from tests.transform.crossing import DTYPES, Crossing, Prefill, pairing_of

Lane = Callable[..., Any]
"""``lane(function, *arguments)``: what ``function(device, *arguments)`` gives where the kernels run."""


@contextmanager
def interpreter() -> Iterator[Lane]:
    with ProcessPoolExecutor(1, get_context("spawn"), _interpret) as pool:
        yield lambda function, *arguments: pool.submit(function, "cpu", *arguments).result()


def _interpret() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    torch.set_num_threads(1)


def gpu(function: Callable[..., Any], *arguments: Any) -> Any:
    return function("cuda", *arguments)


def crossing_parcel(device: str, crossing: Crossing, rank: int, first: int, blocks: int) -> bytes:
    """The parcel of a synthetic request, its blocks ``first`` and on."""
    prefill = Prefill.of(crossing)
    memory = prefill.flat[rank].to(device)
    moved = Prefill(prefill.source, (*prefill.flat[:rank], memory, *prefill.flat[rank + 1 :]), prefill.table, ())
    plan = pairing_of(crossing, rank).plan(blocks)
    return pack(device, moved.layers(rank, crossing), prefill.table, plan, first, crossing.tokens)


def pack(
    device: str, layers: list[LayerSource], table: tuple[int, ...], plan: ParcelPlan, first: int, tokens: int
) -> bytes:
    """What an earlier parcel has left in the region must not show: rows are all written."""
    out = torch.full((plan.nbytes,), 0xA5, dtype=torch.uint8, device=device)
    TritonPacker(torch.device(device)).pack(layers, torch.tensor(table), plan, first, tokens, out)
    return out.cpu().numpy().tobytes()


def value_pages(device: str, bits: NDArray[Any], dtype: str, codec: str) -> list[bytes]:
    """Pages of V whose elements, in page order, are the bit patterns ``bits [pages, 1024]`` (uint16 or uint32).

    One head; blocks of one page, four pages to a row of 128 dims, so that a program makes four.
    """
    blocks = len(bits) // 4
    # [block, page, face row, face column, row, column] to [block, token, dim].
    rows = bits.reshape(blocks, 4, 2, 2, 16, 16).transpose(0, 2, 4, 1, 3, 5).reshape(blocks, 1, 32, 128)
    words = np.concatenate([np.zeros_like(rows), rows], axis=3)
    cache = torch.from_numpy(words.view(np.int16 if words.itemsize == 2 else np.int32)).view(DTYPES[dtype]).to(device)
    layout = KVPoolLayout("per_layer", 1, 1, 1, 32, 128, codec, 1, 32)
    plan = ParcelPlan(layout, (ChipShare(0, ((0, 0),)),), blocks)
    source = LayerSource(cache[..., :128], cache[..., 128:])
    parcel = pack(device, [source], tuple(range(blocks)), plan, 0, 32 * blocks)
    values = parcel[len(parcel) // 2 :]  # one bank: K's pool, then V's
    size = layout.page_bytes
    return [values[page * size : (page + 1) * size] for page in range(len(bits))]


@dataclass(frozen=True)
class Far:
    """A bfloat16 cache whose ``[block, head, token, dim]`` strides leave holes; the holes take no memory.

    ``blocks``, ``heads``, ``size`` (tokens of a block), ``strides`` in elements; head_dim 32.  ``alignment``: of pages.
    """

    blocks: int
    heads: int
    size: int
    strides: tuple[int, int, int]
    table: tuple[int, ...]
    tokens: int
    alignment: int = 64

    def source(self, device: str) -> LayerSource:
        extents = (self.blocks, self.heads, self.size)
        last = sum((extent - 1) * stride for extent, stride in zip(extents, self.strides, strict=True)) + 64
        memory = torch.empty(last, dtype=torch.bfloat16, device=device)
        cache = memory.as_strided((*extents, 64), (*self.strides, 1))
        made = torch.Generator().manual_seed(1)
        for block in self.table:
            cache[block] = torch.randn((self.heads, self.size, 64), generator=made).to(device, torch.bfloat16)
        return LayerSource(cache[..., :32], cache[..., 32:])

    @property
    def plan(self) -> ParcelPlan:
        heads = tuple((head, head) for head in range(self.heads))
        layout = KVPoolLayout("per_layer", 1, 1, self.heads, 32, 32, "bfp8", 8, self.alignment)
        return ParcelPlan(layout, (ChipShare(0, heads),), -(-self.tokens // 32))


def far_parcel(device: str, far: Far) -> bytes:
    return pack(device, [far.source(device)], far.table, far.plan, 0, far.tokens)
