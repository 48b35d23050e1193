"""The parcels of all transfers on a prefill rank, from cut to packed: who waits, who is being packed, who has a region.

Order.  Parcels are packed in the order in which they became ready, those of *delivering* transfers (whose claimant is
reading) before the others.  The others leave room for one more parcel of the largest size: a decode side that has
given a request blocks can then always finish loading it, however many packed parcels wait for decode sides that have
no blocks left.  Without that room the two could wait for each other until a deadline.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass

from ..plan.block_plan import BlockPlan
from ..plan.pairing import AnyPairing, DirectPairing
from ..plan.parcel import ParcelPlan
from ..plan.raw_plan import RawPlan
from .messages import MAX_BLOCKS_NAMED
from .prefill_actions import Hash, Pack, Settle
from .regions import RegionAllocator
from .transfer import Parcel, ParcelState, Transfer

__all__ = ["HashJob", "PackJob", "ParcelQueue"]


@dataclass(frozen=True, slots=True)
class PackJob:
    """A pack that is out.  Its result counts only while ``parcel.job`` is this job's number.

    ``region``: None for a parcel that is read in place.
    """

    transfer: Transfer
    parcel: Parcel
    region: int | None


@dataclass(frozen=True, slots=True)
class HashJob:
    """A digest that is being computed.  It counts only while ``parcel.hash_job`` is this job's number."""

    transfer: Transfer
    parcel: Parcel
    skip_blocks: int


