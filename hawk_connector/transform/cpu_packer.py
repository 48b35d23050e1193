"""Packing on a CPU with compiled kernels (``cpu_kernel``): tables for a plan and a request, threads."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from ..layout.kv_pool import KVPoolLayout
from ..layout.tilings import FACE, TILE
from ..plan.parcel import ParcelPlan
from .cpu_kernel import Kernel, KernelSpec, SideSpec, Table, compiled
from .program import compile_program
from .reference import LayerSource, pack_parcel

__all__ = ["CpuPacker"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_KEPT_PLANS = 16
_PIECE_BYTES = 1 << 20
"""Bytes of the parcel below which another thread is not worth waking."""


class CpuPacker:
    """TTNN's tiles by compiled kernels, one pass over the source; other tilings as the reference packs them."""

    def __init__(self, threads: int = 1, kernels: Callable[[KernelSpec], Kernel] = compiled) -> None:
        """``kernels``: where kernels come from."""
        self._threads = threads
        self._kernels = kernels
        self._pool = ThreadPoolExecutor(threads - 1, "hawk-pack") if threads > 1 else None
        self._plans: OrderedDict[ParcelPlan, PlanTables] = OrderedDict()
        self._layers: Sequence[LayerSource] | None = None
        self._caches: dict[KVPoolLayout, CacheTables | None] = {}

    def pack(
        self,
        layers: Sequence[LayerSource],
        block_table: torch.Tensor,
        plan: ParcelPlan,
        first_block: int,
        tokens: int,
        out: torch.Tensor,
    ) -> None:
        if not plan.shares:
            return  # this rank's heads are sent by another one
        cache = self._cache(layers, plan.layout)
        if cache is None:
            pack_parcel(layers, block_table, plan, first_block, tokens, out)
            return
        tables = self._tables(plan)
        request = RequestTables.of(cache, tables, block_table, first_block, tokens)
        # The tables stay alive until the kernel has ended.
        arguments, _tables = _arguments(tables, cache, request, out)
        self._run(self._kernels(cache.spec), tables.units, plan.nbytes, arguments)

    def prepare(self, layers: Sequence[LayerSource], layout: KVPoolLayout) -> None:
        """Compiles the kernel."""
        cache = self._cache(layers, layout)
        if cache is not None:
            self._kernels(cache.spec)

    def _cache(self, layers: Sequence[LayerSource], layout: KVPoolLayout) -> CacheTables | None:
        """None where no kernel packs these caches.  A worker has one set of them, which is looked at once."""
        if layout.tiling != "ttnn":
            return None
        if self._layers is not layers:
            self._layers = layers
            self._caches.clear()
        if layout not in self._caches:
            if len(self._caches) >= _KEPT_PLANS:
                self._caches.clear()
            self._caches[layout] = CacheTables.of(layers, layout)
        return self._caches[layout]

    def _tables(self, plan: ParcelPlan) -> PlanTables:
        found = self._plans.get(plan)
        if found is None:
            found = self._plans[plan] = PlanTables.of(plan)
            if len(self._plans) > _KEPT_PLANS:
                self._plans.popitem(last=False)
        self._plans.move_to_end(plan)
        return found

    def _run(self, kernel: Kernel, units: int, nbytes: int, arguments: NDArray[np.int64]) -> None:
        """Units are shared out in pieces of equal size, more of them than threads, for cores are not equally free."""
        address = arguments.ctypes.data
        pieces = min(units, self._threads * 4, max(1, nbytes // _PIECE_BYTES)) if self._pool is not None else 1
        if self._pool is None or pieces == 1:
            kernel.run(0, units, address)
            return
        ends = [units * (i + 1) // pieces for i in range(pieces)]
        left = iter(list(pairwise([0, *ends])))

        def work() -> None:
            for first, end in left:
                kernel.run(first, end, address)

        helpers = [self._pool.submit(work) for _ in range(min(self._threads, pieces) - 1)]
        work()
        for helper in helpers:
            helper.result()


@dataclass(frozen=True)
class PlanTables:
    """What a plan alone says: ``pages`` and ``starts`` as ``Table`` has them, in the order of the work.

    ``rank_heads``: the rank's head that each of the kernel's heads is; one that goes to two chips comes twice.
    ``room``: rows of a block from each tile row on.
    """

    pages: NDArray[np.int64]
    starts: NDArray[np.int64]
    room: NDArray[np.int64]
    rank_heads: NDArray[np.int64]
    units: int
    blocks: int
    block_size: int

    @classmethod
    def of(cls, plan: ParcelPlan) -> PlanTables:
        layout, blocks = plan.layout, plan.blocks
        program = compile_program(layout, 1, 1)
        down, across = program.rows // TILE, program.dims // TILE
        heads = [rank_head for share in plan.shares for rank_head, _ in share.heads]
        pages = np.empty((layout.layers, blocks, down, len(heads), 2, across), dtype=np.int64)
        for layer in range(layout.layers):
            for kv in (0, 1):
                rows = np.concatenate([plan.page_rows(share, layer, kv) for share in plan.shares], axis=1)
                pages[layer, :, :, :, kv] = rows.reshape(blocks, len(heads), down, across).transpose(0, 2, 1, 3)
        pages *= layout.page_pitch
        top = np.arange(down, dtype=np.int64) * TILE
        starts = (np.arange(blocks, dtype=np.int64)[:, None] * layout.block_size + top).reshape(-1)
        room = np.tile(np.minimum(layout.block_size - top, TILE), blocks)
        units = layout.layers * blocks * down
        return cls(pages, starts, room, np.array(heads, dtype=np.int64), units, blocks, layout.block_size)


@dataclass(frozen=True)
class CacheTables:
    """What the caches say: the kernel that reads them, ``bases`` ``[layers, 2]``, and strides in bytes of K and V."""

    spec: KernelSpec
    bases: NDArray[np.int64]
    block_stride: tuple[int, int]
    head_stride: tuple[int, int]
    token_stride: tuple[int, int]
    blocks: int
    block_size: int

    @classmethod
    def of(cls, layers: Sequence[LayerSource], layout: KVPoolLayout) -> CacheTables | None:
        """None where the layers, or K and V, are not alike, or of another dtype than kernels read."""
        k, v = layers[0].k, layers[0].v
        strides = k.stride(), v.stride()
        looks = {(each.dtype, each.shape) for layer in layers for each in (layer.k, layer.v)}
        if len(looks) > 1 or k.dtype not in _DTYPES or {(x.k.stride(), x.v.stride()) for x in layers} != {strides}:
            return None
        size, block_size = k.element_size(), k.shape[2]
        whole = block_size % FACE == 0 and layout.block_size % FACE == 0
        sides = []
        for kv, (_, _, token, dim) in enumerate(strides):
            program = compile_program(layout, kv, 1)
            order = program.dim_order or range(program.head_dim)
            dims = (*order, *[-1] * (program.dims - program.head_dim))
            sides.append(SideSpec(dims, dim, columns=whole and token == 1 and dim != 1))
        spec = KernelSpec(str(k.dtype).removeprefix("torch."), layout.codec, layout.page_pitch, *sides)
        bases = np.array([(layer.k.data_ptr(), layer.v.data_ptr()) for layer in layers], dtype=np.int64)
        block, head, token = ((strides[0][i] * size, strides[1][i] * size) for i in range(3))
        return cls(spec, bases, block, head, token, k.shape[0], block_size)


@dataclass(frozen=True)
class RequestTables:
    """What the request says: ``tokens`` (K's, V's) and ``counts`` as ``Table`` has them."""

    tokens: tuple[NDArray[np.int64], NDArray[np.int64]]
    counts: NDArray[np.int64]

    @classmethod
    def of(
        cls, cache: CacheTables, plan: PlanTables, block_table: torch.Tensor, first_block: int, tokens: int
    ) -> RequestTables:
        """IndexError where the request's tokens lie in no block of the cache: a kernel would read other memory."""
        first_token = first_block * plan.block_size
        mine = max(0, min(tokens - first_token, plan.blocks * plan.block_size))
        token = np.arange(first_token, first_token + mine, dtype=np.int64)
        table = block_table.numpy()
        place, row = np.divmod(token, cache.block_size)
        if mine and place[-1] >= len(table):
            raise IndexError(f"{tokens} tokens need {place[-1] + 1} blocks of {cache.block_size}; got {len(table)}")
        block = table[place]
        if mine and not 0 <= block.min() <= block.max() < cache.blocks:
            raise IndexError(f"block ids must lie in 0..{cache.blocks - 1}; got {block.min()} to {block.max()}")
        at = tuple(block * cache.block_stride[kv] + row * cache.token_stride[kv] for kv in (0, 1))
        counts = np.clip(mine - plan.starts, 0, plan.room)
        return cls((at[0], at[1]), counts)


def _arguments(
    plan: PlanTables, cache: CacheTables, request: RequestTables, out: torch.Tensor
) -> tuple[NDArray[np.int64], list[NDArray[np.int64]]]:
    """A kernel's argument, and the tables that it points to."""
    heads = [plan.rank_heads * cache.head_stride[kv] for kv in (0, 1)]
    tables = {
        Table.BASES: cache.bases,
        Table.HEADS_K: heads[0],
        Table.HEADS_V: heads[1],
        Table.TOKENS_K: request.tokens[0],
        Table.TOKENS_V: request.tokens[1],
        Table.STARTS: plan.starts,
        Table.COUNTS: request.counts,
        Table.PAGES: plan.pages,
    }
    arguments = np.zeros(len(Table), dtype=np.int64)
    for name, table in tables.items():
        assert table.dtype == np.int64 and table.flags.c_contiguous
        arguments[name] = table.ctypes.data
    arguments[Table.OUT] = out.data_ptr()
    arguments[Table.POSITIONS] = len(plan.starts)
    arguments[Table.HEADS] = len(plan.rank_heads)
    return arguments, list(tables.values())
