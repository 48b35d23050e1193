"""The parcels of all transfers on a prefill rank, from cut to packed: who waits, who is being packed, who has a region.

Order.  Parcels are packed in the order in which they became ready, those of *delivering* transfers (whose claimant is
reading) before the others.  The others leave room for one more parcel of the largest size: a decode side that has
given a request blocks can then always finish loading it, however many packed parcels wait for decode sides that have
no blocks left.  Without that room the two could wait for each other until a deadline.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from ..plan.pairing import Pairing
from .prefill_actions import Pack
from .regions import RegionAllocator
from .transfer import Parcel, ParcelState, Transfer

__all__ = ["PackJob", "ParcelQueue"]


@dataclass(frozen=True, slots=True)
class PackJob:
    """A pack that is out.  Its result counts only while ``parcel.job`` is this job's number."""

    transfer: Transfer
    parcel: Parcel
    region: int


class ParcelQueue:
    """``capacity``: bytes of the send buffer.  ``parcel_tokens``: tokens of a parcel, in whole decode blocks."""

    def __init__(self, capacity: int, parcel_tokens: int) -> None:
        self.regions = RegionAllocator(capacity)
        self._parcel_tokens = parcel_tokens
        self._queue: deque[tuple[Transfer, Parcel]] = deque()
        self._jobs: dict[int, PackJob] = {}
        self._next_job = 0
        self._room = 0

    @property
    def queued(self) -> int:
        return len(self._queue)

    @property
    def packs(self) -> int:
        return len(self._jobs)

    def idle(self, transfer: Transfer) -> bool:
        """Whether no pack of the transfer is out, a stale one included."""
        return not any(job.transfer is transfer for job in self._jobs.values())

    def cut(self, transfer: Transfer, pairing: Pairing) -> None:
        """Cuts the transfer into parcels for ``pairing``; what was packed for another layout is dropped."""
        for parcel in transfer.parcels:
            self.withdraw(transfer, parcel)
        transfer.pairing = pairing
        transfer.parcels = []
        layout = pairing.layout
        block_bytes = pairing.plan(1).nbytes
        if not block_bytes:
            return
        fitting = self.regions.capacity // block_bytes
        full = max(1, min(self._parcel_tokens // layout.block_size, fitting))
        transfer.parcel_blocks = full
        blocks = -(-transfer.tokens // layout.block_size)
        for index, first in enumerate(range(0, blocks, transfer.parcel_blocks)):
            count = min(transfer.parcel_blocks, blocks - first)
            tokens = min((first + count) * layout.block_size, transfer.tokens)
            transfer.parcels.append(Parcel(index, first, count, tokens, pairing.plan(count).nbytes))
        # A full parcel of this layout, whether or not this transfer is long enough to have one.
        self._room = max(self._room, pairing.plan(full).nbytes)

    def enqueue_computed(self, transfer: Transfer) -> None:
        """Queues the parcels whose tokens are computed."""
        for parcel in transfer.parcels:
            if parcel.state is ParcelState.WAITING and parcel.tokens <= transfer.computed:
                parcel.state = ParcelState.QUEUED
                self._queue.append((transfer, parcel))

    def start(self) -> list[Pack]:
        """Starts queued packs as far as the send buffer has room."""
        delivering = [entry for entry in self._queue if entry[0].claimant is not None]
        others = [entry for entry in self._queue if entry[0].claimant is None]
        started: list[Pack] = []
        for transfer, parcel in (*delivering, *others):
            region = self._allocate(parcel, keep_room=transfer.claimant is None)
            if region is None:
                break
            self._queue.remove((transfer, parcel))
            job, self._next_job = self._next_job, self._next_job + 1
            parcel.state, parcel.region, parcel.job = ParcelState.PACKING, region, job
            parcel.generation = transfer.generation
            self._jobs[job] = PackJob(transfer, parcel, region)
            assert transfer.pairing is not None
            plan = transfer.pairing.plan(parcel.blocks)
            started.append(Pack(job, transfer.id, parcel.first_block, transfer.tokens, region, plan))
        return started

    def take_job(self, job: int) -> PackJob | None:
        """The pack that has ended, which is out no longer; its region is the caller's to free or keep."""
        return self._jobs.pop(job, None)

    def withdraw(self, transfer: Transfer, parcel: Parcel) -> None:
        """Back to WAITING, and the region is freed, unless the parcel has ended.

        A pack that is out keeps its region until it reports; its result is discarded.
        """
        if parcel.state.ended:
            return
        if parcel.state is ParcelState.QUEUED:
            self._queue.remove((transfer, parcel))
        self.free(parcel)
        parcel.state, parcel.region, parcel.job = ParcelState.WAITING, None, None

    def free(self, parcel: Parcel) -> None:
        """Frees the region of a parcel that no pack is writing."""
        if parcel.region is not None and parcel.job is None:
            self.regions.release(parcel.region)
            parcel.region = None

    def _allocate(self, parcel: Parcel, keep_room: bool) -> int | None:
        region = self.regions.allocate(parcel.nbytes)
        if region is None or not keep_room or self.regions.held_regions == 1:
            return region
        if self.regions.largest_free < self._room:
            self.regions.release(region)
            return None
        return region
