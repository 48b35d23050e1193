"""BlockPlan: a parcel of mode *direct*, which is read where it lies, from vLLM's cache into vLLM's cache.

Nothing is packed, so the parcel has no bytes of its own: it is the blocks that the prefill side names, in every layer.
Whole blocks move.  One read fetches a run of blocks of one layer that are neighbours on both sides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..layout.cache_layout import CacheLayout, CacheMemory
from .segments import Segments

__all__ = ["BlockPlan", "RemoteBlocks", "block_segments"]

_MAX_ADDRESS = 1 << 63


@dataclass(frozen=True, slots=True)
class RemoteBlocks:
    """Blocks of the prefill side's cache.  ``bases``: address of each layer's first block.  ``ids``: vLLM's."""

    bases: tuple[int, ...]
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BlockPlan:
    """``blocks`` of vLLM's blocks, equal on both sides.  ``remote``: which, once the prefill side has said so."""

    layout: CacheLayout
    blocks: int
    remote: RemoteBlocks | None = None

    @property
    def nbytes(self) -> int:
        return self.blocks * self.layout.bytes_per_block

    def at(self, bases: tuple[int, ...], ids: tuple[int, ...]) -> BlockPlan:
        """The plan for these blocks of the peer.  ValueError where they are not as many, or past any address."""
        layout = self.layout
        if len(bases) != layout.layers or len(ids) != self.blocks:
            raise ValueError(
                f"{self.blocks} blocks in {layout.layers} layers need as many ids and addresses; "
                f"got {len(ids)} and {len(bases)}"
            )
        last = max(bases) + (max(ids) + 1) * layout.split * layout.block_stride
        if min(ids) < 0 or min(bases) < 0 or last >= _MAX_ADDRESS:
            raise ValueError(f"blocks {min(ids)}..{max(ids)} reach past every address, to {last:#x}")
        return BlockPlan(layout, self.blocks, RemoteBlocks(bases, ids))


def block_segments(plan: BlockPlan, memory: CacheMemory, block_ids: Sequence[int], skip_blocks: int = 0) -> Segments:
    """Reads that bring the plan's blocks into ``block_ids`` of ``memory``.

    ``block_ids``: vLLM's block for each block of the plan; where they are fewer, the last blocks are not read.
    ``skip_blocks``: leading blocks that decode has already.  Raises ValueError where an id does not fit the cache,
    or the plan does not say where its blocks are.
    """
    layout, remote = plan.layout, plan.remote
    if remote is None or layout != memory.layout:
        raise ValueError("the plan is of another cache, or the prefill side has not said where its blocks lie")
    if not skip_blocks <= len(block_ids) <= plan.blocks:
        raise ValueError(
            f"the parcel has {plan.blocks} blocks, {skip_blocks} of them skipped; got {len(block_ids)} block ids"
        )
    local = _blocks(block_ids[skip_blocks:], layout)
    if local.size and not 0 <= local.min() <= local.max() < memory.num_blocks:
        most = memory.num_blocks // layout.split - 1
        raise ValueError(f"block ids must lie in 0..{most}; got {list(block_ids[skip_blocks:])[:8]}")
    theirs = _blocks(remote.ids[skip_blocks : len(block_ids)], layout)
    starts, counts = _runs(theirs, local, join=layout.dense)
    stride = layout.block_stride
    remote_bases = np.array(remote.bases, dtype=np.int64)[:, None]
    local_bases = np.array(memory.bases, dtype=np.int64)[:, None]
    length = np.broadcast_to(counts * layout.block_bytes, (layout.layers, len(counts)))
    return Segments(
        (remote_bases + theirs[starts] * stride).reshape(-1),
        (local_bases + local[starts] * stride).reshape(-1),
        np.ascontiguousarray(length).reshape(-1),
    )


def _blocks(ids: Sequence[int], layout: CacheLayout) -> NDArray[np.int64]:
    """The layout's blocks of vLLM's."""
    found = np.asarray(ids, dtype=np.int64)[:, None] * layout.split + np.arange(layout.split, dtype=np.int64)
    return found.reshape(-1)


def _runs(
    remote: NDArray[np.int64], local: NDArray[np.int64], *, join: bool
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(first index, count) of each run of blocks that follow each other on both sides; else of each block."""
    if not len(local):
        return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    breaks = np.ones(len(local), dtype=np.bool_)
    if join:
        breaks[1:] = (np.diff(remote) != 1) | (np.diff(local) != 1)
    starts = np.flatnonzero(breaks)
    return starts, np.diff(starts, append=len(local))
