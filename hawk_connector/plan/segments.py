"""Which reads fetch a parcel straight into the pools: one for each run, merged where neighbours touch.

What does not depend on decode's block ids (which page begins which run, where it lies in the parcel, how long it is)
is worked out once for each plan and kept; planning a parcel then is a few numpy operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from .parcel import ParcelPlan

__all__ = ["PoolPlacement", "Segments", "pool_segments", "request_segments"]


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

    def reversed(self) -> Segments:
        """The same bytes the other way: each segment from its local to its remote address."""
        return Segments(self.local, self.remote, self.length)

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

    @cached_property
    def flat_origins(self) -> NDArray[np.int64]:
        """``origins`` as int64 ``[chips * banks]``."""
        return np.ascontiguousarray(self.origins, dtype=np.int64).reshape(-1)

    @cached_property
    def buffers(self) -> NDArray[np.int64]:
        """``buffer_addresses`` as int64 ``[pools]``."""
        return np.asarray(self.buffer_addresses, dtype=np.int64)


def pool_segments(
    plan: ParcelPlan,
    region: int,
    block_ids: Sequence[int],
    placement: PoolPlacement,
    skip_blocks: int = 0,
) -> Segments:
    """Reads that land a parcel in the pools.

    ``region``: remote address of the parcel.  ``block_ids``: decode's block for each block of the parcel; where they
    are fewer, the last blocks are not read.  ``skip_blocks``: leading blocks that decode already has and does not read.
    Raises ValueError where a block id does not fit the pool, or there are too many.
    """
    if not skip_blocks <= len(block_ids) <= plan.blocks:
        raise ValueError(
            f"the parcel has {plan.blocks} blocks, {skip_blocks} of them skipped; got {len(block_ids)} block ids"
        )
    ids = np.asarray(block_ids, dtype=np.int64)[skip_blocks:]
    return _segments(plan, [region], ids[None, :], placement, skip_blocks)[0]


def request_segments(
    plan: ParcelPlan, regions: Sequence[int], block_ids: NDArray[np.int64], placement: PoolPlacement
) -> list[Segments]:
    """``pool_segments`` of several parcels of one plan at once.

    ``regions``: remote address of each parcel.  ``block_ids``: int64 ``[parcels, blocks]``.
    """
    if block_ids.shape != (len(regions), plan.blocks):
        raise ValueError(
            f"{len(regions)} parcels of {plan.blocks} blocks need as many block ids; got shape {block_ids.shape}"
        )
    return _segments(plan, regions, np.ascontiguousarray(block_ids, dtype=np.int64), placement, 0)


@dataclass(frozen=True, slots=True)
class _Reads:
    """The reads of a parcel before any are merged, in stream order; int64 ``[reads]`` where nothing else is said.

    ``remote``: offset in the parcel, bytes.  ``length``: bytes.  ``origin``: chip times banks.  ``pool``: pool.
    ``start``: index of the read's first page among all pairs (block, run) of the parcel, block by block.
    ``first_page``: int64 ``[runs]``, first page of each run of a unit.  ``follows``: bool ``[reads - 1]``, whether
    the next read begins in the parcel where this one ends; all do, but where blocks were skipped.
    """

    remote: NDArray[np.int64]
    length: NDArray[np.int64]
    origin: NDArray[np.int64]
    pool: NDArray[np.int64]
    start: NDArray[np.int64]
    first_page: NDArray[np.int64]
    follows: NDArray[np.bool_]


@lru_cache(maxsize=64)
def _reads(plan: ParcelPlan, skip_blocks: int, end_block: int) -> _Reads:
    """Reads of the parcel's blocks ``skip_blocks`` up to, not including, ``end_block``."""
    layout = plan.layout
    pitch = layout.page_pitch
    pool = np.arange(layout.pools, dtype=np.int64)[:, None, None]
    block = np.arange(skip_blocks, end_block, dtype=np.int64)[:, None]
    runs = sum(len(of_class) for share in plan.shares for of_class in plan.pages(share).runs)
    columns: list[list[NDArray[np.int64]]] = [[], [], [], [], []]
    first_pages: list[int] = []
    for share in plan.shares:
        pages = plan.pages(share)
        for cls, first_row in enumerate(plan.class_rows(share)):
            count, of_class = pages.class_rows[cls], pages.runs[cls]
            sizes = np.array([run.count for run in of_class], dtype=np.int64)
            before = np.cumsum(sizes) - sizes
            row = first_row + (pool * plan.blocks + block) * count + before
            numbers = np.arange(len(first_pages), len(first_pages) + len(of_class), dtype=np.int64)
            first_pages += [run.first_page for run in of_class]
            start = (block - skip_blocks) * runs + numbers
            for column, value in zip(
                columns, (row * pitch, sizes * pitch, np.int64(share.chip * layout.banks), pool, start), strict=True
            ):
                column.append(np.broadcast_to(value, row.shape).reshape(-1))
    joined = [np.concatenate(column) if column else np.zeros(0, dtype=np.int64) for column in columns]
    for array in joined:
        array.setflags(write=False)  # they are handed out as they are
    remote, length, origin, pools, starts = joined
    follows = remote[1:] == remote[:-1] + length[:-1]
    return _Reads(remote, length, origin, pools, starts, np.array(first_pages, dtype=np.int64), follows)


def _segments(
    plan: ParcelPlan, regions: Sequence[int], ids: NDArray[np.int64], placement: PoolPlacement, skip_blocks: int
) -> list[Segments]:
    """Segments of each parcel; ``ids``: int64 ``[parcels, blocks that are read]``."""
    layout = plan.layout
    # As unsigned numbers the negative ones are the largest.
    if ids.size and ids.view(np.uint64).max() >= placement.num_blocks:
        raise ValueError(f"block ids must lie in 0..{placement.num_blocks - 1}; got {ids.min()}..{ids.max()}")
    if layout.max_blocks is not None and placement.num_blocks > layout.max_blocks:
        raise ValueError(f"{layout.banks} shards hold {layout.max_blocks} blocks; the pool has {placement.num_blocks}")
    reads = _reads(plan, skip_blocks, skip_blocks + ids.shape[1])
    # Bank and offset depend on block and run alone, not on the pool.
    page = (ids * layout.pages_per_unit)[:, :, None] + reads.first_page
    page = page.reshape(len(ids), -1)
    bank, offset = layout.rule.place(page)
    channel = bank[:, reads.start] + reads.origin
    local = placement.flat_origins[channel] + (offset[:, reads.start] + placement.buffers[reads.pool])
    return [_merged(reads, region, local[parcel], channel[parcel]) for parcel, region in enumerate(regions)]


def _merged(reads: _Reads, region: int, local: NDArray[np.int64], channel: NDArray[np.int64]) -> Segments:
    """Joins reads that touch on both sides and end in one bank of one chip."""
    length = reads.length
    touches = local[1:] == local[:-1] + length[:-1]
    if not touches.any():
        return Segments(reads.remote + region, local, length)
    touches &= reads.follows
    touches &= channel[1:] == channel[:-1]
    starts = np.flatnonzero(np.concatenate((_FIRST, ~touches)))
    return Segments(reads.remote[starts] + region, local[starts], np.add.reduceat(length, starts))


_FIRST = np.ones(1, dtype=np.bool_)
