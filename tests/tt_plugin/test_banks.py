"""Bank tables, the lockstep allocator and the simulated memory."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hawk_connector.errors import CapacityError, ConfigError
from tests.tt_plugin.pools import TABLES
from tt_plugin.device.banks import BankTable, LockstepAllocator
from tt_plugin.device.simulated import SimulatedDevice


@pytest.mark.parametrize(
    ("name", "banks", "alignment", "first"),
    [
        # First addresses and tables as TTNN 0.81.1 hands them out.
        ("blackhole-p150", 8, 64, 0x100080),
        ("blackhole-p100", 7, 64, 0x100080),
        ("wormhole-n150", 12, 32, 0x100040),
    ],
)
def test_first_buffer_of_a_known_device(name: str, banks: int, alignment: int, first: int) -> None:
    table = BankTable.named(name)
    assert (table.banks, table.alignment) == (banks, alignment)
    assert LockstepAllocator(table).allocate(1) == first


def test_an_unknown_device_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"blackhole-p150, blackhole-p100, wormhole-n150; got 'grayskull'"):
        BankTable.named("grayskull")


def test_buffers_follow_each_other_aligned() -> None:
    allocator = LockstepAllocator(TABLES[8])
    assert [allocator.allocate(n) for n in (1, 64, 65)] == [0x100080, 0x1000C0, 0x100100]
    assert allocator.allocate(1) == 0x100180


def test_a_full_device_says_what_was_asked_and_what_is_left() -> None:
    allocator = LockstepAllocator(BankTable("small", (0,) * 3, 1024, 64, 100))
    allocator.allocate(512)
    with pytest.raises(CapacityError) as caught:
        allocator.allocate(450, "KV pool 2")
    # 100 is aligned to 128; 1024 - 128 - 512 are left, and 450 takes 512.
    assert "KV pool 2" in str(caught.value)
    assert "384 bytes" in str(caught.value) and "512 bytes per bank on 3 banks" in str(caught.value)


def test_freed_memory_is_one_piece_again() -> None:
    allocator = LockstepAllocator(BankTable("small", (0,), 1024, 64, 0))
    held = [allocator.allocate(256) for _ in range(4)]
    assert allocator.free_bytes == 0
    for address in (held[2], held[0], held[1], held[3]):
        allocator.free(address)
    assert allocator.largest_gap == 1024
    with pytest.raises(ValueError, match="no buffer is held at address 0x100"):
        allocator.free(held[1])


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 300)), max_size=40))
def test_held_buffers_never_overlap(steps: list[tuple[bool, int]]) -> None:
    allocator = LockstepAllocator(BankTable("small", (0,), 4096, 32, 0))
    held: dict[int, int] = {}
    for take, size in steps:
        if take:
            try:
                address = allocator.allocate(size)
            except CapacityError:
                assert allocator.largest_gap < size + 32
                continue
            assert address % 32 == 0 and address + size <= 4096
            assert all(address + size <= other or other + length <= address for other, length in held.items())
            held[address] = size
        elif held:
            address = sorted(held)[size % len(held)]
            allocator.free(address)
            del held[address]
    used = sum(-(-size // 32) * 32 for size in held.values())
    assert allocator.free_bytes == 4096 - used


def test_banks_lie_at_their_origins_and_apart() -> None:
    device = SimulatedDevice(2, TABLES[12])
    for chip in range(2):
        for bank in range(12):
            device.bank(chip, bank)[[0, -1]] = (chip * 12 + bank, 200 + bank)
    for chip in range(2):
        for bank in range(12):
            view = device.bank(chip, bank)
            assert view.ctypes.data == device.origins[chip, bank]
            assert (view[0], view[-1], len(view)) == (chip * 12 + bank, 200 + bank, 64 << 20)


def test_a_whole_blackhole_costs_only_what_is_touched() -> None:
    device = SimulatedDevice(4, BankTable.named("blackhole-p150"))
    assert sum(memory.nbytes for memory in device.memory) > 4 * 31 << 30
    device.bank(3, 7)[-1] = 1
    with open("/proc/self/smaps") as maps:
        text = maps.read()
    start = device.memory[3].ctypes.data
    entry = text[text.index(f"{start:x}-") :]
    resident = int(entry[entry.index("Rss:") :].split()[1])
    assert 0 < resident <= 2048  # KiB: the touched page, or the huge page around it


def test_a_closed_device_is_zeros_and_still_mapped() -> None:
    device = SimulatedDevice(1, TABLES[7])
    view = device.bank(0, 3)[:16]
    view[:] = 7
    device.close()
    assert np.array_equal(view, np.zeros(16, np.uint8))
