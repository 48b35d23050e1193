"""Packing parcels: one interface, and the packer for each device.

``reference.pack_parcel`` says what a packer writes; every packer writes the same bytes.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Protocol

import torch

from ..layout.kv_pool import KVPoolLayout
from ..plan.parcel import ParcelPlan
from .reference import LayerSource, pack_parcel

__all__ = ["ParcelPacker", "ReferencePacker", "parcel_packer"]

_log = logging.getLogger(__name__)


class ParcelPacker(Protocol):
    """Packs parcels of one cache, one at a time."""

    def pack(
        self,
        layers: Sequence[LayerSource],
        block_table: torch.Tensor,
        plan: ParcelPlan,
        first_block: int,
        tokens: int,
        out: torch.Tensor,
    ) -> None:
        """Writes a parcel's streams into ``out``: arguments and bytes are those of ``reference.pack_parcel``.

        ``block_table`` may be in host memory and ``out`` on another device than the caches.
        """
        ...

    def prepare(self, layers: Sequence[LayerSource], layout: KVPoolLayout) -> None:
        """Compiles what packs of these caches for ``layout`` need, so that the first one need not."""
        ...


class ReferencePacker:
    """torch's operations, one layer at a time: every tiling, every device."""

    def pack(
        self,
        layers: Sequence[LayerSource],
        block_table: torch.Tensor,
        plan: ParcelPlan,
        first_block: int,
        tokens: int,
        out: torch.Tensor,
    ) -> None:
        device = layers[0].k.device
        target = out if out.device == device else torch.empty(plan.nbytes, dtype=torch.uint8, device=device)
        pack_parcel(layers, block_table.to(device), plan, first_block, tokens, target)
        if target is not out:
            out.copy_(target, non_blocking=True)

    def prepare(self, layers: Sequence[LayerSource], layout: KVPoolLayout) -> None:
        pass


def parcel_packer(device: torch.device, threads: int = 1) -> ParcelPacker:
    """The packer for caches on ``device``.  ``threads``: threads that pack one parcel together, on a CPU."""
    if device.type == "cpu":
        # llvmlite is needed, and loaded, only where there is something to pack.
        from .cpu_packer import CpuPacker

        return CpuPacker(threads)
    if device.type == "cuda":
        if find_spec("triton") is not None:
            from .gpu_triton import TritonPacker

            return TritonPacker(device)
        _log.warning("Triton, which comes with CUDA builds of torch, is not installed: torch packs parcels, slowly")
    return ReferencePacker()
