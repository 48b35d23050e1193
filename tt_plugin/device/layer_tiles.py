"""LayerTiles: one layer's KV tiles as an attention kernel sees them, on all chips."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from . import kernels
from .kv_pool import KVPools, heads_of_chip

__all__ = ["ChipHeads", "LayerTiles"]

_ELEMENT = {"float32": np.uint32, "bfloat16": np.uint16, "bfp8": np.uint8}


@dataclass(frozen=True, slots=True)
class ChipHeads:
    """The heads that one chip works on.

    ``kv_first``: first of the model's KV heads that it holds.  ``query_first``, ``group``: first query head that it
    computes, and how many for each of its KV heads.  Where a KV head is replicated its query heads are shared out
    among the chips that hold it.
    """

    kv_first: int
    kv_count: int
    query_first: int
    group: int

    @classmethod
    def of(cls, chip: int, chips: int, kv_heads: int, query_heads: int) -> ChipHeads:
        held = heads_of_chip(chip, kv_heads, chips)
        group = query_heads // kv_heads
        replicas = max(1, chips // kv_heads)
        replica = chip % replicas
        first, end = group * replica // replicas, group * (replica + 1) // replicas
        return cls(held.start, len(held), held.start * group + first, end - first)

    def query_table(self) -> NDArray[np.int64]:
        """int64 ``[kv_count, 2]``: first query head and number of them for each KV head."""
        starts = self.query_first + np.arange(self.kv_count, dtype=np.int64) * self.group
        return np.stack([starts, np.full_like(starts, self.group)], axis=1)


class LayerTiles:
    """Writes and reads ``layer``'s K and V in ``pools``.

    ``kv_heads``, ``query_heads``: the whole model's.  ``dim_order``: int64 ``[head_dim]``, the dim of K stored at
    each place; dot products are the same in any one order, so queries are put into K's and K is never put back.
    """

    def __init__(self, pools: KVPools, layer: int, kv_heads: int, query_heads: int) -> None:
        layout = pools.layout
        if layout.codec not in _ELEMENT:
            raise ValueError(f"the kernels know the codecs {', '.join(_ELEMENT)}; got {layout.codec!r}")
        if query_heads % kv_heads:
            raise ValueError(f"{query_heads} query heads are not a multiple of {kv_heads} KV heads")
        element = np.dtype(_ELEMENT[layout.codec])
        size = element.itemsize
        tensor = layout.tensor_layout(0)
        self.pools = pools
        self.layer = layer
        self.chips = tuple(ChipHeads.of(c, layout.chips, kv_heads, query_heads) for c in range(layout.chips))
        self.dim_order: NDArray[np.int64] = np.array(
            tensor.dim_order if tensor.dim_order is not None else range(layout.head_dim), dtype=np.int64
        )
        self._plain_order = np.arange(layout.head_dim, dtype=np.int64)
        self._memory = tuple(memory.view(element) for memory in pools.device.memory)
        self._buffers = tuple(pools.buffer_addresses[layout.pool_of(layer, kv)] // size for kv in (0, 1))
        self._query_tables = tuple(heads.query_table() for heads in self.chips)
        cross = layout.kind == "cross_layer"
        self._geometry: kernels.PoolGeometry = (
            layout.banks,
            pools.device.bank_span // size,
            layout.page_pitch // size,
            layout.heads,
            -(-layout.block_size // 32),
            layout.head_dim // 32,
            layout.block_size,
            layout.layers if cross else 1,
            layer if cross else 0,
        )

    def write(self, slots: NDArray[np.int64], key: NDArray[np.float32], value: NDArray[np.float32]) -> None:
        """Writes tokens: fp32 ``[tokens, kv_heads, head_dim]``, dims in the model's order.

        ``slots``: int64 ``[tokens]``, block * block size + token of the block; negative ones are skipped.
        """
        for heads, memory in zip(self.chips, self._memory, strict=True):
            for buffer, rows, order in zip(
                self._buffers, (key, value), (self.dim_order, self._plain_order), strict=True
            ):
                bits = rows.view(np.uint32)
                kernels.write_tokens(memory, self._geometry, buffer, slots, bits, heads.kv_first, order)

    def read(self, chip: int, blocks: NDArray[np.int32], tokens: int) -> tuple[NDArray[np.float32], ...]:
        """K and V of a request's first ``tokens``: fp32 ``[local heads, tokens, head_dim]`` each, dims as stored."""
        shape = (self.chips[chip].kv_count, tokens, self.pools.layout.head_dim)
        found = []
        for buffer in self._buffers:
            out = np.empty(shape, dtype=np.float32)
            kernels.read_tokens(self._memory[chip], self._geometry, buffer, blocks, out)
            found.append(out)
        return tuple(found)

    def attend(
        self,
        queries: NDArray[np.float32],
        query_start: NDArray[np.int32],
        seq_lens: NDArray[np.int32],
        tables: NDArray[np.int32],
        requests: NDArray[np.int64],
        scale: float,
        out: NDArray[np.float32],
    ) -> None:
        """Causal attention of requests with few query tokens, straight from the tiles.

        ``queries``, ``out``: fp32 ``[tokens, query_heads, head_dim]``.  ``query_start``: int32 ``[requests + 1]``.
        ``seq_lens``: int32 ``[requests]``, tokens of each, its queries included.  ``tables``: int32
        ``[requests, blocks]``.  ``requests``: int64, the requests to compute; rows of others are left alone.
        """
        for memory, table in zip(self._memory, self._query_tables, strict=True):
            kernels.attend(
                memory,
                self._geometry,
                *self._buffers,
                queries,
                query_start,
                seq_lens,
                tables,
                requests,
                table,
                self.dim_order,
                np.float32(scale),
                out,
            )

    def warm_up(self) -> None:
        """Compiles the kernels for this pool's codec; touches no memory of the device."""
        layout, heads = self.pools.layout, self.chips[-1]
        kv_heads = heads.kv_first + heads.kv_count
        nothing = np.zeros((1, kv_heads, layout.head_dim), np.float32)
        self.write(np.full(1, -1, np.int64), nothing, nothing)
        self.read(0, np.zeros(1, np.int32), 0)
        self.attend(
            nothing,
            np.zeros(1, np.int32),
            np.zeros(0, np.int32),
            np.zeros((0, 1), np.int32),
            np.zeros(0, np.int64),
            1.0,
            nothing,
        )
