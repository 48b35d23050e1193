"""Staged placement and the bounce path on a simulated device: bytes, device calls, room, failures."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from numpy.typing import NDArray

from hawk_connector.errors import CapacityError, DeviceError, LocalError
from hawk_connector.layout.kv_pool import PoolKind
from hawk_connector.plan.placement import Placement, PlacementCosts
from hawk_connector.plan.runs import BankCopies
from hawk_connector.plan.segments import Segments
from tests.oracle.scalar import expected_segments
from tests.transport.waiting import eventually
from tests.tt_plugin.carried import Parcel
from tests.tt_plugin.pools import MIB, make_pools, oracle_pool
from tt_plugin.device.interface import Written
from tt_plugin.device.kv_pool import KVPools
from tt_plugin.device.simulated import SimulatedDevice
from tt_plugin.landing import BounceLanding, LandingChoice, PoolLanding, StagedLanding, make_landing
from tt_plugin.landing.room import Room
from tt_plugin.landing.stages import Stages

pytestmark = pytest.mark.slow

KIB = 1 << 10
BLOCKS = [4, 0, 2]


def pools_of(banks: int = 8, kind: PoolKind = "per_layer", codec: str = "bfp8", chips: int = 2) -> KVPools:
    return make_pools(banks=banks, kind=kind, chips=chips, kv_heads=2 * chips, codec=codec, layers=3)


def landing_of(pools: KVPools, path: str, placement: Placement | None, **more: float) -> BounceLanding | StagedLanding:
    choice = LandingChoice(
        path=path,  # type: ignore[arg-type]
        placement=placement,
        **{"bounce_buffer_bytes": 4 * MIB, "bounce_wait_s": 30.0, "stage_bytes_per_bank": 256 * KIB, **more},  # type: ignore[arg-type]
    )
    landing = make_landing(pools, choice)
    assert isinstance(landing, (BounceLanding, StagedLanding))
    return landing


class WatchedDevice:
    """A simulated device that notes each call; ``gate`` holds writes up, ``broken`` makes them fail."""

    def __init__(self, device: SimulatedDevice) -> None:
        self._device = device
        self.calls: list[str] = []
        self.flushed: list[Written] = []
        self.gate: threading.Event | None = None
        self.broken = False

    def __getattr__(self, name: str) -> object:
        return getattr(self._device, name)

    def write(self, chip: int, bank: int, address: int, data: NDArray[np.uint8]) -> None:
        self.calls.append("write")
        if self.gate is not None:
            assert self.gate.wait(30)
        if self.broken:
            raise DeviceError("bank 3 of chip 0 does not answer")
        self._device.write(chip, bank, address, data)

    def copy(self, copies: BankCopies) -> None:
        self.calls.append("copy")
        self._device.copy(copies)

    def flush(self, written: Iterable[Written]) -> None:
        self.calls.append("flush")
        self.flushed += written


def watched(pools: KVPools) -> WatchedDevice:
    device = WatchedDevice(pools.device)
    pools.device = device  # type: ignore[assignment]
    return device


PATHS: list[tuple[str, Placement]] = [("direct", "staged"), ("bounce", "pool"), ("bounce", "staged")]


@pytest.mark.parametrize("banks", [7, 8, 12])
@pytest.mark.parametrize("kind", ["cross_layer", "per_layer"])
@pytest.mark.parametrize(("path", "placement"), PATHS)
@pytest.mark.parametrize(("block_ids", "skip"), [(BLOCKS, 0), (BLOCKS, 2), ([2, 3, 4], 0)])
def test_pages_land_where_the_oracle_says(
    banks: int, kind: PoolKind, path: str, placement: Placement, block_ids: list[int], skip: int
) -> None:
    pools = pools_of(banks, kind)
    landing = landing_of(pools, path, placement)
    parcel = Parcel(pools, block_ids)
    assert sorted(parcel.carry(landing, skip)) == parcel.bank_bytes(skip)
    assert parcel.is_landed(skip)
    assert landing.held_bytes == 0
    assert landing.fill() == tuple(
        dict(((c, b), n) for c, b, n in parcel.bank_bytes(skip)).get((c, b), 0) for c in range(2) for b in range(banks)
    )
    # Pages of other blocks hold what they held: zeros.
    touched = sum(int(pools.pages(c, p).any(axis=-1).sum()) for c in range(2) for p in range(pools.layout.pools))
    assert touched == len(parcel.places(skip))


@pytest.mark.parametrize(("path", "placement"), PATHS)
def test_reads_writes_and_copies_are_counted(path: str, placement: Placement) -> None:
    """3 layers, K and V, 3 scattered blocks, 8 banks, 2 chips: 288 runs in the pools, 16 streams."""
    pools = pools_of()
    device = watched(pools)
    landing = landing_of(pools, path, placement)
    parcel = Parcel(pools, BLOCKS)
    runs = expected_segments(oracle_pool(pools), BLOCKS, chips=2)
    assert runs == 288
    segments = parcel.segments(landing)
    assert (segments.count, segments.nbytes) == (16, parcel.plan.nbytes)
    parcel.read(landing, segments)
    landing.landed(segments)
    counts = landing.counts
    assert (counts.parcels, counts.staged) == (1, int(placement == "staged"))
    writes = {"direct": 0, "bounce": 16 if placement == "staged" else 288}[path]
    assert (counts.device_writes, device.calls.count("write")) == (writes, writes)
    assert counts.copies == (288 if placement == "staged" else 0)


def test_every_bank_is_flushed_after_its_last_write() -> None:
    pools = pools_of()
    device = watched(pools)
    landing = landing_of(pools, "bounce", "pool")
    parcel = Parcel(pools, BLOCKS)
    parcel.carry(landing)
    assert device.calls == ["write"] * 288 + ["flush"]
    assert {(w.chip, w.bank) for w in device.flushed} == {(c, b) for c in range(2) for b in range(8)}
    last = {(chip, bank): address for chip, bank, address, _ in parcel.places()}
    for written in device.flushed:
        # The oracle's last page of the bank ends where the flush looks.
        end = written.address + written.nbytes
        assert end == last[written.chip, written.bank] + pools.layout.page_pitch


@pytest.mark.parametrize("path", ["direct", "bounce"])
def test_stages_are_flushed_before_the_copies_and_the_pools_after_them(path: str) -> None:
    pools = pools_of()
    device = watched(pools)
    landing = landing_of(pools, path, "staged")
    parcel = Parcel(pools, BLOCKS)
    parcel.carry(landing)
    assert device.calls == ["write"] * (16 if path == "bounce" else 0) + ["flush", "copy", "flush"]
    banks = {(c, b) for c in range(2) for b in range(8)}
    stages, copied = device.flushed[:16], device.flushed[16:]
    assert {(w.chip, w.bank) for w in stages} == {(w.chip, w.bank) for w in copied} == banks
    # A stream is 18 pages; a copy ends where the oracle's last page of the bank does.
    assert {w.nbytes for w in stages} == {18 * pools.layout.page_pitch}
    last = {(chip, bank): address for chip, bank, address, _ in parcel.places()}
    for written in copied:
        end = written.address + written.nbytes
        assert end == last[written.chip, written.bank] + pools.layout.page_pitch


def test_the_counts_choose_and_a_parcel_that_does_not_fit_the_stages_goes_to_the_pools() -> None:
    """Runs of 1 page (1,088 bytes) against streams of 18, which take 77 x 256 bytes of a stage: 76 are too few."""
    pools = pools_of()
    landing = landing_of(pools, "direct", None)
    Parcel(pools, BLOCKS).carry(landing)
    assert landing.counts.staged == 1
    small = landing_of(pools_of(), "direct", None, stage_bytes_per_bank=18 * 1088)
    parcel = Parcel(small._pools, BLOCKS)  # type: ignore[arg-type]
    assert parcel.segments(small).count == 288
    cheap = pools_of()
    stages = Stages(cheap.device, 256 * KIB, 1.0)
    origins = cheap.device.origins
    direct = StagedLanding(cheap, PoolLanding(cheap), stages, origins, costs=PlacementCosts(read_bytes=1))
    parcel = Parcel(cheap, BLOCKS)
    assert sorted(parcel.carry(direct)) == parcel.bank_bytes()
    assert (parcel.is_landed(), direct.counts.staged) == (True, 0)


def test_without_room_for_stages_all_parcels_go_to_the_pools_unless_stages_were_asked_for() -> None:
    pools = pools_of()
    rest = pools.device.allocator.largest_gap - 100 * KIB
    pools.device.allocate(rest, "weights")
    assert isinstance(make_landing(pools, LandingChoice(placement=None, stage_bytes_per_bank=256 * KIB)), PoolLanding)
    with pytest.raises(CapacityError, match="the buffer for stages does not fit the DRAM"):
        make_landing(pools, LandingChoice(placement="staged", stage_bytes_per_bank=256 * KIB))


def test_the_bounce_path_stages_by_itself_only_where_the_device_can_copy() -> None:
    pools = pools_of()
    landing = landing_of(pools, "bounce", None)
    Parcel(pools, BLOCKS).carry(landing)
    assert landing.counts.staged == 1
    other = pools_of()
    watched(other).copies_inside = False  # type: ignore[attr-defined]
    landing = landing_of(other, "bounce", None)
    Parcel(other, BLOCKS).carry(landing)
    assert (landing.counts.staged, landing.counts.device_writes) == (0, 288)


# ---- room ------------------------------------------------------------------------------------------------------------
def test_writing_a_parcel_overlaps_the_next_ones_read() -> None:
    """While the device takes the first parcel, the second is read whole; it is another part of host memory."""
    pools = pools_of()
    device = watched(pools)
    first, second = Parcel(pools, [1, 2], seed=1), Parcel(pools, [3, 5], seed=2)
    landing = landing_of(pools, "bounce", "pool", bounce_buffer_bytes=2 * first.plan.nbytes)
    device.gate = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(first.carry, landing)
        eventually(lambda: device.calls == ["write"], "the device is being written")
        segments = second.segments(landing)
        second.read(landing, segments)
        assert not writing.done()
        assert landing.held_bytes == 2 * first.plan.nbytes
        device.gate.set()
        writing.result(30)
    landing.landed(segments)
    assert first.is_landed() and second.is_landed()
    assert landing.held_bytes == 0


def test_a_parcel_waits_for_room_and_gets_it_when_another_has_landed() -> None:
    pools = pools_of()
    first, second = Parcel(pools, [1, 2], seed=1), Parcel(pools, [3, 5], seed=2)
    landing = landing_of(pools, "bounce", "pool", bounce_buffer_bytes=first.plan.nbytes)
    assert isinstance(landing, BounceLanding)
    segments = first.segments(landing)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(second.carry, landing)
        eventually(lambda: landing._room.waiting == 1, "the second parcel waits")
        first.read(landing, segments)
        landing.landed(segments)
        waiting.result(30)
    assert first.is_landed() and second.is_landed()


@pytest.mark.parametrize(("path", "placement"), PATHS)
def test_a_wait_for_room_has_a_deadline(path: str, placement: Placement) -> None:
    pools = pools_of()
    parcel = Parcel(pools, BLOCKS)
    only_one = {"bounce_buffer_bytes": parcel.plan.nbytes, "stage_bytes_per_bank": 20 * KIB}
    landing = landing_of(pools, path, placement, bounce_wait_s=0.05, **only_one)
    held = parcel.segments(landing)
    with pytest.raises(CapacityError, match=r"was full for 0.05 s: expected \d+ bytes free of \d+, got \d+ bytes held"):
        parcel.segments(landing)
    parcel.read(landing, held)
    landing.landed(held)
    assert landing.held_bytes == 0
    parcel.carry(landing)


def test_a_parcel_that_never_fits_is_told_at_once_and_what_to_change() -> None:
    pools = pools_of()
    parcel = Parcel(pools, BLOCKS)
    landing = landing_of(pools, "bounce", "pool", bounce_buffer_bytes=parcel.plan.nbytes - 256)
    with pytest.raises(CapacityError, match=r"tt_plugin\.landing\.bounce_buffer_bytes, or lower parcel_tokens on"):
        parcel.segments(landing)
    staged = landing_of(pools, "bounce", "staged", stage_bytes_per_bank=4 * KIB)
    with pytest.raises(CapacityError, match=r"tt_plugin\.landing\.stage_bytes_per_bank, or lower parcel_tokens on"):
        parcel.segments(staged)
    assert staged.held_bytes == 0  # the host memory that it had already


def test_room_is_handed_out_in_the_order_of_asking() -> None:
    """A large parcel is not overtaken for ever by small ones that would fit beside what is held."""
    room = Room(4 * KIB, 30.0, "room", "")
    held = room.take(2 * KIB)
    got: list[str] = []
    with ThreadPoolExecutor(2) as pool:
        large = pool.submit(lambda: (room.take(3 * KIB), got.append("large")))
        eventually(lambda: room.waiting == 1, "the large one waits")
        small = pool.submit(lambda: (room.take(1 * KIB), got.append("small")))
        eventually(lambda: room.waiting == 2, "the small one waits behind it")
        assert got == []
        room.give_back(held)
        large.result(30), small.result(30)
    assert room.held_bytes == 4 * KIB
    assert sorted(got) == ["large", "small"]


# ---- failures --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("path", "placement"), PATHS)
def test_memory_of_a_failed_read_is_not_used_again_before_it_is_released(path: str, placement: Placement) -> None:
    """A late byte of the failed read hits nobody: its memory is held, and another parcel lies elsewhere."""
    pools = pools_of()
    failed, other = Parcel(pools, [1, 2, 3], seed=1), Parcel(pools, [4, 5, 6], seed=2)
    landing = landing_of(pools, path, placement)
    lost = failed.segments(landing)
    good = other.segments(landing)
    other.read(landing, good)
    failed.read(landing, lost)  # late, after the other's bytes had come
    landing.landed(good)
    assert other.is_landed()
    held = landing.held_bytes
    assert held > 0
    landing.release(lost)
    assert landing.held_bytes == 0
    # The failed parcel's blocks were never written.
    pitch = pools.layout.page_pitch
    for chip, bank, address, _ in failed.places():
        start = address - pools.device.table.bases[bank]
        assert not pools.device.bank(chip, bank)[start : start + pitch].any()


def test_a_device_that_fails_fails_the_parcel_and_its_memory_is_held_until_release() -> None:
    pools = pools_of()
    device = watched(pools)
    landing = landing_of(pools, "bounce", "pool")
    parcel = Parcel(pools, BLOCKS)
    segments = parcel.segments(landing)
    parcel.read(landing, segments)
    device.broken = True
    with pytest.raises(DeviceError, match="bank 3 of chip 0"):
        landing.landed(segments)
    assert landing.counts.parcels == 0 and set(landing.fill()) == {0}
    assert landing.held_bytes == parcel.plan.nbytes
    landing.release(segments)
    assert landing.held_bytes == 0


@pytest.mark.parametrize(("path", "placement"), PATHS)
def test_nothing_to_read_holds_nothing(path: str, placement: Placement) -> None:
    pools = pools_of()
    landing = landing_of(pools, path, placement)
    segments = Parcel(pools, BLOCKS).segments(landing, skip_blocks=3)
    assert segments.count == 0
    assert landing.landed(segments) == ()
    landing.release(segments)
    assert landing.held_bytes == 0


@pytest.mark.parametrize(("path", "placement"), PATHS)
def test_parcels_for_other_pools_are_refused(path: str, placement: Placement) -> None:
    landing = landing_of(pools_of(8), path, placement)
    other = Parcel(pools_of(7), BLOCKS)
    with pytest.raises(LocalError, match="packed for other pools"):
        other.segments(landing)
    assert landing.held_bytes == 0


def test_only_what_is_read_is_registered() -> None:
    pools = pools_of()
    stages = [length for _, length in landing_of(pools, "direct", "staged").regions()]
    assert stages == [256 * KIB] * 16
    assert [length for _, length in landing_of(pools, "bounce", "pool").regions()] == [4 * MIB]
    assert len(landing_of(pools, "direct", None).regions()) == 16 + len(pools.regions())


# ---- what the paper saw ----------------------------------------------------------------------------------------------
def test_one_contiguous_buffer_fills_one_bank_and_the_next_allocation_fails() -> None:
    """48 MiB for incoming KV on a chip with 8 banks of 64 MiB, then pools of 24 MiB a bank.

    In stages it is 6 MiB of each bank, and the pools fit.  As one piece it lies in one bank; the allocator, which
    keeps all banks in step, has 48 MiB less in each of them: seven lie empty, and there is no room for the pools.
    """
    staged, single = pools_of(chips=1).device, pools_of(chips=1).device
    before = staged.allocator.free_bytes
    for bank in range(8):
        assert staged.bank(0, bank).nbytes == 64 * MIB
    stages = Stages(staged, 48 * MIB // 8, 1.0)
    assert before - staged.allocator.free_bytes == stages.bytes_per_bank == 6 * MIB
    staged.allocate(24 * MIB, "the KV pools")

    address = single.allocate(48 * MIB, "one buffer")
    single.write(0, 0, address, np.ones(48 * MIB, np.uint8))
    used = [int(np.count_nonzero(single.bank(0, bank))) for bank in range(8)]
    assert used == [48 * MIB, 0, 0, 0, 0, 0, 0, 0]
    with pytest.raises(CapacityError, match="does not fit the DRAM of eight"):
        single.allocate(24 * MIB, "the KV pools")


def test_a_landing_of_segments_that_it_did_not_make_is_an_error() -> None:
    landing = landing_of(pools_of(), "bounce", "pool")
    foreign = Segments(*(np.array([n], dtype=np.int64) for n in (0, 4096, 32)))
    with pytest.raises(LocalError, match="not on their way"):
        landing.landed(foreign)
