"""Path *bounce*: streams are read into host memory, and the device's banks are written from there.

It needs no kernel module and works on any card that TTNN opens.  Writing one parcel overlaps reading the next, as both
run on the reader's threads and each parcel has memory of its own: with two ``read_threads`` it is a double buffer.

A parcel is written *before* prefill is told that it was read (Done), as it lands before that on the direct path: the
blocks are the request's own until the load is reported, so bytes that Gone disowns afterwards reach nobody else's
blocks.  Writing after Accepted would keep them out of the device, and cost the time of a message for each parcel in
which its memory does nothing.

Memory of a read that failed is not used again before the fence: a late byte would land in another parcel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hawk_connector.errors import CapacityError
from hawk_connector.layout.kv_pool import KVPoolLayout
from hawk_connector.plan.any_plan import Plan
from hawk_connector.plan.parcel import ParcelPlan
from hawk_connector.plan.placement import Placement, PlacementCosts, count_placements, stream_segments
from hawk_connector.plan.runs import BankRuns, bank_runs
from hawk_connector.plan.segments import Segments

from ..device.interface import Pools
from .flushing import last_writes
from .host_memory import host_memory
from .on_the_way import OnTheWay
from .parcels import packed_parcel
from .room import Room
from .stages import Stages
from .tally import LandingCounts, Tally

__all__ = ["BounceLanding"]


@dataclass(frozen=True)
class _Parcel:
    """A parcel in host memory at ``offset``.  ``stage``: address of its stages, None where it goes to the pools."""

    plan: ParcelPlan
    runs: BankRuns
    offset: int
    stage: int | None


class BounceLanding:
    """Lands in ``pools`` through ``nbytes`` of host memory.

    ``wait_s``: how long a parcel may wait for room in it.  ``stages``: for staged placement.  ``placement``: None
    lets the counts of each parcel decide by ``costs``, with device writes in the place of reads, where there are
    stages; give none for a device that does not copy by itself.
    """

    def __init__(
        self,
        pools: Pools,
        nbytes: int,
        wait_s: float,
        *,
        stages: Stages | None = None,
        placement: Placement | None = None,
        costs: PlacementCosts | None = None,
    ) -> None:
        if placement == "staged" and stages is None:
            raise ValueError("staged placement needs stages")
        self._pools = pools
        self.stages = stages
        self._placement = placement
        self._costs = costs or PlacementCosts()
        self._memory = host_memory(nbytes)
        self._start = int(self._memory.ctypes.data)
        self._room = Room(
            nbytes,
            wait_s,
            "bounce buffer",
            "Raise tt_plugin.landing.bounce_buffer_bytes, or lower parcel_tokens on the prefill side.",
        )
        self._tally = Tally(pools.layout)
        self._on_the_way: OnTheWay[_Parcel] = OnTheWay("bounce buffer")

    @property
    def layout(self) -> KVPoolLayout:
        return self._pools.layout

    @property
    def num_blocks(self) -> int:
        return self._pools.num_blocks

    @property
    def counts(self) -> LandingCounts:
        return self._tally.counts

    @property
    def held_bytes(self) -> int:
        """Bytes of host memory that parcels hold now; 0 when idle."""
        return self._room.held_bytes

    def regions(self) -> Sequence[tuple[int, int]]:
        return [(self._start, len(self._memory))]

    def segments(self, plan: Plan, region: int, block_ids: Sequence[int], skip_blocks: int) -> Segments:
        """A read for each stream, whole: blocks that decode has already are read with it and not written.

        Waits for room; CapacityError where there is none in time.
        """
        parcel = packed_parcel(plan, self.layout)
        runs = bank_runs(parcel, block_ids, self._pools.buffer_addresses, self.num_blocks, skip_blocks)
        if not runs.count:
            return stream_segments(ParcelPlan(parcel.layout, (), parcel.blocks), region, [])
        offset = self._room.take(parcel.nbytes)
        try:
            stage = self._take_stage(parcel, runs)
        except CapacityError:
            self._room.give_back(offset)
            raise
        start = self._start + offset
        self._on_the_way.put(start, _Parcel(parcel, runs, offset, stage))
        return stream_segments(parcel, region, [start + stream.offset for stream in parcel.streams()])

    def landed(self, segments: Segments) -> tuple[tuple[int, int, int], ...]:
        """Writes the parcel to the device, and returns once it is in the device's memory.

        DeviceError where the device fails; the parcel's memory is then held until ``release``.
        """
        if not segments.count:
            return ()
        parcel = self._on_the_way.find(segments)
        writes, copies = parcel.runs, 0
        if self.stages is None or parcel.stage is None:
            self._write(parcel, writes)
            self._pools.device.flush(last_writes(writes))
        else:
            writes = self.stages.streams(parcel.plan, parcel.stage)
            self._write(parcel, writes)
            copies = self.stages.copy_out(parcel.plan, parcel.runs, parcel.stage)
        self.release(segments)
        runs = parcel.runs
        return self._tally.landed(
            runs.chip * self.layout.banks + runs.bank,
            runs.length,
            staged=parcel.stage is not None,
            device_writes=writes.count,
            copies=copies,
        )

    def release(self, segments: Segments) -> None:
        if not segments.count:
            return
        parcel = self._on_the_way.take(segments)
        if parcel.stage is not None and self.stages is not None:
            self.stages.give_back(parcel.stage)
        self._room.give_back(parcel.offset)

    def fill(self) -> tuple[int, ...]:
        return self._tally.fill()

    def _take_stage(self, plan: ParcelPlan, runs: BankRuns) -> int | None:
        stages = self.stages
        if stages is None or self._placement == "pool":
            return None
        if self._placement is None and not (
            stages.fits(plan) and count_placements(plan, runs).choice(self._costs) == "staged"
        ):
            return None
        return stages.take(plan)

    def _write(self, parcel: _Parcel, runs: BankRuns) -> None:
        """One device write for each run."""
        device = self._pools.device
        columns = (runs.offset, runs.chip, runs.bank, runs.address, runs.length)
        for offset, chip, bank, address, length in zip(*(column.tolist() for column in columns), strict=True):
            first = parcel.offset + offset
            device.write(chip, bank, address, self._memory[first : first + length])
