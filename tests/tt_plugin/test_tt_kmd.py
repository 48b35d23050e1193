"""The driver's interface: every argument byte for byte, and what each error number is told as."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from typing import Any

import pytest

from hawk_connector.errors import CapacityError, ConfigError, LocalError, UnsupportedError
from tests.tt_plugin.stand_in_driver import GIB, STRUCTURES, StandInChip, StandInDriver
from tt_plugin.device import tt_kmd
from tt_plugin.device.tt_kmd import DeviceNode, Grant, LinuxSyscalls, NocOrdering, NocTile

NODE = "/dev/tenstorrent/0"

# What a C compiler says of the structures in tt-kmd 2.10's ioctl.h: number, size, offset of each field.
HEADER: dict[str, tuple[int, int, dict[str, int]]] = {
    "GET_DEVICE_INFO": (0xFA00, 24, {"room": 0, "size": 4, "vendor": 8, "device": 10, "bus_dev_fn": 16, "domain": 20}),
    "GET_DRIVER_INFO": (0xFA05, 16, {"room": 0, "size": 4, "interface": 8, "major": 12, "minor": 13, "patch": 14}),
    "ALLOCATE_TLB": (0xFA0B, 48, {"size": 0, "r0": 8, "id": 16, "uc": 24, "wc": 32, "r2": 40}),
    "FREE_TLB": (0xFA0C, 4, {"id": 0}),
    "CONFIGURE_TLB": (0xFA0D, 48, {"id": 0, "config": 8, "r1": 40}),
    "EXPORT_TLB_DMABUF": (0xFA10, 32, {"argsz": 0, "flags": 4, "id": 8, "fd": 12, "offset": 16, "size": 24}),
}
CONFIG = {"addr": 0, "x_end": 8, "y_end": 10, "x_start": 12, "y_start": 14, "noc": 16, "mcast": 17, "ordering": 18}
CONFIG |= {"linked": 19, "static_vc": 20, "r1": 24}


def open_node(**given: Any) -> tuple[DeviceNode, StandInDriver]:
    driver = StandInDriver({NODE: StandInChip({(17, 14): bytearray(1 << 16)})}, **given)
    return DeviceNode(NODE, driver), driver


@pytest.mark.parametrize("name", HEADER)
def test_the_stand_in_has_the_headers_layout(name: str) -> None:
    number, size, offsets = HEADER[name]
    structure = STRUCTURES[number]
    assert {field: getattr(structure, field).offset for field in offsets} == offsets
    assert ctypes.sizeof(structure) == size
    if name == "CONFIGURE_TLB":
        config = dict(structure._fields_)["config"]
        assert {field: getattr(config, field).offset for field in CONFIG} == CONFIG


def test_numbers_and_sizes_are_the_headers() -> None:
    formats = {
        "GET_DEVICE_INFO": tt_kmd.DEVICE_INFO,
        "GET_DRIVER_INFO": tt_kmd.DRIVER_INFO,
        "ALLOCATE_TLB": tt_kmd.ALLOCATE,
        "FREE_TLB": tt_kmd.FREE,
        "CONFIGURE_TLB": tt_kmd.CONFIGURE,
        "EXPORT_TLB_DMABUF": tt_kmd.EXPORT,
    }
    assert {n: (getattr(tt_kmd, n), formats[n].size) for n in HEADER} == {n: row[:2] for n, row in HEADER.items()}


def test_opening_asks_for_versions_with_room_for_the_whole_answer() -> None:
    node, driver = open_node(version=(2, 7, 3))
    assert (node.driver, node.device_id) == ((2, 7, 3), 0xB140)
    assert driver.calls == [(0xFA05, bytes([12] + [0] * 15)), (0xFA00, bytes([20] + [0] * 23))]
    # It must not wait for an exclusive holder, nor leak into programs that are started.
    assert driver.opens == [(NODE, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)]


def test_allocation_sends_a_size_and_reads_id_and_write_combined_offset() -> None:
    node, driver = open_node()
    grants = [node.allocate(4 * GIB) for _ in range(2)]
    assert driver.calls[-1] == (0xFA0B, (4 * GIB).to_bytes(8, "little") + bytes(40))
    # Window 202 is the first of 4 GiB; its write-combined view is 512 MiB into the range that begins at 7 << 36.
    assert grants == [Grant(202, 4 * GIB, (7 << 36) + 0x20000000), Grant(203, 4 * GIB, (7 << 36) + 0x120000000)]


def test_an_aim_is_48_bytes_with_nothing_in_the_reserved_ones() -> None:
    node, driver = open_node()
    grant = node.allocate(4 * GIB)
    node.aim(grant, NocTile(0x111, 0x222), 0x300000000, NocOrdering.STRICT)
    sent = bytearray(48)
    sent[0] = 202
    sent[8:16] = (0x300000000).to_bytes(8, "little")
    sent[16:18], sent[18:20] = b"\x11\x01", b"\x22\x02"
    sent[26] = 1
    assert driver.calls[-1] == (0xFA0D, bytes(sent))
    assert [int(o) for o in (NocOrdering.RELAXED, NocOrdering.STRICT, NocOrdering.POSTED)] == [0, 1, 2]


def test_giving_back_names_the_window() -> None:
    node, driver = open_node()
    node.free(node.allocate(4 * GIB))
    assert driver.calls[-1] == (0xFA0C, (202).to_bytes(4, "little"))
    assert driver.taken == 0


def test_a_dma_buf_is_asked_for_by_window_offset_and_size() -> None:
    node, driver = open_node()
    grant = node.allocate(4 * GIB)
    descriptor = node.export(grant, 2 * mmap.PAGESIZE, 5 * mmap.PAGESIZE)
    words = [32, 0, 202, 0xFFFFFFFF]
    sent = (
        b"".join(w.to_bytes(4, "little") for w in words) + (8192).to_bytes(8, "little") + (20480).to_bytes(8, "little")
    )
    assert driver.calls[-1] == (0xFA10, sent)
    assert driver.exports[descriptor].id == 202
    os.close(descriptor)


@pytest.mark.parametrize(("offset", "length"), [(100, 4096), (0, 100), (4 * GIB, 4096), (4 * GIB - 4096, 8192)])
def test_a_dma_buf_of_a_part_that_the_driver_refuses(offset: int, length: int) -> None:
    node, _ = open_node()
    with pytest.raises(LocalError, match=r"no dma-buf of window 202.*multiples of 4096 inside the window"):
        node.export(node.allocate(4 * GIB), offset, length)


def test_a_driver_before_2_10_has_no_dma_bufs_and_is_not_asked() -> None:
    node, driver = open_node(version=(2, 9, 99))
    with pytest.raises(UnsupportedError, match=r"expected tt-kmd 2\.10\.0 or newer, got tt-kmd 2\.9\.99"):
        node.export(node.allocate(4 * GIB), 0, 4096)
    assert all(number != 0xFA10 for number, _ in driver.calls)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (errno.ENOENT, "modprobe tenstorrent"),
        (errno.EACCES, "group that owns the node"),
        (errno.EPERM, "container"),
        (errno.EAGAIN, "holds it exclusively"),
        (errno.ENODEV, "fallen off the bus"),
    ],
)
def test_why_a_node_cannot_be_opened(code: int, words: str) -> None:
    driver = StandInDriver({NODE: StandInChip()})
    driver.open_errors[NODE] = code
    with pytest.raises(ConfigError, match=rf"cannot open {NODE}: .*{words}"):
        DeviceNode(NODE, driver)


def test_a_driver_of_1_x_is_too_old_and_its_node_is_closed() -> None:
    driver = StandInDriver({NODE: StandInChip()}, interface=1)
    with pytest.raises(UnsupportedError, match=r"expected tt-kmd 2\.0\.0 or newer, got interface 1"):
        DeviceNode(NODE, driver)
    assert driver.open_nodes == 0


def test_a_file_that_is_no_device_node_is_refused_and_closed() -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ConfigError, match=r"/dev/null does not answer as a node of tt-kmd: Inappropriate ioctl"):
        DeviceNode("/dev/null", LinuxSyscalls())
    assert len(os.listdir("/proc/self/fd")) == before


def test_taken_windows_say_who_may_hold_them() -> None:
    node, driver = open_node()
    for _ in range(8):
        node.allocate(4 * GIB)
    with pytest.raises(CapacityError, match=r"every window of 4 GiB is taken.*TTNN or UMD.*/tenstorrent/0/pids"):
        node.allocate(4 * GIB)
    assert driver.taken == 8


def test_a_bar_without_large_windows_says_what_to_enable() -> None:
    driver = StandInDriver({NODE: StandInChip(large_windows=0)})
    with pytest.raises(UnsupportedError, match=r"window of 4 GiB is not supported.*above 4G decoding"):
        DeviceNode(NODE, driver).allocate(4 * GIB)


def test_an_aim_that_is_no_multiple_of_the_window_is_refused() -> None:
    node, _ = open_node()
    grant = node.allocate(4 * GIB)
    with pytest.raises(LocalError, match=r"cannot be aimed.*multiple of 0x100000000"):
        node.aim(grant, NocTile(17, 14), 4096, NocOrdering.STRICT)


def test_a_window_is_not_given_back_while_it_is_mapped() -> None:
    node, driver = open_node()
    grant = node.allocate(4 * GIB)
    node.aim(grant, NocTile(17, 14), 0, NocOrdering.STRICT)
    mapping = node.map(grant, 8192)
    with pytest.raises(LocalError, match="it is still mapped"):
        node.free(grant)
    mapping.close()
    node.free(grant)
    assert driver.taken == 0


def test_another_nodes_window_is_not_ours() -> None:
    node, driver = open_node()
    other = DeviceNode(NODE, driver)
    grant = other.allocate(4 * GIB)
    for act in (
        lambda: node.free(grant),
        lambda: node.map(grant, 4096),
        lambda: node.aim(grant, NocTile(17, 14), 0, NocOrdering.STRICT),
        lambda: node.export(grant, 0, 4096),
    ):
        with pytest.raises(LocalError, match="Operation not permitted"):
            act()


def test_a_chip_that_was_reset_is_told_as_such() -> None:
    node, driver = open_node()
    node.check_alive()
    driver.chips[NODE].lost = True
    with pytest.raises(LocalError, match="was reset, or has gone"):
        node.check_alive()


def test_a_closed_node_makes_no_more_calls() -> None:
    node, driver = open_node()
    node.close()
    node.close()
    count = len(driver.calls)
    with pytest.raises(LocalError, match="was closed"):
        node.allocate(4 * GIB)
    assert len(driver.calls) == count
    assert driver.open_nodes == 0


def test_the_kernels_calls_map_shared_memory_and_keep_it_from_children(tmp_path: Any) -> None:
    """A plain file stands for the node: what is written through the mapping is in the file, and the mapping is marked
    "dc" (do not copy on fork)."""
    file = tmp_path / "window"
    file.write_bytes(bytes(3 * mmap.PAGESIZE))
    system = LinuxSyscalls()
    descriptor = system.open(str(file), os.O_RDWR)
    mapping = system.mmap(descriptor, mmap.PAGESIZE, mmap.PAGESIZE)
    system.close(descriptor)
    mapping[:4] = b"HAWK"
    assert file.read_bytes()[mmap.PAGESIZE : mmap.PAGESIZE + 4] == b"HAWK"
    assert "dc" in flags_of(str(file))
    mapping.close()


def flags_of(path: str) -> list[str]:
    with open("/proc/self/smaps") as maps:
        found = False
        for line in maps:
            found = path in line if "-" in line.split()[0] else found
            if found and line.startswith("VmFlags:"):
                return line.split()[1:]
    raise AssertionError(f"{path} is not mapped")