class ParcelQueue:
    """``capacity``: bytes of the send buffer.  ``parcel_tokens``, ``parcel_bytes``: what a parcel has at most, in whole
    decode blocks, of which it has one at least."""

    def __init__(self, capacity: int, parcel_tokens: int, parcel_bytes: int) -> None:
        self.regions = RegionAllocator(capacity)
        self._parcel_tokens = parcel_tokens
        self._parcel_bytes = parcel_bytes
        self._queue: deque[tuple[Transfer, Parcel]] = deque()
        self._jobs: dict[int, PackJob] = {}
        self._hashes: dict[int, HashJob] = {}
        self._owners: dict[int, Transfer] = {}  # of the regions that are held
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

    def cut(self, transfer: Transfer, pairing: AnyPairing) -> None:
        """Cuts the transfer into parcels for ``pairing``; what was packed for another layout is dropped."""
        for parcel in transfer.parcels:
            self.withdraw(transfer, parcel)
        transfer.pairing = pairing
        transfer.parcels = []
        size, unit = pairing.block_size, pairing.granule
        in_place = isinstance(pairing, DirectPairing)
        unit_bytes = pairing.parcel(0, unit, unit * size).nbytes
        if not unit_bytes:
            return
        fitting = MAX_BLOCKS_NAMED if in_place else self.regions.capacity // unit_bytes * unit
        wanted = min(self._parcel_tokens // size // unit, self._parcel_bytes // unit_bytes) * unit
        full = max(unit, min(wanted, fitting))
        transfer.parcel_blocks = full
        blocks = -(-transfer.tokens // size)
        for index, first in enumerate(range(0, blocks, full)):
            count = min(full, blocks - first)
            tokens = min((first + count) * size, transfer.tokens)
            nbytes = pairing.parcel(first, count, transfer.tokens).nbytes
            transfer.parcels.append(Parcel(index, first, count, tokens, nbytes, in_place))
        if not in_place:
            # A full parcel of this layout, whether or not this transfer is long enough to have one.
            self._room = max(self._room, pairing.parcel(0, full, full * size).nbytes)

    def enqueue_computed(self, transfer: Transfer) -> list[Settle]:
        """Queues the parcels whose tokens are computed; those that are read in place wait for nothing but memory."""
        settles: list[Settle] = []
        for parcel in transfer.parcels:
            if parcel.state is not ParcelState.WAITING or parcel.tokens > transfer.computed:
                continue
            if parcel.in_place:
                job = self._out(transfer, parcel, None)
                settles.append(Settle(job, transfer.id))
            else:
                parcel.state = ParcelState.QUEUED
                self._queue.append((transfer, parcel))
        return settles

    def start(self, share: float) -> list[Pack]:
        """Starts queued packs as far as the send buffer has room.

        ``share``: of the buffer, 0..1, what the transfers of one decode side may hold.  Each may hold one parcel, and
        one of a delivering transfer beside those that wait for the blocks which that transfer has.
        """
        delivering = [entry for entry in self._queue if entry[0].claimant is not None]
        others = [entry for entry in self._queue if entry[0].claimant is None]
        started: list[Pack] = []
        limited = share < 1.0 and bool(self._queue)
        held = self._held_by_peer() if limited else Counter()
        read_by = self._peers_that_read() if limited else set()
        for transfer, parcel in (*delivering, *others):
            peer = transfer.claim.epoch if transfer.claim is not None else None
            has_one = peer in read_by if transfer.claimant is not None else peer is not None and held[peer] > 0
            if peer is not None and has_one and held[peer] + parcel.nbytes > share * self.regions.capacity:
                continue  # and those of other decode sides overtake it
            region = self._allocate(parcel, keep_room=transfer.claimant is None)
            if region is None:
                break
            if peer is not None:
                held[peer] += parcel.nbytes
                if transfer.claimant is not None:
                    read_by.add(peer)
            self._owners[region] = transfer
            self._queue.remove((transfer, parcel))
            job = self._out(transfer, parcel, region)
            plan = _packed_plan(transfer, parcel)
            started.append(Pack(job, transfer.id, parcel.first_block, transfer.tokens, region, plan))
        return started

    def _out(self, transfer: Transfer, parcel: Parcel, region: int | None) -> int:
        """The number of a new pack job, which alone may complete the parcel."""
        job, self._next_job = self._next_job, self._next_job + 1
        parcel.state, parcel.region, parcel.job = ParcelState.PACKING, region, job
        parcel.generation, parcel.digest, parcel.hash_job = transfer.generation, None, None
        self._jobs[job] = PackJob(transfer, parcel, region)
        return job

    def take_job(self, job: int) -> PackJob | None:
        """The pack that has ended, which is out no longer; its region is the caller's to free or keep."""
        return self._jobs.pop(job, None)

    def hash(self, transfer: Transfer, parcel: Parcel, skip_blocks: int) -> list[Hash]:
        """Starts the computing of a packed parcel's digest; nothing where that is under way."""
        if parcel.hash_job is not None and self._hashes[parcel.hash_job].skip_blocks == skip_blocks:
            return []
        assert parcel.region is not None
        job, self._next_job = self._next_job, self._next_job + 1
        parcel.hash_job = job
        self._hashes[job] = HashJob(transfer, parcel, skip_blocks)
        return [Hash(job, transfer.id, parcel.region, _packed_plan(transfer, parcel), skip_blocks)]

    def take_hash(self, job: int) -> HashJob | None:
        """The digest job that has ended."""
        return self._hashes.pop(job, None)

    def release(self, region: int) -> None:
        """The region is free again."""
        self.regions.release(region)
        self._owners.pop(region, None)

    def withdraw(self, transfer: Transfer, parcel: Parcel) -> None:
        """Back to WAITING, and the region is freed, unless the parcel has ended.

        A pack that is out keeps its region until it reports; its result is discarded.
        """
        if parcel.state.ended:
            return
        if parcel.state is ParcelState.QUEUED:
            self._queue.remove((transfer, parcel))
        self.free(parcel)
        parcel.state, parcel.region, parcel.job, parcel.hash_job = ParcelState.WAITING, None, None, None

    def free(self, parcel: Parcel) -> None:
        """Frees the region of a parcel that no pack is writing."""
        if parcel.region is not None and parcel.job is None:
            self.release(parcel.region)
            parcel.region = parcel.hash_job = None

    def _held_by_peer(self) -> Counter[str]:
        """Bytes that each decode side's transfers hold, by its epoch."""
        held: Counter[str] = Counter()
        for region, transfer in self._owners.items():
            if transfer.claim is not None:
                held[transfer.claim.epoch] += self.regions.size(region)
        return held

    def _peers_that_read(self) -> set[str]:
        """The decode sides, by epoch, of whose delivering transfers a parcel has a region."""
        return {t.claim.epoch for t in self._owners.values() if t.claim is not None and t.claimant is not None}

    def _allocate(self, parcel: Parcel, keep_room: bool) -> int | None:
        region = self.regions.allocate(parcel.nbytes)
        if region is None or not keep_room or self.regions.held_regions == 1:
            return region
        if self.regions.largest_free < self._room:
            self.regions.release(region)
            return None
        return region


def _packed_plan(transfer: Transfer, parcel: Parcel) -> ParcelPlan | RawPlan:
    """The plan of a parcel that goes through the send buffer."""
    assert transfer.pairing is not None
    plan = transfer.pairing.parcel(parcel.first_block, parcel.blocks, transfer.tokens)
    assert not isinstance(plan, BlockPlan)
    return plan
