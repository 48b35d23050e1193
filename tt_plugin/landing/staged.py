"""Path *direct*, placement *staged*: streams are read into the stages in the banks, then copied inside the device."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hawk_connector.decode.landing import Landing
from hawk_connector.layout.kv_pool import KVPoolLayout
from hawk_connector.plan.any_plan import Plan
from hawk_connector.plan.parcel import ParcelPlan
from hawk_connector.plan.placement import Placement, PlacementCosts, count_placements, stream_segments
from hawk_connector.plan.runs import BankRuns, bank_runs
from hawk_connector.plan.segments import Segments

from ..device.interface import Pools
from .parcels import packed_parcel
from .stages import Stages
from .tally import LandingCounts, Tally

__all__ = ["StagedLanding"]


@dataclass(frozen=True)
class _Staged:
    """A parcel on its way through the stages at ``address``."""

    plan: ParcelPlan
    runs: BankRuns
    address: int


class StagedLanding:
    """A landing that stages parcels where that is cheaper, and leaves the others to a landing in the pools.

    ``direct``: that landing.  ``origins``: int64 ``[chips, banks]``, host address of each bank's first byte.
    ``placement``: None lets the counts of each parcel decide, by ``costs``.
    """

    def __init__(
        self,
        pools: Pools,
        direct: Landing,
        stages: Stages,
        origins: NDArray[np.int64],
        *,
        placement: Placement | None = None,
        costs: PlacementCosts | None = None,
    ) -> None:
        self._pools = pools
        self._direct = direct
        self._stages = stages
        self._origins = np.ascontiguousarray(origins, dtype=np.int64)
        self._placement = placement
        self._costs = costs or PlacementCosts()
        self._tally = Tally(pools.layout)
        self._waiting: dict[int, _Staged] = {}  # by the host address of the parcel's first byte
        self._lock = threading.Lock()

    @property
    def layout(self) -> KVPoolLayout:
        return self._pools.layout

    @property
    def num_blocks(self) -> int:
        return self._pools.num_blocks

    @property
    def counts(self) -> LandingCounts:
        """Of staged parcels."""
        return self._tally.counts

    @property
    def held_bytes(self) -> int:
        """Bytes of each bank's stage that parcels hold now."""
        return self._stages.room.held_bytes

    def regions(self) -> Sequence[tuple[int, int]]:
        """The stages, and the pools where some parcels go there directly."""
        stages = [(int(o) + self._stages.address, self._stages.bytes_per_bank) for o in self._origins.reshape(-1)]
        return stages if self._placement == "staged" else [*self._direct.regions(), *stages]

    def segments(self, plan: Plan, region: int, block_ids: Sequence[int], skip_blocks: int) -> Segments:
        """Staged parcels are read whole: blocks that decode has already are not copied, but a stream is one read."""
        parcel = packed_parcel(plan, self.layout)
        runs = bank_runs(parcel, block_ids, self._pools.buffer_addresses, self.num_blocks, skip_blocks)
        if not runs.count or self._chosen(parcel, runs) == "pool":
            return self._direct.segments(parcel, region, block_ids, skip_blocks)
        address = self._stages.take(parcel)
        starts = [int(self._origins[s.chip, s.page_class]) + address for s in parcel.streams()]
        segments = stream_segments(parcel, region, starts)
        with self._lock:
            self._waiting[starts[0]] = _Staged(parcel, runs, address)
        return segments

    def landed(self, segments: Segments) -> tuple[tuple[int, int, int], ...]:
        """Copies from the stages into the pools; returns once the copies are in memory."""
        staged = self._staged(segments)
        if staged is None:
            return self._direct.landed(segments)
        copies = self._stages.copy_out(staged.plan, staged.runs, staged.address)
        self.release(segments)
        runs = staged.runs
        channel = runs.chip * self.layout.banks + runs.bank
        return self._tally.landed(channel, runs.length, staged=True, copies=copies)

    def release(self, segments: Segments) -> None:
        staged = self._staged(segments)
        if staged is None:
            self._direct.release(segments)
            return
        with self._lock:
            del self._waiting[int(segments.local[0])]
        self._stages.give_back(staged.address)

    def fill(self) -> tuple[int, ...]:
        return tuple(a + b for a, b in zip(self._direct.fill(), self._tally.fill(), strict=True))

    def _chosen(self, plan: ParcelPlan, runs: BankRuns) -> Placement:
        if self._placement is not None:
            return self._placement
        if not self._stages.fits(plan):
            return "pool"
        return count_placements(plan, runs).choice(self._costs)

    def _staged(self, segments: Segments) -> _Staged | None:
        if not segments.count:
            return None
        with self._lock:
            return self._waiting.get(int(segments.local[0]))
