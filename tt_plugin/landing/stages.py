"""Stages: one contiguous buffer in each bank of each chip, in which streams wait to be copied into the pools.

They take the same bytes at the same address in every bank.  One buffer for all streams would lie in one bank, and the
allocator, which works in lockstep, would take as much from all others.
"""

from __future__ import annotations

import numpy as np

from hawk_connector.plan.parcel import ParcelPlan
from hawk_connector.plan.placement import stage_bytes
from hawk_connector.plan.runs import BankRuns, stage_copies

from ..device.interface import Device
from .flushing import last_writes
from .room import Room

__all__ = ["Stages"]


class Stages:
    """``bytes_per_bank`` in every bank of ``device``, from ``address`` on."""

    def __init__(self, device: Device, bytes_per_bank: int, wait_s: float) -> None:
        """CapacityError where the device has no room for them."""
        self.device = device
        self.bytes_per_bank = bytes_per_bank
        self.room = Room(
            bytes_per_bank,
            wait_s,
            "stages",
            "Raise tt_plugin.landing.stage_bytes_per_bank, or lower parcel_tokens on the prefill side.",
        )
        self.address = device.allocate(bytes_per_bank, "the buffer for stages")

    def fits(self, plan: ParcelPlan) -> bool:
        """Whether a parcel can be staged at all."""
        return stage_bytes(plan) <= self.room.capacity

    def take(self, plan: ParcelPlan) -> int:
        """Address of room for the parcel's streams, the same in every bank; errors as ``Room.take``."""
        return self.address + self.room.take(stage_bytes(plan))

    def streams(self, plan: ParcelPlan, address: int) -> BankRuns:
        """The parcel's streams as runs that end in the stages at ``address``."""
        columns = [(s.offset, s.chip, s.page_class, address, s.length) for s in plan.streams()]
        return BankRuns(*np.array(columns, dtype=np.int64).reshape(-1, 5).T)

    def copy_out(self, plan: ParcelPlan, runs: BankRuns, address: int) -> int:
        """Copies a parcel that was written to the stages at ``address`` to where ``runs`` say; how many copies it took.

        The streams are flushed first, as the device copies what is in its memory, and the copies after that.
        """
        self.device.flush(last_writes(self.streams(plan, address)))
        copies = stage_copies(plan, runs, address)
        self.device.copy(copies)
        self.device.flush(last_writes(BankRuns(copies.source, copies.chip, copies.bank, copies.address, copies.length)))
        return copies.count

    def give_back(self, address: int) -> None:
        self.room.give_back(address - self.address)

    def free(self) -> None:
        """Gives the device's memory back."""
        self.device.free(self.address)
