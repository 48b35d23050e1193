"""One request's KV in a pool, twice: as the tensors that TTNN is given, and as the bank bytes that HAWK makes."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hawk_connector.layout.kv_pool import Channels, KVPoolLayout, PoolKind
from hawk_connector.plan.parcel import ChipShare, ParcelPlan
from hawk_connector.plan.segments import PoolPlacement, Segments, pool_segments
from hawk_connector.transform.packing import parcel_packer
from hawk_connector.transform.reference import LayerSource, unpack_parcel
from tests.oracle.scalar import k_order

__all__ = ["Pools", "Request"]

SOURCE_BLOCK = 16


@dataclass(frozen=True)
class Request:
    """What is moved.  The last block is not full, and the blocks lie scattered in the pool."""

    kind: PoolKind
    codec: str
    layers: int = 3
    heads: int = 3
    block_size: int = 64
    head_dim: int = 96
    channels: Channels = "interleaved"
    whole_tiles: bool = False
    """The tokens end with a tile, as TTNN's ``paged_fill_cache`` wants: half a block is missing, or nothing."""

    def __str__(self) -> str:
        shape = f"L{self.layers}-H{self.heads}-BS{self.block_size}-D{self.head_dim}"
        return f"{self.kind}-{self.codec}-{self.channels}-{shape}"

    @property
    def blocks(self) -> int:
        return 3

    @property
    def tokens(self) -> int:
        missing = self.block_size // 64 * 32 if self.whole_tiles else 5
        return self.blocks * self.block_size - missing


