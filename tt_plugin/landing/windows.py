"""The direct path on silicon: reads end in the banks of real chips, through their windows.

The pools are TTNN's own tensors; what is needed of them is their addresses.  So this runs in any process that may open
the chips' device nodes, with or without TTNN.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from hawk_connector.errors import CapacityError
from hawk_connector.layout.kv_pool import KVPoolLayout
from hawk_connector.plan.any_plan import Plan
from hawk_connector.plan.segments import PoolPlacement, Segments, pool_segments

from ..device.windows import WindowSet
from .bank_index import BankIndex
from .parcels import packed_parcel
from .tally import LandingCounts, Tally

__all__ = ["WindowLanding", "WindowPools"]


class WindowPools:
    """The pools of ``layout`` at addresses that the device's allocator gave them, seen through bank windows.

    ``buffer_addresses``: device address of each pool relative to the bank's base, as ``buffer_address()`` of its
    tensor says; the same in every bank and on every chip.
    """

    def __init__(
        self, windows: WindowSet, layout: KVPoolLayout, num_blocks: int, buffer_addresses: Sequence[int]
    ) -> None:
        """Raises CapacityError where a pool ends past what the windows map, ValueError where the numbers do not fit
        each other."""
        chips, banks = windows.origins.shape
        for name, ours, theirs in (
            ("chips", layout.chips, chips),
            ("banks", layout.banks, banks),
            ("pools", layout.pools, len(buffer_addresses)),
        ):
            if ours != theirs:
                raise ValueError(f"{name}: the layout has {ours}, the windows and addresses {theirs}")
        if num_blocks < 1:
            raise ValueError(f"a pool holds at least one block; got {num_blocks}")
        self.windows = windows
        self.layout = layout
        self.num_blocks = num_blocks
        self.placement = PoolPlacement(windows.origins, tuple(buffer_addresses), num_blocks)
        self._bytes_per_bank = layout.rule.slots(layout.pool_pages(num_blocks)) * layout.page_pitch
        ordered = sorted(buffer_addresses)
        if any(address < 0 or address % layout.alignment for address in ordered):
            raise ValueError(f"pools begin at multiples of {layout.alignment}; got {[hex(a) for a in ordered]}")
        if any(after < before + self._bytes_per_bank for before, after in itertools.pairwise(ordered)):
            raise ValueError(
                f"pools of {self._bytes_per_bank} bytes a bank would overlap at {[hex(a) for a in ordered]}"
            )
        if ordered[-1] + self._bytes_per_bank > windows.length:
            raise CapacityError(
                "the KV pools end past what the bank windows map",
                expected=f"at most {windows.length:#x}",
                got=f"{ordered[-1] + self._bytes_per_bank:#x}",
                fix="Open the windows with a length that covers the pools.",
            )

    def regions(self) -> list[tuple[int, int]]:
        """(host address, length) of the pools; pools that touch are one region.

        Nothing else of a bank: a peer may write what is registered, and the rest holds weights and programs.
        """
        spans: list[tuple[int, int]] = []
        for address in sorted(self.placement.buffer_addresses):
            if spans and sum(spans[-1]) == address:
                spans[-1] = (spans[-1][0], spans[-1][1] + self._bytes_per_bank)
            else:
                spans.append((address, self._bytes_per_bank))
        return [(int(origin) + address, length) for origin in self.placement.flat_origins for address, length in spans]


class WindowLanding:
    """Path *direct*, placement *pool*, on real chips: bytes count as landed once their windows are flushed.

    Holds the windows until ``close``, which is to be called when every engine that its regions were registered with
    has been closed (``DecodeWorker.close`` says so).
    """

    def __init__(self, pools: WindowPools) -> None:
        self._pools = pools
        self._index = BankIndex(pools.placement, pools.windows.length)
        self._tally = Tally(pools.layout)
        self._hold = pools.windows.hold("the KV landing")

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
        return pool_segments(parcel, region, block_ids, self._pools.placement, skip_blocks)

    def landed(self, segments: Segments) -> tuple[tuple[int, int, int], ...]:
        """Flushes every window that was written, then counts: (chip, bank, bytes).

        TransferFailed where a window cannot be flushed, LocalError where a segment ends outside the windows.
        """
        if not segments.count:
            return ()
        channel, end = self._index.find(segments)
        banks = self.layout.banks
        last = np.full(self._pools.placement.flat_origins.shape, -1, dtype=np.int64)
        last[channel] = end - 1  # of several in one bank the last that was asked for stays
        self._pools.windows.flush({divmod(int(c), banks): int(last[c]) for c in np.flatnonzero(last >= 0)})
        return self._tally.landed(channel, segments.length)

    def release(self, segments: Segments) -> None:
        """Nothing is reserved for a read: its blocks are its request's."""

    def fill(self) -> tuple[int, ...]:
        return self._tally.fill()

    def close(self) -> None:
        """Lets the windows be closed.  Repeatable."""
        self._hold.release()
