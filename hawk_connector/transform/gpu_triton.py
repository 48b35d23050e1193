"""Packing on a GPU with Triton: two launches a parcel, K of all layers and V of all layers.

Every element of the source is read once and every byte of the streams written once.  What the kernels do not know
(other tilings than TTNN's, layers that differ, pages that do not begin at multiples of 16 bytes) is packed by the
reference on the same device.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import ArrayLike

from ..layout.kv_pool import KVPoolLayout
from ..layout.tensor_layout import TILE, interleaved_dims
from ..plan.parcel import ChipShare, ParcelPlan
from .program import Program, compile_program
from .reference import LayerSource, pack_parcel

__all__ = ["TritonPacker", "kernel_constants"]

_SOURCES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}
_CODECS = {"float32": "float32", "bfloat16": "bfloat16", "bfp8": "block", "bfp4": "block", "bfp2": "block"}
# Bytes to which addresses must be multiples, so that threads move 16 bytes at once.
_VECTOR = 16
# Parcels of one request differ in blocks, and so in plan; few lengths come again and again.
_KEPT_PLANS = 64
# A prefill rank packs from one cache.
_KEPT_LAYERS = 4
_PAGES_PER_PROGRAM = 4
_WARPS = 4


@dataclass(frozen=True)
class _Tables:
    """A plan on the device, K or V.

    ``rows``: int32 ``[layers, blocks, heads, pages]``.  ``heads``: int32, the rank's.  ``dims``: int32 ``[head_dim]``,
    the source's dim for each stored one.
    """

    rows: torch.Tensor
    heads: torch.Tensor
    dims: torch.Tensor


@dataclass(frozen=True)
class _Caches:
    """K or V of all layers, which differ in their addresses alone.  ``addresses``: int64 ``[layers]`` on the device."""

    addresses: torch.Tensor
    strides: tuple[int, ...]
    block_size: int
    dtype: torch.dtype
    aligned: bool


@dataclass(frozen=True)
class _Seen:
    """Layers, and what was found out about them."""

    layers: tuple[LayerSource, ...]
    caches: tuple[_Caches, _Caches] | None


class TritonPacker:
    """Packs from caches on ``device``, on that device's current stream; used from one thread and stream at a time.

    The region may be on the device, or on the host: then the parcel is packed into device memory and copied by the
    copy engine, which leaves the processors to the model.  All of it is queued only: the bytes are there, and
    the arguments may be reused, when the stream has come so far.

    On a CPU it runs in Triton's interpreter (``TRITON_INTERPRET=1`` when Triton is first imported), for tests.  These
    also compile the kernel for NVIDIA's GPUs.  It has not run on one yet.
    """

    def __init__(self, device: torch.device) -> None:
        """ImportError where Triton is not installed."""
        from . import gpu_kernels

        self._kernel = gpu_kernels.pack_pages
        self._device = device
        self._plans: OrderedDict[tuple[ParcelPlan, int], _Tables] = OrderedDict()
        self._layers: OrderedDict[tuple[int, ...], _Seen] = OrderedDict()

    def pack(
        self,
        layers: Sequence[LayerSource],
        block_table: torch.Tensor,
        plan: ParcelPlan,
        first_block: int,
        tokens: int,
        out: torch.Tensor,
    ) -> None:
        """Writes a parcel's streams into ``out``, a uint8 ``[plan.nbytes]``: the same as ``reference.pack_parcel``.

        ``block_table``: best on the host, where its ids are checked: ValueError for one that the caches do not have,
        or where the table is too short.  A wrong id that reached a kernel would end the process' use of the GPU.
        """
        _check_table(layers[0].k, block_table, plan, first_block, tokens)
        on_device = torch.cuda.device(self._device) if self._device.type == "cuda" else contextlib.nullcontext()
        with on_device:
            caches = self._look_at(layers)
            target = out
            if out.device != self._device:
                target = torch.empty(plan.nbytes, dtype=torch.uint8, device=self._device)
            if caches is not None and _known(plan.layout) and target.data_ptr() % _VECTOR == 0:
                self._launch(caches, block_table, plan, first_block, tokens, target)
            else:
                pack_parcel(layers, block_table.to(self._device), plan, first_block, tokens, target)
            if target is not out:
                out.copy_(target, non_blocking=True)

    def prepare(self, layers: Sequence[LayerSource], layout: KVPoolLayout) -> None:
        """Compiles the kernels, by packing one block to nowhere."""
        heads, source_block = layers[0].k.shape[1:3]
        own = tuple((head, head) for head in range(min(heads, layout.heads)))
        plan = ParcelPlan(layout, (ChipShare(0, own),), 1)
        table = torch.zeros(-(-layout.block_size // source_block), dtype=torch.int64)
        scratch = torch.empty(plan.nbytes, dtype=torch.uint8, device=self._device)
        self.pack(layers, table, plan, 0, layout.block_size, scratch)

    def _launch(
        self,
        caches: tuple[_Caches, _Caches],
        block_table: torch.Tensor,
        plan: ParcelPlan,
        first_block: int,
        tokens: int,
        out: torch.Tensor,
    ) -> None:
        layout = plan.layout
        if layout.page_bytes < layout.page_pitch:
            # Whole rows are read, and the region may hold another request's bytes.
            out.view(plan.rows, layout.page_pitch)[:, layout.page_bytes :] = 0
        # Pageable memory that is copied "without blocking" has been read when the call returns.
        blocks = block_table.to(self._device, torch.int32, non_blocking=True)
        for kv, cache in enumerate(caches):
            tables = self._tables(plan, kv, len(cache.addresses))
            constants = kernel_constants(layout, kv, cache.block_size, cache.dtype, aligned=cache.aligned)
            heads = len(tables.heads)
            parts = -(-int(constants["COLUMNS"]) // int(constants["PAGES"]))
            programs = plan.blocks * heads * int(constants["TILE_ROWS"]) * parts
            self._kernel[(programs, len(cache.addresses))](
                cache.addresses,
                blocks,
                tables.heads,
                tables.rows,
                tables.dims,
                out,
                first_block * layout.block_size,
                tokens,
                *cache.strides,
                layout.page_pitch,
                heads,
                plan.blocks,
                **constants,
                num_warps=_WARPS,
            )

    def _tables(self, plan: ParcelPlan, kv: int, layers: int) -> _Tables:
        key = (plan, kv)
        found = self._plans.get(key)
        if found is None:
            # Heads of all chips, side by side.
            rows = np.stack(
                [
                    np.concatenate([plan.page_rows(share, layer, kv) for share in plan.shares], axis=1)
                    for layer in range(layers)
                ]
            )
            heads = [rank_head for share in plan.shares for rank_head, _ in share.heads]
            dims = compile_program(plan.layout, kv, 1).dim_order or range(plan.layout.head_dim)
            found = self._plans[key] = _Tables(*(self._table(table) for table in (rows, heads, dims)))
            if len(self._plans) > _KEPT_PLANS:
                self._plans.popitem(last=False)
        self._plans.move_to_end(key)
        return found

    def _table(self, values: ArrayLike) -> torch.Tensor:
        return torch.from_numpy(np.asarray(values, dtype=np.int32).reshape(-1)).to(self._device)

    def _look_at(self, layers: Sequence[LayerSource]) -> tuple[_Caches, _Caches] | None:
        """K and V as the kernel is told of them, None where it cannot take them.  Looked at once: a pack is short."""
        key = tuple(id(source) for source in layers)
        found = self._layers.get(key)
        if found is None:
            k, v = (self._caches_of([source.kind(kv) for source in layers]) for kv in (0, 1))
            # The sources are kept, so that no other object gets their ids.
            found = self._layers[key] = _Seen(tuple(layers), (k, v) if k is not None and v is not None else None)
            if len(self._layers) > _KEPT_LAYERS:
                self._layers.popitem(last=False)
        return found.caches

    def _caches_of(self, caches: Sequence[torch.Tensor]) -> _Caches | None:
        first = caches[0]
        if first.dtype not in _SOURCES or any(
            (cache.dtype, cache.shape, cache.stride()) != (first.dtype, first.shape, first.stride()) for cache in caches
        ):
            return None
        addresses = torch.tensor([cache.data_ptr() for cache in caches], dtype=torch.int64).to(self._device)
        return _Caches(addresses, first.stride(), first.shape[2], first.dtype, _aligned(caches))


@lru_cache(maxsize=64)
def kernel_constants(
    layout: KVPoolLayout, kv: int, source_block: int, dtype: torch.dtype, *, aligned: bool
) -> dict[str, str | int | bool]:
    """What ``gpu_kernels.pack_pages`` is compiled for: K (kv 0) or V (kv 1) from blocks of ``source_block`` tokens.

    ``aligned``: all rows of the source begin at multiples of 16 bytes.
    """
    program = compile_program(layout, kv, 1)
    columns = program.dims // TILE
    pages = 1
    while pages < min(columns, _PAGES_PER_PROGRAM):
        pages *= 2
    return {
        "SOURCE": _SOURCES[dtype],
        "SOURCE_BLOCK": source_block,
        "BLOCK": layout.block_size,
        "HEAD_DIM": layout.head_dim,
        "ORDER": _order(program),
        "ALIGNED": aligned,
        "TILE_ROWS": program.rows // TILE,
        "COLUMNS": columns,
        "PAGES": pages,
        "CODEC": _CODECS[layout.codec],
        "BITS": program.codec.bits,
    }


def _order(program: Program) -> str:
    if program.dim_order is None:
        return "plain"
    whole = tuple(int(dim) for dim in interleaved_dims(program.head_dim)) if program.head_dim % 2 == 0 else ()
    return "halves" if program.dim_order == whole else "table"


def _known(layout: KVPoolLayout) -> bool:
    """Whether the kernel packs into this layout."""
    return layout.tiling == "ttnn" and layout.codec in _CODECS and layout.page_pitch % _VECTOR == 0


def _aligned(caches: Sequence[torch.Tensor]) -> bool:
    """Whether every token's dims begin at a multiple of 16 bytes."""
    size = caches[0].dtype.itemsize
    strides = caches[0].stride()
    return (
        strides[3] == 1
        and all(stride * size % _VECTOR == 0 for stride in strides[:3])
        and all(cache.data_ptr() % _VECTOR == 0 for cache in caches)
    )


def _check_table(
    cache: torch.Tensor, block_table: torch.Tensor, plan: ParcelPlan, first_block: int, tokens: int
) -> None:
    blocks, size = cache.shape[0], cache.shape[2]
    needed = -(-min(tokens, (first_block + plan.blocks) * plan.layout.block_size) // size)
    if len(block_table) < needed:
        raise ValueError(f"{tokens} tokens need {needed} source blocks of {size} tokens; got {len(block_table)}")
    if block_table.device.type == "cpu" and len(block_table):
        low, high = (int(end) for end in block_table.aminmax())
        if low < 0 or high >= blocks:
            raise ValueError(f"source blocks must be in 0..{blocks - 1}; got {low if low < 0 else high}")
