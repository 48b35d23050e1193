"""Mode *host*: the prefill side's blocks are read into host memory as they are, converted there, and written out.

What one does without HAWK, done well: one read for each parcel, a compiled conversion straight from it, one device
write for each run of pages.  Reading one parcel overlaps converting and writing another, as on the bounce path, since
each parcel has memory of its own and all of it runs on the reader's threads.

As on the bounce path a parcel is written before prefill is told that it was read, and memory of a read that failed is
not used again before the fence.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from hawk_connector.errors import LocalError
from hawk_connector.layout.cache_layout import CacheLayout, ElementPlace
from hawk_connector.layout.kv_pool import KVPoolLayout
from hawk_connector.plan.any_plan import Plan
from hawk_connector.plan.raw_plan import RawPlan
from hawk_connector.plan.runs import BankRuns, bank_runs
from hawk_connector.plan.segments import Segments
from hawk_connector.transform.packing import ParcelPacker
from hawk_connector.transform.reference import LayerSource

from ..device.interface import Pools
from .flushing import last_writes
from .host_memory import host_memory
from .on_the_way import OnTheWay
from .room import Room
from .tally import LandingCounts, Tally

__all__ = ["HostLanding"]

_FIX = "Raise tt_plugin.landing.bounce_buffer_bytes, or lower parcel_tokens on the prefill side."


@dataclass(frozen=True)
class _Parcel:
    """A parcel's raw blocks in host memory at ``offset``, and where its pages belong."""

    plan: RawPlan
    runs: BankRuns
    offset: int


class HostLanding:
    """Lands in ``pools`` through twice ``nbytes`` of host memory: for parcels as they come, and as they are written.

    ``wait_s``: how long a parcel may wait for room.  ``make_packer``: called once for each thread that converts.
    """

    def __init__(self, pools: Pools, nbytes: int, wait_s: float, make_packer: Callable[[], ParcelPacker]) -> None:
        self._pools = pools
        self._raw, self._packed = host_memory(nbytes), torch.from_numpy(host_memory(nbytes))
        self._raw_tensor = torch.from_numpy(self._raw)
        self._start = int(self._raw.ctypes.data)
        self._raw_room = Room(nbytes, wait_s, "bounce buffer", _FIX)
        self._packed_room = Room(nbytes, wait_s, "buffer of converted parcels", _FIX)
        self._make_packer = make_packer
        self._of_thread = threading.local()
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
        return self._raw_room.held_bytes + self._packed_room.held_bytes

    def regions(self) -> Sequence[tuple[int, int]]:
        return [(self._start, len(self._raw))]

    def segments(self, plan: Plan, region: int, block_ids: Sequence[int], skip_blocks: int) -> Segments:
        """One read, of the source blocks that hold anything of decode's ``block_ids`` but the skipped ones.

        Waits for room; CapacityError where there is none in time.
        """
        if not isinstance(plan, RawPlan) or plan.packed.layout != self.layout or not plan.source.sound:
            raise LocalError(
                "the parcel is not of raw blocks for these pools", expected=repr(self.layout), got=repr(plan)
            )
        runs = bank_runs(plan.packed, block_ids, self._pools.buffer_addresses, self.num_blocks, skip_blocks)
        wanted = list(plan.wanted_ranges(skip_blocks))
        end = plan.source_end(len(block_ids)) * plan.pitch
        if not runs.count or not wanted or wanted[0][0] >= end:
            return _segments([])
        first = wanted[0][0]
        offset = self._raw_room.take(plan.nbytes)
        local = self._start + offset + first
        self._on_the_way.put(local, _Parcel(plan, runs, offset))
        return _segments([(region + first, local, end - first)])

    def landed(self, segments: Segments) -> tuple[tuple[int, int, int], ...]:
        """Converts the parcel and writes it to the device; returns once it is in the device's memory.

        DeviceError where the device fails, CapacityError where there is no room to convert in time; the parcel's memory
        is then held until ``release``.
        """
        if not segments.count:
            return ()
        parcel = self._on_the_way.find(segments)
        plan, runs, device = parcel.plan, parcel.runs, self._pools.device
        room = self._packed_room.take(plan.packed.nbytes)
        try:
            out = self._packed[room : room + plan.packed.nbytes]
            raw = self._raw_tensor[parcel.offset : parcel.offset + plan.nbytes]
            table = torch.arange(plan.source_blocks)
            self._packer().pack(_layers(plan, raw), table, plan.packed, 0, plan.tokens, out)
            pages = out.numpy()
            columns = (runs.offset, runs.chip, runs.bank, runs.address, runs.length)
            for offset, chip, bank, address, length in zip(*(column.tolist() for column in columns), strict=True):
                device.write(chip, bank, address, pages[offset : offset + length])
            device.flush(last_writes(runs))
        finally:
            self._packed_room.give_back(room)
        self.release(segments)
        return self._tally.landed(runs.chip * self.layout.banks + runs.bank, runs.length, device_writes=runs.count)

    def release(self, segments: Segments) -> None:
        if not segments.count:
            return
        parcel = self._on_the_way.take(segments)
        self._raw_room.give_back(parcel.offset)

    def fill(self) -> tuple[int, ...]:
        return self._tally.fill()

    def _packer(self) -> ParcelPacker:
        """This thread's own: a packer packs one parcel at a time."""
        if not hasattr(self._of_thread, "packer"):
            self._of_thread.packer = self._make_packer()
        packer: ParcelPacker = self._of_thread.packer
        return packer


def _layers(plan: RawPlan, raw: torch.Tensor) -> list[LayerSource]:
    """K and V of the parcel's blocks, views ``[source blocks, heads, tokens, head_dim]`` of its raw bytes."""
    source = plan.source
    dtype: torch.dtype = getattr(torch, source.codec)
    elements = raw.view(dtype)
    step = source.block_bytes // dtype.itemsize
    k, v = source.k, source.v
    assert k is not None and v is not None  # else there is no such pairing
    return [
        LayerSource(*(_view(elements, source, place, plan.source_blocks, layer * step) for place in (k, v)))
        for layer in range(source.layers)
    ]


def _view(elements: torch.Tensor, source: CacheLayout, place: ElementPlace, blocks: int, first: int) -> torch.Tensor:
    pitch = source.layers * source.block_bytes // elements.element_size()
    shape = (blocks, source.heads, source.block_size, source.head_dim)
    offset = elements.storage_offset() + first + place.offset
    return elements.as_strided(shape, (pitch, place.head, place.token, place.dim), offset)


def _segments(reads: Sequence[tuple[int, int, int]]) -> Segments:
    columns = np.array(reads, dtype=np.int64).reshape(-1, 3)
    return Segments(*(np.ascontiguousarray(columns[:, i]) for i in range(3)))
