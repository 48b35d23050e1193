"""Placement: whether a parcel's reads end in the pools or in stages, decided by counting.

*pool*: each read ends where the kernels read it.  *staged*: one read for each stream, into one contiguous buffer in
each bank, then copies inside the device.  Pools of one layer with scattered blocks cost a read for every few pages;
there the copies are cheaper than the reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from .parcel import ParcelPlan
from .runs import BankRuns, stage_copies
from .segments import Segments

__all__ = ["Placement", "PlacementCosts", "PlacementCounts", "count_placements", "stage_bytes", "stream_segments"]

Placement = Literal["pool", "staged"]


@dataclass(frozen=True, slots=True)
class PlacementCosts:
    """What reads and copies cost, in bytes that the link carries in the same time.

    ``read_bytes``: a read; reads and bytes overlap, so reads longer than this cost nothing beside their bytes.  Small
    reads of Mooncake 0.3.13 over TCP on loopback take 18 µs (benchmarks/read_cost.py), in which it carries about
    16 KiB of a large one; what RDMA takes was not measured.  ``copy_share``: a byte copied inside a chip; 0.2 is
    HDR's 25 GB/s against the 128 GB/s that is a quarter of what Tenstorrent gives for a p150's GDDR6 (a copied byte is
    read and written, and decode runs beside it).  It was not measured.
    """

    read_bytes: int = 16 << 10
    copy_share: float = 0.2


@dataclass(frozen=True, slots=True)
class PlacementCounts:
    """A parcel counted in both placements.

    ``nbytes``: of the parcel.  ``pool_reads``, ``staged_reads``: reads of each placement.  ``copies``: copies that
    staging adds.  ``copied_bytes``: bytes copied in the chip that gets most.
    """

    nbytes: int
    pool_reads: int
    staged_reads: int
    copies: int
    copied_bytes: int

    def cost(self, placement: Placement, costs: PlacementCosts) -> float:
        """Bytes that the link carries in the time that the placement takes."""
        if placement == "pool":
            return max(self.nbytes, self.pool_reads * costs.read_bytes)
        return max(self.nbytes, self.staged_reads * costs.read_bytes) + self.copied_bytes * costs.copy_share

    def choice(self, costs: PlacementCosts) -> Placement:
        """The cheaper one; the pools themselves where both cost the same."""
        return "staged" if self.cost("staged", costs) < self.cost("pool", costs) else "pool"


def count_placements(plan: ParcelPlan, runs: BankRuns) -> PlacementCounts:
    """Counts a parcel whose runs in the pools are ``runs``."""
    per_chip = np.bincount(runs.chip, weights=runs.length, minlength=plan.layout.chips)
    return PlacementCounts(
        nbytes=runs.nbytes,
        pool_reads=runs.count,
        staged_reads=len(plan.streams()),
        copies=stage_copies(plan, runs, 0).count,
        copied_bytes=int(per_chip.max()),
    )


def stage_bytes(plan: ParcelPlan) -> int:
    """Bytes that a staged parcel takes in every bank of every chip: its longest stream."""
    return max((stream.length for stream in plan.streams()), default=0)


def stream_segments(plan: ParcelPlan, region: int, starts: Sequence[int]) -> Segments:
    """One read for each stream of the parcel at remote address ``region``; stream i ends at local ``starts[i]``."""
    streams = plan.streams()
    return Segments(
        np.array([region + stream.offset for stream in streams], dtype=np.int64),
        np.array(starts, dtype=np.int64),
        np.array([stream.length for stream in streams], dtype=np.int64),
    )
