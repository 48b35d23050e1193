"""Where a parcel's bytes belong in the device: runs of bytes that lie in one piece in the parcel and in one bank.

``segments.py`` says the same in host addresses, for reads that end in the pools themselves; here it is said in the
device's own terms, for landings that write or copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .parcel import ParcelPlan
from .segments import PoolPlacement, pool_segments

__all__ = ["BankCopies", "BankRuns", "bank_runs", "stage_copies"]

# Bytes between two banks in the made-up addresses by which `bank_runs` asks `pool_segments`: more than any bank has,
# so that runs of two banks never touch.
_BANK_SPAN_BITS = 44

Numbers = NDArray[np.int64]


@dataclass(frozen=True)
class BankRuns:
    """Runs of a parcel; five int64 arrays of one length.

    ``offset``: bytes from the parcel's first.  ``address``: in the bank, relative to its base.  ``length``: bytes.
    """

    offset: Numbers
    chip: Numbers
    bank: Numbers
    address: Numbers
    length: Numbers

    @property
    def count(self) -> int:
        return len(self.length)

    @property
    def nbytes(self) -> int:
        return int(self.length.sum())


@dataclass(frozen=True)
class BankCopies:
    """Copies inside chips; six int64 arrays of one length.

    ``source_bank``, ``source``: bank and address of the first byte, relative to the bank's base; ``bank``,
    ``address``: where it goes, in the same chip.  ``length``: bytes.  Sources and targets do not overlap.
    """

    chip: Numbers
    source_bank: Numbers
    source: Numbers
    bank: Numbers
    address: Numbers
    length: Numbers

    @property
    def count(self) -> int:
        return len(self.length)

    @property
    def crossing(self) -> int:
        """Copies that go from one bank to another."""
        return int((self.source_bank != self.bank).sum())


def bank_runs(
    plan: ParcelPlan,
    block_ids: Sequence[int],
    buffer_addresses: tuple[int, ...],
    num_blocks: int,
    skip_blocks: int = 0,
) -> BankRuns:
    """The runs of a parcel for decode's ``block_ids``; arguments as for ``pool_segments``.

    ``buffer_addresses``: address of each pool, relative to a bank's base.
    Raises ValueError where a block id does not fit the pool.
    """
    layout = plan.layout
    channels = np.arange(layout.chips * layout.banks, dtype=np.int64) << _BANK_SPAN_BITS
    placement = PoolPlacement(channels.reshape(layout.chips, layout.banks), buffer_addresses, num_blocks)
    found = pool_segments(plan, 0, block_ids, placement, skip_blocks)
    channel = found.local >> _BANK_SPAN_BITS
    address = found.local & ((1 << _BANK_SPAN_BITS) - 1)
    return BankRuns(found.remote, channel // layout.banks, channel % layout.banks, address, found.length)


def stage_copies(plan: ParcelPlan, runs: BankRuns, stage: int) -> BankCopies:
    """The copies that bring a staged parcel to where ``runs`` say.

    Staged means: the stream of (chip, class c) lies in one piece from address ``stage`` of bank c of that chip.  Where
    the pages of a unit are a multiple of the banks a class is a bank, and no copy leaves its bank.
    """
    streams = plan.streams()
    starts = np.array([stream.offset for stream in streams], dtype=np.int64)
    classes = np.array([stream.page_class for stream in streams], dtype=np.int64)
    offset, length, index = _cut(runs, starts)
    stream = np.searchsorted(starts, offset, side="right") - 1
    return BankCopies(
        chip=runs.chip[index],
        source_bank=classes[stream],
        source=stage + offset - starts[stream],
        bank=runs.bank[index],
        address=runs.address[index] + (offset - runs.offset[index]),
        length=length,
    )


def _cut(runs: BankRuns, starts: Numbers) -> tuple[Numbers, Numbers, Numbers]:
    """Offset and length of the runs' pieces, cut where a stream starts, and the run of each piece.

    A run may go on from one stream into the next: two classes of different blocks can be neighbours in a bank.
    """
    ends = runs.offset + runs.length
    first = np.searchsorted(starts, runs.offset, side="right")
    pieces = np.searchsorted(starts, ends, side="left") - first + 1
    index = np.repeat(np.arange(runs.count, dtype=np.int64), pieces)
    number = np.arange(len(index), dtype=np.int64) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    bounds = np.append(starts, np.iinfo(np.int64).max)
    begin = np.where(number == 0, runs.offset[index], bounds[np.maximum(first[index] + number - 1, 0)])
    end = np.minimum(ends[index], bounds[first[index] + number])
    return begin, end - begin, index
