"""Bank windows over the stand-in driver: what is taken, what it shows, when bytes count, and how all of it ends."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Callable
from typing import Any

import pytest

from hawk_connector.errors import CapacityError, ConfigError, LocalError, TransferFailed, UnsupportedError
from tests.tt_plugin.stand_in_driver import GIB, StandInChip, StandInDriver
from tt_plugin.device.tt_kmd import NocTile
from tt_plugin.device.windows import BankSite, WindowSet

NODES = ("/dev/tenstorrent/0", "/dev/tenstorrent/3")
MIB = 1 << 20

# Translated coordinates of a p150a's eight banks and a P100's seven, as TTNN's bank tables have them.
P150 = ((17, 14), (17, 15), (17, 18), (17, 21), (18, 14), (18, 17), (18, 20), (18, 23))
P100 = ((18, 14), (18, 15), (18, 18), (17, 14), (17, 17), (17, 20), (17, 23))


def sites(tiles: tuple[tuple[int, int], ...], base: int = 0) -> list[BankSite]:
    return [BankSite(NocTile(*tile), base) for tile in tiles]


def chip(tiles: tuple[tuple[int, int], ...], **given: Any) -> StandInChip:
    return StandInChip({tile: bytearray(MIB) for tile in tiles}, **given)


def two_chips(**given: Any) -> tuple[StandInDriver, list[list[BankSite]]]:
    """Two cards with seven banks each, of which other channels are harvested."""
    tables = [P100, P150[:7]]
    driver = StandInDriver({node: chip(tiles, **given) for node, tiles in zip(NODES, tables, strict=True)})
    return driver, [sites(tiles) for tiles in tables]


def test_what_is_written_at_an_origin_is_in_that_bank_of_that_chip() -> None:
    driver, places = two_chips()
    with WindowSet(NODES, places, MIB, driver) as windows:
        assert windows.origins.shape == (2, 7)
        for number, origin in enumerate(windows.origins.reshape(-1)):
            ctypes.memset(int(origin) + 1000 + number, number + 1, 16)
        windows.flush({(c, b): 1000 + 7 * c + b + 15 for c in range(2) for b in range(7)})
        for number in range(14):
            node, tile = NODES[number // 7], (P100, P150)[number // 7][number % 7]
            memory = driver.chips[node].channels[tile]
            assert bytes(memory[1000 + number : 1016 + number]) == bytes([number + 1]) * 16
            assert memory.count(0) == MIB - 16
    assert (driver.taken, driver.open_nodes, driver.aimed_while_mapped) == (0, 0, [])


def test_a_bank_that_begins_inside_its_channel() -> None:
    driver = StandInDriver({NODES[0]: chip(P150)})
    with WindowSet(NODES[:1], [sites(P150, base=MIB // 2)], MIB // 4, driver) as windows:
        ctypes.memset(int(windows.origins[0, 3]), 7, 8)
        windows.flush({(0, 3): 7})
        assert bytes(driver.chips[NODES[0]].channels[P150[3]][MIB // 2 : MIB // 2 + 9]) == bytes([7] * 8 + [0])
        assert windows.read(0, 3, 0, 9) == bytes([7] * 8 + [0])


def test_a_bank_past_the_first_4_gib_is_aimed_at_by_whole_windows() -> None:
    driver = StandInDriver({NODES[0]: chip(P150)})
    driver.refuse[("mmap", 0)] = errno.ENXIO  # nothing of it is backed; its aim is what counts
    with pytest.raises(LocalError):
        WindowSet(NODES[:1], [sites(P150, base=9 * GIB + 4096)], MIB, driver)
    aims = [argument for number, argument in driver.calls if number == 0xFA0D]
    assert [int.from_bytes(aim[8:16], "little") for aim in aims] == [8 * GIB]


def test_windows_are_strict_and_mapped_no_further_than_asked() -> None:
    driver, places = two_chips()
    with WindowSet(NODES, places, 100_000, driver):
        for owner in driver.chips.values():
            for window in owner.windows.values():
                (mapping,) = window.mappings
                assert len(mapping) == -(-100_000 // mmap.PAGESIZE) * mmap.PAGESIZE
                assert window.aim is not None and window.aim.ordering == 1


# --- the flush rule


def test_bytes_are_in_the_bank_after_the_flush_and_not_before() -> None:
    driver = StandInDriver({NODES[0]: chip(P150)})
    memory = driver.chips[NODES[0]].channels
    with WindowSet(NODES[:1], [sites(P150)], MIB, driver) as windows:
        for bank in (2, 5):
            ctypes.memset(int(windows.origins[0, bank]) + 4096, 9, 4096)
        assert memory[P150[2]].count(0) == memory[P150[5]].count(0) == MIB
        windows.flush({(0, 2): 8191})
        assert memory[P150[2]].count(9) == 4096 and memory[P150[5]].count(0) == MIB
        windows.flush({(0, 5): 8191})
        assert memory[P150[5]].count(9) == 4096


def test_a_flush_reads_one_aligned_word_of_each_bank_where_its_last_byte_is() -> None:
    driver = StandInDriver({NODES[0]: chip(P150)})
    with WindowSet(NODES[:1], [sites(P150)], MIB, driver) as windows:
        windows.flush({(0, 0): 4099, (0, 7): MIB - 1})
        assert driver.reads == [(202, 4096, 4100), (209, MIB - 4, MIB)]
        windows.flush({})
        assert len(driver.reads) == 2


def test_a_chip_that_was_reset_is_not_read_and_its_bytes_are_not_vouched_for() -> None:
    driver, places = two_chips()
    windows = WindowSet(NODES, places, MIB, driver)
    driver.chips[NODES[1]].lost = True
    windows.flush({(0, 0): 3})
    count = len(driver.reads)
    with pytest.raises(TransferFailed, match=r"could not be flushed.*/3: the chip was reset, or has gone"):
        windows.flush({(0, 0): 3, (1, 0): 3})
    assert len(driver.reads) == count
    driver.chips[NODES[1]].lost = False
    windows.close()


def test_a_chip_that_goes_during_the_flush_is_noticed() -> None:
    driver = StandInDriver({NODES[0]: chip(P150)})
    with WindowSet(NODES[:1], [sites(P150)], MIB, driver) as windows:
        asked = sum(number == 0xFA05 for number, _ in driver.calls)
        driver.refuse[(0xFA05, asked + 1)] = errno.ENODEV  # the question after the reads
        with pytest.raises(TransferFailed, match="was reset, or has gone"):
            windows.flush({(0, 1): 0})
        assert len(driver.reads) == 1


@pytest.mark.parametrize("address", [MIB, -4])
def test_a_flush_outside_the_windows_vouches_for_nothing(address: int) -> None:
    driver = StandInDriver({NODES[0]: chip(P150)})
    with WindowSet(NODES[:1], [sites(P150)], MIB, driver) as windows:
        with pytest.raises(TransferFailed, match="lie outside the window"):
            windows.flush({(0, 1): address})
        assert driver.reads == []


# --- the end, on every path


def fail_first_node(driver: StandInDriver) -> None:
    driver.open_errors[NODES[0]] = errno.ENOENT


def fail_second_node(driver: StandInDriver) -> None:
    driver.open_errors[NODES[1]] = errno.EACCES


def fail_at(what: Any, count: int, code: int) -> Callable[[StandInDriver], None]:
    def arrange(driver: StandInDriver) -> None:
        driver.refuse[(what, count)] = code

    return arrange


@pytest.mark.parametrize(
    ("arrange", "error"),
    [
        (fail_first_node, ConfigError),
        (fail_second_node, ConfigError),
        *((fail_at(0xFA0B, n, errno.ENOMEM), CapacityError) for n in (0, 6, 7, 13)),
        *((fail_at(0xFA0D, n, errno.EINVAL), LocalError) for n in (0, 8, 13)),
        *((fail_at("mmap", n, errno.ENOMEM), LocalError) for n in (0, 3, 13)),
        (fail_at(0xFA00, 1, errno.ENODEV), LocalError),
    ],
)
def test_what_was_taken_before_a_failure_is_given_back(
    arrange: Callable[[StandInDriver], None], error: type[Exception]
) -> None:
    driver, places = two_chips()
    arrange(driver)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(error):
        WindowSet(NODES, places, MIB, driver)
    assert (driver.taken, driver.open_nodes) == (0, 0)
    assert len(os.listdir("/proc/self/fd")) == before


def test_windows_are_given_back_in_reverse_order() -> None:
    driver, places = two_chips()
    driver.refuse[("mmap", 9)] = errno.ENOMEM
    with pytest.raises(LocalError, match="ulimit -v"):
        WindowSet(NODES, places, MIB, driver)
    freed = [int.from_bytes(argument, "little") for number, argument in driver.calls if number == 0xFA0C]
    assert freed == [204, 203, 202, 208, 207, 206, 205, 204, 203, 202]


def test_too_few_windows_say_how_many_there_were() -> None:
    driver, places = two_chips(large_windows=5)
    with pytest.raises(CapacityError, match=r"expected 7 free windows, one for each bank, got 5, which were given"):
        WindowSet(NODES, places, MIB, driver)
    assert driver.taken == 0


def test_two_owners_cannot_have_all_banks_at_once() -> None:
    driver = StandInDriver({NODES[0]: chip(P150)})
    first = WindowSet(NODES[:1], [sites(P150)], MIB, driver)
    with pytest.raises(CapacityError, match="every window of 4 GiB is taken"):
        WindowSet(NODES[:1], [sites(P150)], MIB, driver)
    assert driver.taken == 8
    first.close()
    WindowSet(NODES[:1], [sites(P150)], MIB, driver).close()
    assert driver.taken == 0


@pytest.mark.parametrize(("device_id", "name"), [(0x401E, "Wormhole"), (0xFACA, "another chip")])
def test_only_blackhole_has_such_windows(device_id: int, name: str) -> None:
    driver = StandInDriver({NODES[0]: chip(P150, device_id=device_id)})
    with pytest.raises(UnsupportedError, match=rf"only Blackhole.*got {name} \(PCI device {device_id:#x}\).*bounce"):
        WindowSet(NODES[:1], [sites(P150)], MIB, driver)
    assert (driver.open_nodes, driver.taken) == (0, 0)
    assert all(number != 0xFA0B for number, _ in driver.calls)


def test_windows_that_are_held_are_not_closed() -> None:
    driver = StandInDriver({NODES[0]: chip(P150)})
    windows = WindowSet(NODES[:1], [sites(P150)], MIB, driver)
    hold = windows.hold("an engine")
    with pytest.raises(LocalError, match=r"still held by an engine\. Close the engines"):
        windows.close()
    ctypes.memset(int(windows.origins[0, 0]), 1, 4)  # a late write must hit the bank and nothing else
    assert driver.taken == 8
    hold.release()
    hold.release()
    windows.close()
    windows.close()
    assert (driver.taken, driver.open_nodes) == (0, 0)
    with pytest.raises(LocalError, match="were closed"):
        windows.hold("too late")
    with pytest.raises(TransferFailed):
        windows.flush({(0, 0): 0})
    with pytest.raises(LocalError, match="were closed"):
        windows.read(0, 0, 0, 4)


def test_a_window_that_will_not_close_does_not_keep_the_others() -> None:
    driver = StandInDriver({NODES[0]: chip(P150)})
    windows = WindowSet(NODES[:1], [sites(P150)], MIB, driver)
    driver.refuse[(0xFA0C, 2)] = errno.EPERM
    with pytest.raises(LocalError, match="window 207 cannot be given back"):
        windows.close()
    assert (driver.taken, driver.open_nodes) == (0, 0)  # closing the node freed it


@pytest.mark.parametrize(
    ("paths", "places"),
    [
        ((), []),
        (NODES[:1], [[]]),
        (NODES, [sites(P150)]),
        (NODES, [sites(P150), sites(P100)]),
        ((NODES[0], NODES[0]), [sites(P150), sites(P150)]),
    ],
)
def test_nodes_and_banks_must_fit_each_other(paths: tuple[str, ...], places: list[list[BankSite]]) -> None:
    driver = StandInDriver({node: chip(P150) for node in NODES})
    with pytest.raises(ValueError, match="each chip needs a node of its own"):
        WindowSet(paths, places, MIB, driver)
    assert driver.opens == []


@pytest.mark.parametrize(("base", "length"), [(0, 0), (0, 4 * GIB + 1), (4 * GIB - 4096, 8192)])
def test_a_bank_must_fit_one_window(base: int, length: int) -> None:
    driver = StandInDriver({NODES[0]: chip(P150)})
    with pytest.raises(LocalError, match="does not fit one window"):
        WindowSet(NODES[:1], [sites(P150, base)], length, driver)
    assert driver.taken == 0


def test_a_dma_buf_of_a_bank_counts_from_the_banks_base() -> None:
    driver = StandInDriver({NODES[0]: chip(P150)})
    with WindowSet(NODES[:1], [sites(P150, base=MIB // 2)], MIB // 4, driver) as windows:
        descriptor = windows.export(0, 6, 8192, 4096)
        assert driver.exports[descriptor].id == 208
        assert driver.calls[-1][1][16:] == (MIB // 2 + 8192).to_bytes(8, "little") + (4096).to_bytes(8, "little")
        os.close(descriptor)
