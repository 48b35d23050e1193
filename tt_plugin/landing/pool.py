"""Path *direct*, placement *pool*: reads end in the pools, through the banks' host addresses."""

from __future__ import annotations

from collections.abc import Sequence

from hawk_connector.layout.kv_pool import KVPoolLayout
from hawk_connector.plan.any_plan import Plan
from hawk_connector.plan.segments import Segments, pool_segments

from ..device.kv_pool import KVPools
from .bank_index import BankIndex
from .parcels import packed_parcel
from .tally import LandingCounts, Tally

__all__ = ["PoolLanding"]


class PoolLanding:
    """Path *direct*, placement *pool*: each segment ends where the kernels read it.

    The banks of a simulated device are host memory, so nothing needs a flush.
    """

    def __init__(self, pools: KVPools) -> None:
        self._pools = pools
        self._placement = pools.placement
        self._index = BankIndex(self._placement, pools.device.table.bank_bytes)
        self._tally = Tally(pools.layout)

    @property
    def layout(self) -> KVPoolLayout:
        return self._pools.layout

    @property
    def num_blocks(self) -> int:
        return self._pools.num_blocks

    @property
    def counts(self) -> LandingCounts:
        return self._tally.counts

    def regions(self) -> Sequence[tuple[int, int]]:
        return self._pools.regions()

    def segments(self, plan: Plan, region: int, block_ids: Sequence[int], skip_blocks: int) -> Segments:
        parcel = packed_parcel(plan, self.layout)
        return pool_segments(parcel, region, block_ids, self._placement, skip_blocks)

    def landed(self, segments: Segments) -> tuple[tuple[int, int, int], ...]:
        """Counts the bytes and returns (chip, bank, bytes) of each bank that got any.

        LocalError where a segment ends outside the banks.
        """
        if not segments.count:
            return ()
        channel, _ = self._index.find(segments)
        return self._tally.landed(channel, segments.length)

    def release(self, segments: Segments) -> None:
        """Nothing is reserved for a read: its blocks are its request's."""

    def fill(self) -> tuple[int, ...]:
        return self._tally.fill()
