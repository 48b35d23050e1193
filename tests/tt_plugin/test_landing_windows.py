"""The landing through bank windows: parcels end in the chips' memory where the oracle says, once flushed."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from hawk_connector.errors import CapacityError, LocalError, TransferFailed
from hawk_connector.layout.kv_pool import KVPoolLayout, PoolKind
from hawk_connector.plan.parcel import ChipShare, ParcelPlan
from hawk_connector.plan.segments import Segments
from hawk_connector.transport.mooncake import MooncakeEngine
from tests.oracle.scalar import Pool, expected_segments, stream_pages
from tests.tt_plugin.stand_in_driver import StandInChip, StandInDriver
from tests.tt_plugin.test_windows import NODES, P100, P150, sites
from tt_plugin.device.windows import WindowSet
from tt_plugin.landing.windows import WindowLanding, WindowPools

BLOCKS = 8
FIRST = 0x8080  # no multiple of a page
BANK = 128 << 10


def layout(kind: PoolKind, banks: int) -> KVPoolLayout:
    return KVPoolLayout(kind, 3, 2, 2, 64, 64, "bfp8", banks, 64)


def addresses(of: KVPoolLayout) -> list[int]:
    """Pools one after another, with a gap of 4 KiB before the last two."""
    size = of.rule.slots(of.pool_pages(BLOCKS)) * of.page_pitch
    return [FIRST + n * size + (4096 if n >= of.pools - 2 else 0) for n in range(of.pools)]


class Machine:
    """Two stand-in chips whose windows are open, and pools on them."""

    def __init__(self, kind: PoolKind = "cross_layer", banks: int = 8) -> None:
        self.tables = (P150, P150) if banks == 8 else (P100, P150[1:])
        chips = {
            node: StandInChip({tile: bytearray(BANK) for tile in tiles})
            for node, tiles in zip(NODES, self.tables, strict=True)
        }
        self.driver = StandInDriver(chips)
        self.windows = WindowSet(NODES, [sites(tiles) for tiles in self.tables], BANK, self.driver)
        self.layout = layout(kind, banks)
        self.addresses = addresses(self.layout)
        self.landing = WindowLanding(WindowPools(self.windows, self.layout, BLOCKS, self.addresses))

    def memory(self, chip: int, bank: int) -> bytearray:
        return self.driver.chips[NODES[chip]].channels[self.tables[chip][bank]]

    def oracle(self) -> Pool:
        found = self.layout
        per_layer = [{"k": a, "v": b} for a, b in zip(self.addresses[::2], self.addresses[1::2], strict=True)]
        return Pool(
            found.kind,
            found.layers,
            found.heads,
            found.block_size,
            found.head_dim,
            (0,) * found.banks,
            per_layer[0] if found.kind == "cross_layer" else per_layer,
            "bfp8",
            found.alignment,
        )

    def plan(self, blocks: int) -> ParcelPlan:
        return ParcelPlan(self.layout, tuple(ChipShare(c, ((2 * c, 0), (2 * c + 1, 1))) for c in range(2)), blocks)


@pytest.mark.parametrize("banks", [7, 8])
@pytest.mark.parametrize("kind", ["cross_layer", "per_layer"])
@pytest.mark.parametrize("block_ids", [[4, 0, 2], [2, 3, 4]])
def test_a_parcel_is_in_the_chips_memory_once_it_counts(kind: PoolKind, banks: int, block_ids: list[int]) -> None:
    machine = Machine(kind, banks)
    landing, plan = machine.landing, machine.plan(len(block_ids))
    parcel = np.random.default_rng(1).integers(1, 256, plan.nbytes, dtype=np.uint8)
    segments = landing.segments(plan, parcel.ctypes.data, block_ids, 0)
    assert segments.count == expected_segments(machine.oracle(), block_ids, chips=2)
    regions = landing.regions()
    for remote, local, length in zip(segments.remote, segments.local, segments.length, strict=True):
        assert any(start <= local and local + length <= start + size for start, size in regions)
        ctypes.memmove(int(local), int(remote), int(length))  # what the network card does
    assert all(machine.memory(c, b).count(0) == BANK for c in range(2) for b in range(banks))

    landed = landing.landed(segments)

    expected = {(c, b): bytearray(BANK) for c in range(2) for b in range(banks)}
    page = machine.layout.page_pitch
    sent = iter(parcel.reshape(-1, page))
    counts = dict.fromkeys(expected, 0)
    for chip in range(2):
        for stream in stream_pages(machine.oracle(), block_ids):
            for bank, address in stream:
                expected[chip, bank][address : address + page] = next(sent).tobytes()
                counts[chip, bank] += page
    assert next(sent, None) is None
    for (chip, bank), content in expected.items():
        assert machine.memory(chip, bank) == content
    assert dict(((c, b), n) for c, b, n in landed) == {where: n for where, n in counts.items() if n}
    assert landing.fill() == tuple(counts.values())


@pytest.mark.slow
def test_mooncake_reads_into_the_windows() -> None:
    """Over TCP, where it writes by plain stores.  The engine goes before the windows do."""
    machine = Machine("cross_layer", 7)
    landing, plan = machine.landing, machine.plan(2)
    parcel = np.random.default_rng(2).integers(1, 256, plan.nbytes, dtype=np.uint8)
    source = MooncakeEngine("127.0.0.1", protocol="tcp", timeout_s=10)
    reader = MooncakeEngine("127.0.0.1", protocol="tcp", timeout_s=10)
    source.register(parcel.ctypes.data, parcel.nbytes)
    for address, length in landing.regions():
        reader.register(address, length)
    segments = landing.segments(plan, parcel.ctypes.data, [7, 1], 0)
    reader.read(source.session, segments)
    landing.landed(segments)
    page = machine.layout.page_pitch
    sent = iter(parcel.reshape(-1, page))
    for chip in range(2):
        for stream in stream_pages(machine.oracle(), [7, 1]):
            for bank, address in stream:
                assert machine.memory(chip, bank)[address : address + page] == next(sent).tobytes()
    assert next(sent, None) is None
    with pytest.raises(LocalError, match="still held"):
        machine.windows.close()
    reader.close()
    source.close()
    landing.close()
    machine.windows.close()
    assert machine.driver.taken == 0


def test_each_bank_is_flushed_once_at_the_end_of_its_last_read() -> None:
    machine = Machine()
    plan = machine.plan(2)
    parcel = np.ones(plan.nbytes, dtype=np.uint8)
    segments = machine.landing.segments(plan, parcel.ctypes.data, [1, 6], 0)
    machine.landing.landed(segments)
    ends: dict[int, int] = {}
    origins = sorted(int(o) for o in machine.windows.origins.reshape(-1))
    for local, length in zip(segments.local, segments.length, strict=True):
        origin = max(o for o in origins if o <= local)
        ends[origin] = int(local + length) - 1 - origin
    number = {int(o): 202 + n % 8 for n, o in enumerate(machine.windows.origins.reshape(-1))}
    expected = sorted((number[o], end // 4 * 4, end // 4 * 4 + 4) for o, end in ends.items())
    assert sorted(machine.driver.reads) == expected
    assert len(expected) == 16


def test_a_parcel_whose_chip_was_reset_does_not_count() -> None:
    machine = Machine()
    plan = machine.plan(1)
    parcel = np.ones(plan.nbytes, dtype=np.uint8)
    segments = machine.landing.segments(plan, parcel.ctypes.data, [0], 0)
    machine.driver.chips[NODES[0]].lost = True
    with pytest.raises(TransferFailed, match="could not be flushed"):
        machine.landing.landed(segments)
    assert set(machine.landing.fill()) == {0}


def test_only_the_pools_are_registered() -> None:
    """Nothing of a bank that a peer has no business with: one region for each run of pools in each bank."""
    machine = Machine("per_layer")
    size = machine.layout.rule.slots(machine.layout.pool_pages(BLOCKS)) * machine.layout.page_pitch
    expected = [
        (int(origin) + address, length)
        for origin in machine.windows.origins.reshape(-1)
        for address, length in ((FIRST, 4 * size), (FIRST + 4 * size + 4096, 2 * size))
    ]
    assert machine.landing.regions() == expected


@pytest.mark.parametrize("beyond", [True, False])
def test_segments_outside_the_windows_are_neither_flushed_nor_counted(beyond: bool) -> None:
    machine = Machine()
    place = int(machine.windows.origins.max()) + BANK - 16 if beyond else int(machine.windows.origins.min()) - 64
    outside = Segments(*(np.array([n], dtype=np.int64) for n in (0, place, 32)))
    with pytest.raises(LocalError, match="outside the device's banks"):
        machine.landing.landed(outside)
    assert machine.driver.reads == [] and set(machine.landing.fill()) == {0}


def test_a_landing_keeps_the_windows_until_it_is_closed() -> None:
    machine = Machine()
    with pytest.raises(LocalError, match="still held by the KV landing"):
        machine.windows.close()
    machine.landing.close()
    machine.windows.close()
    assert (machine.driver.taken, machine.driver.open_nodes) == (0, 0)


def test_a_parcel_for_other_pools_is_refused() -> None:
    landing = Machine(banks=8).landing
    with pytest.raises(LocalError, match="packed for other pools"):
        landing.segments(Machine(banks=7).plan(1), 0, [0], 0)


def test_pools_that_do_not_fit_are_refused() -> None:
    machine = Machine()
    good = machine.addresses
    # 8 blocks of 3 layers of 2 heads of 2 x 2 tiles are 192 pages; an eighth of them of 1,088 bytes in each bank.
    size = 192 // 8 * 1088
    with pytest.raises(ValueError, match="pools: the layout has 2, the windows and addresses 1"):
        WindowPools(machine.windows, machine.layout, BLOCKS, good[:1])
    with pytest.raises(ValueError, match="banks: the layout has 7"):
        WindowPools(machine.windows, layout("cross_layer", 7), BLOCKS, good)
    with pytest.raises(ValueError, match="multiples of 64"):
        WindowPools(machine.windows, machine.layout, BLOCKS, [good[0] + 32, good[1]])
    with pytest.raises(ValueError, match="would overlap"):
        WindowPools(machine.windows, machine.layout, BLOCKS, [good[0], good[0] + size - 64])
    with pytest.raises(ValueError, match="at least one block"):
        WindowPools(machine.windows, machine.layout, 0, good)
    end = BANK - size
    WindowPools(machine.windows, machine.layout, BLOCKS, [good[0], end])
    with pytest.raises(CapacityError, match="end past what the bank windows map"):
        WindowPools(machine.windows, machine.layout, BLOCKS, [good[0], end + 64])