class Pools:
    """A request in the pools of one chip with ``banks`` banks, which have as many blocks as the chip has banks."""

    def __init__(self, request: Request, banks: int, alignment: int, seed: int = 0) -> None:
        r = self.request = request
        self.num_blocks = banks
        rows = self.num_blocks * (r.layers if r.kind == "cross_layer" else 1)
        self.layout = KVPoolLayout(
            r.kind,
            r.layers,
            1,
            r.heads,
            r.block_size,
            r.head_dim,
            r.codec,
            banks,
            alignment,
            channels=r.channels,
            shard_rows=rows // banks if r.channels == "height_sharded" else 1,
        )
        self.rows = rows
        rng = np.random.default_rng(seed)
        self.block_ids = [int(block) for block in rng.permutation(self.num_blocks)[: r.blocks]]
        shape = (r.layers, 2, r.heads, r.tokens, r.head_dim)
        # Neighbours of very different size, so that shared exponents matter.
        self.values: NDArray[np.float32] = np.ldexp(
            rng.standard_normal(shape, dtype=np.float32), rng.integers(-6, 7, shape)
        )
        bank_bytes = self.layout.rule.slots(self.layout.pool_pages(self.num_blocks)) * self.layout.page_pitch
        self.shape = (self.layout.pools, banks, bank_bytes)

    # ---- as TTNN sees it ------------------------------------------------------------------------------------------
    def stored(self, layer: int, kv: int) -> NDArray[np.float32]:
        """The request's K or V of one layer as the decode side's model holds it: ``[heads, tokens, head_dim]``."""
        dims = self.request.head_dim
        order = [k_order(dim, dims, dims) if kv == 0 else dim for dim in range(dims)]
        return self.values[layer, kv][:, :, order]

    @cached_property
    def tensors(self) -> list[NDArray[np.float32]]:
        """Each pool as the tensor ``[rows, heads, block_size, head_dim]`` that it stands for, zeros where unused."""
        r = self.request
        pools = np.zeros((self.layout.pools, self.rows, r.heads, r.block_size, r.head_dim), dtype=np.float32)
        for layer in range(r.layers):
            for kv in (0, 1):
                stored = self.stored(layer, kv)
                pool = kv if r.kind == "cross_layer" else 2 * layer + kv
                for token in range(r.tokens):
                    row = self.row(self.block_ids[token // r.block_size], layer)
                    pools[pool, row, :, token % r.block_size] = stored[:, token]
        return list(pools)

    def gathered(self, tensors: list[NDArray[np.float32]]) -> NDArray[np.float32]:
        """The reverse of ``tensors``: the request's values, K in the model's own order of dims."""
        r = self.request
        values = np.empty_like(self.values)
        order = [k_order(dim, r.head_dim, r.head_dim) for dim in range(r.head_dim)]
        for layer in range(r.layers):
            for kv in (0, 1):
                pool = kv if r.kind == "cross_layer" else 2 * layer + kv
                for token in range(r.tokens):
                    row = self.row(self.block_ids[token // r.block_size], layer)
                    values[layer, kv][:, token, order if kv == 0 else slice(None)] = tensors[pool][
                        row, :, token % r.block_size
                    ]
        return values

    def row(self, block: int, layer: int) -> int:
        return block * self.request.layers + layer if self.request.kind == "cross_layer" else block

    @property
    def shard(self) -> list[int] | None:
        """Shape of a shard as TTNN wants it."""
        r = self.request
        if r.channels == "nd_sharded":
            return [1, r.heads, r.block_size, r.head_dim]
        if r.channels == "height_sharded":
            return [self.layout.shard_rows * r.heads * r.block_size, r.head_dim]
        return None

    # ---- as HAWK makes it -----------------------------------------------------------------------------------------
    def packed(self) -> NDArray[np.uint8]:
        """Bank bytes of every pool, zeros where nothing is written: uint8 ``[pools, banks, bytes]``."""
        parcel = torch.full((self._plan.nbytes,), 0xA5, dtype=torch.uint8)
        packer = parcel_packer(torch.device("cpu"))
        packer.pack(self._source(self.values), self._table, self._plan, 0, self.request.tokens, parcel)
        image = np.zeros(self.shape, dtype=np.uint8)
        _copy(self._segments(parcel, image), image, parcel)
        return image

    def unpacked(self, image: NDArray[np.uint8]) -> NDArray[np.float32]:
        """The request's values from bank bytes, by the same plan backwards; NaN where a value was not found."""
        parcel = torch.full((self._plan.nbytes,), 0xA5, dtype=torch.uint8)
        _copy(self._segments(parcel, image).reversed(), image, parcel)
        target = self._source(np.full_like(self.values, np.nan))
        unpack_parcel(parcel, self._plan, target, self._table, 0, self.request.tokens)
        found = np.empty_like(self.values)
        for layer, source in enumerate(target):
            for kv in (0, 1):
                for token in range(self.request.tokens):
                    block = self._table[token // SOURCE_BLOCK]
                    found[layer, kv][:, token] = source.kind(kv)[block, :, token % SOURCE_BLOCK].numpy()
        return found

    @cached_property
    def _plan(self) -> ParcelPlan:
        heads = tuple((head, head) for head in range(self.request.heads))
        return ParcelPlan(self.layout, (ChipShare(0, heads),), self.request.blocks)

    @cached_property
    def _table(self) -> torch.Tensor:
        """The prefill side's blocks: in reverse, and not from the first."""
        return torch.arange(-(-self.request.tokens // SOURCE_BLOCK), 0, -1)

    def _source(self, values: NDArray[np.float32]) -> list[LayerSource]:
        """The prefill side's caches: fused ``[blocks, heads, 16, 2 * head_dim]``, NaN where nothing is."""
        r = self.request
        layers = []
        for layer in range(r.layers):
            cache = torch.full((len(self._table) + 1, r.heads, SOURCE_BLOCK, 2 * r.head_dim), torch.nan)
            for token in range(r.tokens):
                row = torch.from_numpy(
                    np.concatenate([values[layer, 0, :, token], values[layer, 1, :, token]], axis=-1)
                )
                cache[self._table[token // SOURCE_BLOCK], :, token % SOURCE_BLOCK] = row
            layers.append(LayerSource(cache[..., : r.head_dim], cache[..., r.head_dim :]))
        return layers

    def _segments(self, parcel: torch.Tensor, image: NDArray[np.uint8]) -> Segments:
        """``image`` is one pool after the other, so a pool's address is relative to the first."""
        pools, banks, bank_bytes = image.shape
        origins = image.ctypes.data + np.arange(banks, dtype=np.int64)[None, :] * bank_bytes
        buffers = tuple(pool * banks * bank_bytes for pool in range(pools))
        placement = PoolPlacement(origins, buffers, self.num_blocks)
        return pool_segments(self._plan, parcel.data_ptr(), self.block_ids, placement)


def _copy(segments: Segments, image: NDArray[np.uint8], parcel: torch.Tensor) -> None:
    """Reads each segment from its remote to its local address; both must lie in the image or in the parcel."""
    known: list[tuple[int, int]] = [
        (image.ctypes.data, image.ctypes.data + image.nbytes),
        (parcel.data_ptr(), parcel.data_ptr() + parcel.numel()),
    ]
    columns: Any = (segments.remote.tolist(), segments.local.tolist(), segments.length.tolist())
    for remote, local, length in zip(*columns, strict=True):
        for address in (remote, local):
            assert any(first <= address and address + length <= last for first, last in known)
        ctypes.memmove(local, remote, length)
