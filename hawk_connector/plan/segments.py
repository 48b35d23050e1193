"""Which reads fetch a parcel straight into the pools: one for each run, merged where neighbours touch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .parcel import ParcelPlan

__all__ = ["PoolPlacement", "Segments", "pool_segments"]


@dataclass(frozen=True)
class Segments:
    """RDMA reads: from ``remote`` to ``local`` address, ``length`` bytes each; three int64 arrays of one length."""

    remote: NDArray[np.int64]
    local: NDArray[np.int64]
    length: NDArray[np.int64]

    def __post_init__(self) -> None:
        if not len(self.remote) == len(self.local) == len(self.length):
            raise ValueError(
                "segments need one length for each pair of addresses; got "
                f"{len(self.remote)} remote, {len(self.local)} local, {len(self.length)} lengths"
            )

    @property
    def count(self) -> int:
        return len(self.length)

    @property
    def nbytes(self) -> int:
        return int(self.length.sum())

    def batches(self, size: int) -> list[Segments]:
        """The same reads in batches of at most ``size``."""
        cuts = range(0, self.count, size)
        return [Segments(self.remote[c : c + size], self.local[c : c + size], self.length[c : c + size]) for c in cuts]


@dataclass(frozen=True)
class PoolPlacement:
    """Where the pools lie in this process.

    ``origins``: int64 ``[chips, banks]``, host address of each bank's first byte (that of the bank's base address).
    ``buffer_addresses``: device address of each pool, relative to the bank's base; equal in every bank and chip.
    ``num_blocks``: blocks of a pool.
    """

    origins: NDArray[np.int64]
    buffer_addresses: tuple[int, ...]
    num_blocks: int


def pool_segments(
    plan: ParcelPlan,
    region: int,
    block_ids: Sequence[int],
    placement: PoolPlacement,
    skip_blocks: int = 0,
) -> Segments:
    """Reads that land a parcel in the pools.

    ``region``: remote address of the parcel.  ``block_ids``: decode's block for each block of the parcel.
    ``skip_blocks``: leading blocks that decode already has and does not read.
    Raises ValueError where a block id does not fit the pool.
    """
    layout = plan.layout
    if len(block_ids) != plan.blocks:
        raise ValueError(f"the parcel has {plan.blocks} blocks; got {len(block_ids)} block ids")
    ids = np.asarray(block_ids, dtype=np.int64)[skip_blocks:]
    if len(ids) and not 0 <= ids.min() <= ids.max() < placement.num_blocks:
        raise ValueError(f"block ids must lie in 0..{placement.num_blocks - 1}; got {ids.min()}..{ids.max()}")
    buffers = np.asarray(placement.buffer_addresses, dtype=np.int64)
    pitch, banks = layout.page_pitch, layout.banks
    pool = np.arange(layout.pools, dtype=np.int64)[:, None]
    block = np.arange(skip_blocks, plan.blocks, dtype=np.int64)
    remote: list[NDArray[np.int64]] = []
    local: list[NDArray[np.int64]] = []
    length: list[NDArray[np.int64]] = []
    bank_of: list[NDArray[np.int64]] = []
    for share in plan.shares:
        pages = plan.pages(share)
        for cls, first_row in enumerate(plan.class_rows(share)):
            count, runs = pages.class_rows[cls], pages.runs[cls]
            if not count or not len(ids):
                continue
            first = np.array([run.first_page for run in runs], dtype=np.int64)
            sizes = np.array([run.count for run in runs], dtype=np.int64)
            before = np.cumsum(sizes) - sizes
            row = first_row + ((pool * plan.blocks + block) * count)[:, :, None] + before
            page = np.broadcast_to((ids * layout.pages_per_unit)[None, :, None] + first, row.shape)
            bank = page % banks
            address = placement.origins[share.chip][bank] + buffers[:, None, None] + page // banks * pitch
            remote.append((region + row * pitch).reshape(-1))
            local.append(address.reshape(-1))
            length.append(np.broadcast_to(sizes * pitch, row.shape).reshape(-1))
            bank_of.append((share.chip * banks + bank).reshape(-1))
    if not remote:
        empty = np.zeros(0, dtype=np.int64)
        return Segments(empty, empty, empty)
    return _merged(np.concatenate(remote), np.concatenate(local), np.concatenate(length), np.concatenate(bank_of))


def _merged(
    remote: NDArray[np.int64], local: NDArray[np.int64], length: NDArray[np.int64], bank: NDArray[np.int64]
) -> Segments:
    """Joins reads that touch on both sides and end in one bank."""
    touches = (
        (remote[1:] == remote[:-1] + length[:-1]) & (local[1:] == local[:-1] + length[:-1]) & (bank[1:] == bank[:-1])
    )
    starts = np.concatenate(([0], np.flatnonzero(~touches) + 1))
    return Segments(remote[starts], local[starts], np.add.reduceat(length, starts))
