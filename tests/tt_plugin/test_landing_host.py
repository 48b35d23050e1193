"""HostLanding by itself: what it takes, whose memory is held how long, and what a device that fails costs."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
import torch

from hawk_connector.errors import CapacityError, DeviceError, LocalError
from hawk_connector.layout.cache_layout import CacheLayout, ElementPlace
from hawk_connector.layout.kv_pool import KVPoolLayout
from hawk_connector.layout.kv_shape import KVShape
from hawk_connector.plan.pairing import DecodeFacts, HostPairing, PrefillFacts, pair
from hawk_connector.plan.raw_plan import RawPlan
from hawk_connector.plan.segments import Segments
from hawk_connector.transform.packing import ReferencePacker
from tt_plugin.device.banks import BankTable
from tt_plugin.device.kv_pool import KVPools
from tt_plugin.device.simulated import SimulatedDevice
from tt_plugin.landing import LandingChoice, make_landing
from tt_plugin.landing.host import HostLanding

POOLS = KVPoolLayout("cross_layer", 1, 1, 1, 32, 32, "float32", 8, 64)
BLOCK = 32 * 64 * 4
SOURCE = CacheLayout(
    *("kernels", 1, 1, 32, 32, "float32", BLOCK, BLOCK), k=ElementPlace(0, 0, 64, 1), v=ElementPlace(32, 0, 64, 1)
)


def plan(blocks: int = 2, tokens: int = 50, source: CacheLayout = SOURCE) -> RawPlan:
    shape = KVShape(1, 1, 32, "float32")
    found = pair(PrefillFacts(shape, "m", 1, 0, 32, 1 << 20, cache=SOURCE), DecodeFacts(shape, "m", POOLS, "host"))
    assert isinstance(found, HostPairing)
    parcel = found.parcel(0, blocks, tokens)
    return RawPlan(parcel.packed, source, parcel.tokens)


def pools(device: type[SimulatedDevice] = SimulatedDevice) -> KVPools:
    return KVPools(device(1, BankTable.named("blackhole-p150")), POOLS, 8)


def landing(nbytes: int = 1 << 16, device: type[SimulatedDevice] = SimulatedDevice) -> HostLanding:
    return HostLanding(pools(device), nbytes, 0.05, ReferencePacker)


def arrive(segments: Segments, values: torch.Tensor) -> None:
    """The read ends: ``values`` in the memory that it goes to."""
    data = values.numpy().tobytes()
    assert segments.nbytes == len(data) and segments.count == 1
    ctypes.memmove(int(segments.local[0]), data, len(data))


def test_a_parcel_is_one_read_converted_and_written() -> None:
    at = landing()
    segments = at.segments(plan(), 0x5000, [6, 1], 0)
    assert segments.remote.tolist() == [0x5000] and segments.nbytes == 2 * BLOCK
    assert at.regions()[0][0] <= int(segments.local[0]) and at.held_bytes == 2 * BLOCK
    values = torch.arange(2 * 32 * 64, dtype=torch.float32)
    arrive(segments, values)
    landed = at.landed(segments)
    assert at.held_bytes == 0 and at.counts.parcels == 1
    assert sum(n for _, _, n in landed) == sum(at.fill()) == 2 * 2 * 4096
    # Block 6 of K (pool 0) is page 6: one tile of 32 x 32 in faces of 16 x 16; token t's dim d is t * 64 + d.  In
    # Meta's RoPE order place 5 = 2 * 2 + 1 holds dim 1 * 16 + 2.
    tile = at._pools.pages(0, 0)[6 % 8, 6 // 8, :4096].view(np.float32).reshape(2, 2, 16, 16)
    assert tile[1, 0, 3, 5] == (16 + 3) * 64 + 18
    # Tokens from 50 on are zeros, whatever came: row 18 of the second block.
    last = at._pools.pages(0, 1)[1, 0, :4096].view(np.float32).reshape(2, 2, 16, 16)
    assert last[1, 0, 1, 0] == 32 * 64 + 17 * 64 + 32 and not last[1, 0, 2:].any()


def test_blocks_that_decode_has_are_left_out_of_the_read() -> None:
    at = landing()
    segments = at.segments(plan(), 0x5000, [0, 1], 1)
    assert (segments.remote.tolist(), segments.nbytes) == ([0x5000 + BLOCK], BLOCK)
    at.release(segments)
    nothing = at.segments(plan(), 0x5000, [0, 1], 2)
    assert nothing.count == 0 and at.landed(nothing) == () and at.held_bytes == 0


@pytest.mark.parametrize(
    "other",
    [
        plan().packed,
        plan(source=CacheLayout("k", 1, 1, 32, 32, "float32", BLOCK, BLOCK, SOURCE.k, ElementPlace(1 << 40, 0, 64, 1))),
    ],
    ids=["packed", "elements outside their block"],
)
def test_what_is_no_raw_parcel_for_these_pools_is_refused(other: Any) -> None:
    at = landing()
    with pytest.raises(LocalError, match="raw blocks"):
        at.segments(other, 0, [0, 1], 0)
    assert at.held_bytes == 0


def test_a_parcel_waits_for_room_no_longer_than_it_may() -> None:
    at = landing(nbytes=2 * BLOCK)
    first = at.segments(plan(), 0, [0, 1], 0)
    with pytest.raises(CapacityError, match="full"):
        at.segments(plan(), 0, [2, 3], 0)
    at.release(first)
    at.release(at.segments(plan(), 0, [2, 3], 0))
    with pytest.raises(CapacityError, match="does not fit"):
        at.segments(plan(3, 90), 0, [2, 3, 4], 0)
    with pytest.raises(LocalError, match="landed or released once"):
        at.release(first)


class Broken(SimulatedDevice):
    def write(self, *_: Any) -> None:
        raise DeviceError("the device lost a write")


def test_a_device_that_fails_costs_the_parcel_and_its_memory_is_held_until_release() -> None:
    at = landing(device=Broken)
    segments = at.segments(plan(), 0, [0, 1], 0)
    arrive(segments, torch.zeros(2 * 32 * 64))
    with pytest.raises(DeviceError):
        at.landed(segments)
    assert at.held_bytes == 2 * BLOCK
    at.release(segments)
    assert at.held_bytes == 0


def test_the_platforms_choice_says_how_much_memory() -> None:
    made = make_landing(pools(), LandingChoice(bounce_buffer_bytes=1 << 17), "host")
    assert isinstance(made, HostLanding) and made.regions()[0][1] == 1 << 17
