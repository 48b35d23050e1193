"""A stand-in for tt-kmd at the system-call boundary, written from the driver's public header and its behaviour.

It shares nothing with ``tt_plugin.device.tt_kmd``: arguments are read through C structures laid out by ctypes, as a
compiler lays out the header's.  Bytes that are written through a window are *posted*: they reach the chip's memory when
somebody reads through that window, as on PCI Express, and not before.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

U8, U16, U32, U64 = ctypes.c_uint8, ctypes.c_uint16, ctypes.c_uint32, ctypes.c_uint64
GIB = 1 << 30


class DeviceInfo(ctypes.Structure):
    _fields_ = (
        ("room", U32),
        ("size", U32),
        *((name, U16) for name in ("vendor", "device", "subvendor", "subdevice", "bus_dev_fn", "dma_log2", "domain")),
        ("reserved", U16),
    )


class DriverInfo(ctypes.Structure):
    _fields_ = (
        ("room", U32),
        ("size", U32),
        ("interface", U32),
        ("major", U8),
        ("minor", U8),
        ("patch", U8),
        ("r", U8),
    )


class AllocateTlb(ctypes.Structure):
    _fields_ = (("size", U64), ("r0", U64), ("id", U32), ("r1", U32), ("uc", U64), ("wc", U64), ("r2", U64))


class FreeTlb(ctypes.Structure):
    _fields_ = (("id", U32),)


class NocTlbConfig(ctypes.Structure):
    _fields_ = (
        ("addr", U64),
        *((name, U16) for name in ("x_end", "y_end", "x_start", "y_start")),
        *((name, U8) for name in ("noc", "mcast", "ordering", "linked", "static_vc")),
        ("r0", U8 * 3),
        ("r1", U32 * 2),
    )


class ConfigureTlb(ctypes.Structure):
    _fields_ = (("id", U32), ("r0", U32), ("config", NocTlbConfig), ("r1", U64))


class ExportTlb(ctypes.Structure):
    _fields_ = (
        ("argsz", U32),
        ("flags", U32),
        ("id", U32),
        ("fd", ctypes.c_int32),
        ("offset", U64),
        ("size", U64),
    )


STRUCTURES: dict[int, Any] = {
    0xFA00: DeviceInfo,
    0xFA05: DriverInfo,
    0xFA0B: AllocateTlb,
    0xFA0C: FreeTlb,
    0xFA0D: ConfigureTlb,
    0xFA10: ExportTlb,
}


class WindowMapping(mmap.mmap):
    """A window's memory in this process.  Slicing is the host's read, which pushes posted writes out."""

    driver: StandInDriver
    window: Window
    delivered: Any  # uint8: what the chip's memory held when it was last looked at from here

    def __getitem__(self, key: Any) -> Any:
        self.driver.reads.append((self.window.id, key.start, key.stop))
        self.driver.deliver(self.window, self)
        return super().__getitem__(key)


@dataclass(eq=False)
class Window:
    id: int
    size: int
    chip: StandInChip
    owner: int
    aim: NocTlbConfig | None = None
    mappings: list[WindowMapping] = field(default_factory=list)

    @property
    def mapped(self) -> bool:
        return any(not mapping.closed for mapping in self.mappings)


@dataclass(eq=False)
class StandInChip:
    """``channels``: bytes of each DRAM channel by its tile, as far as they are backed."""

    channels: dict[tuple[int, int], bytearray] = field(default_factory=dict)
    device_id: int = 0xB140
    large_windows: int = 8
    windows: dict[int, Window] = field(default_factory=dict)
    lost: bool = False

    def free_ids(self, size: int) -> Iterator[int]:
        first, count = (202, self.large_windows) if size == 4 * GIB else (0, 201)
        return (n for n in range(first, first + count) if n not in self.windows)


class StandInDriver:
    """Chips by the path of their node.

    ``calls``: every ioctl as (number, argument as it came).  ``reads``: host reads as (window, start, stop).
    ``refuse``: (number, how many succeed before) -> errno.
    """

    def __init__(
        self, chips: dict[str, StandInChip], version: tuple[int, int, int] = (2, 10, 0), interface: int = 2
    ) -> None:
        self.chips = chips
        self.version = version
        self.interface = interface
        self.calls: list[tuple[int, bytes]] = []
        self.reads: list[tuple[int, int, int]] = []
        self.aimed_while_mapped: list[int] = []
        self.opens: list[tuple[str, int]] = []
        self.open_errors: dict[str, int] = {}
        self.refuse: dict[tuple[Any, int], int] = {}
        self.exports: dict[int, Window] = {}
        self._counts: dict[Any, int] = {}
        self._descriptors: dict[int, StandInChip] = {}

    # --- what the product calls

    def open(self, path: str, flags: int) -> int:
        self.opens.append((path, flags))
        if path in self.open_errors:
            raise OSError(self.open_errors[path], os.strerror(self.open_errors[path]))
        if path not in self.chips:
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))
        descriptor = os.open(os.devnull, os.O_RDWR)
        self._descriptors[descriptor] = self.chips[path]
        return descriptor

    def ioctl(self, descriptor: int, request: int, argument: bytearray) -> None:
        self.calls.append((request, bytes(argument)))
        self._maybe_refuse(request)
        chip = self._descriptors[descriptor]
        if chip.lost:
            raise OSError(errno.ENODEV, os.strerror(errno.ENODEV))
        structure = STRUCTURES.get(request)
        if structure is None:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        if len(argument) < ctypes.sizeof(structure):
            raise OSError(errno.EFAULT, os.strerror(errno.EFAULT))
        code = _HANDLERS[request](self, chip, descriptor, structure.from_buffer(argument))
        if code:
            raise OSError(code, os.strerror(code))

    def mmap(self, descriptor: int, length: int, offset: int) -> mmap.mmap:
        self._maybe_refuse("mmap")
        chip = self._descriptors[descriptor]
        place = offset - (7 << 36)  # write-combined view
        number = 202 + (place - (512 << 20)) // (4 * GIB) if place >= 512 << 20 else place // (2 << 20)
        window = chip.windows.get(number)
        if window is None or window.owner != descriptor:
            raise OSError(errno.EPERM, os.strerror(errno.EPERM))
        if length > window.size or offset % mmap.PAGESIZE or offset != self._offset(window):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        mapping = WindowMapping(-1, length)
        mapping.driver, mapping.window = self, window
        window.mappings.append(mapping)
        mapping.delivered = np.zeros(length, dtype=np.uint8)
        if window.aim is not None:
            self.deliver(window, mapping)
        return mapping

    def close(self, descriptor: int) -> None:
        chip = self._descriptors.pop(descriptor)
        os.close(descriptor)
        for window in [w for w in chip.windows.values() if w.owner == descriptor]:
            assert not window.mapped, "the node was closed before its windows were unmapped"
            del chip.windows[window.id]

    # --- what tests look at

    @property
    def open_nodes(self) -> int:
        return len(self._descriptors)

    @property
    def taken(self) -> int:
        return sum(len(chip.windows) for chip in self.chips.values())

    def deliver(self, window: Window, mapping: WindowMapping) -> None:
        """Posted writes reach the channel that the window is aimed at, and the window shows what is there."""
        memory = self._shown(window)
        count = min(len(memory), len(mapping))
        view = np.frombuffer(mapping, dtype=np.uint8, count=count)
        posted = view != mapping.delivered[:count]
        memory[:count][posted] = view[posted]
        view[:] = mapping.delivered[:count] = memory[:count]

    def _shown(self, window: Window) -> Any:
        assert window.aim is not None
        channel = window.chip.channels[window.aim.x_end, window.aim.y_end]
        return np.frombuffer(channel, dtype=np.uint8)[window.aim.addr :]

    def _maybe_refuse(self, what: Any) -> None:
        count = self._counts[what] = self._counts.get(what, -1) + 1
        code = self.refuse.get((what, count))
        if code:
            raise OSError(code, os.strerror(code))

    @staticmethod
    def _offset(window: Window) -> int:
        start = (512 << 20) + (window.id - 202) * 4 * GIB if window.id >= 202 else window.id * (2 << 20)
        return (7 << 36) + start

    # --- ioctls: 0 or an error number

    def _device_info(self, chip: StandInChip, descriptor: int, argument: DeviceInfo) -> int:
        assert argument.room == 20, "room for the answer: all but the input"
        argument.size, argument.vendor, argument.device = 20, 0x1E52, chip.device_id
        return 0

    def _driver_info(self, chip: StandInChip, descriptor: int, argument: DriverInfo) -> int:
        assert argument.room == 12
        argument.size, argument.interface = 12, self.interface
        if self.interface >= 2:
            argument.major, argument.minor, argument.patch = self.version
        return 0

    def _allocate(self, chip: StandInChip, descriptor: int, argument: AllocateTlb) -> int:
        if argument.size not in (2 << 20, 4 * GIB) or (argument.size == 4 * GIB and not chip.large_windows):
            return errno.EINVAL
        free = next(chip.free_ids(argument.size), None)
        if free is None:
            return errno.ENOMEM
        window = chip.windows[free] = Window(free, argument.size, chip, descriptor)
        argument.id, argument.wc = free, self._offset(window)
        argument.uc = argument.wc - (1 << 36)
        return 0

    def _free(self, chip: StandInChip, descriptor: int, argument: FreeTlb) -> int:
        window = chip.windows.get(argument.id)
        if window is None or window.owner != descriptor:
            return errno.EPERM
        if window.mapped:
            return errno.EBUSY
        del chip.windows[argument.id]
        return 0

    def _configure(self, chip: StandInChip, descriptor: int, argument: ConfigureTlb) -> int:
        window = chip.windows.get(argument.id)
        if window is None or window.owner != descriptor:
            return errno.EPERM
        if argument.config.addr % window.size:
            return errno.EINVAL
        if window.mapped:
            self.aimed_while_mapped.append(window.id)
        window.aim = NocTlbConfig.from_buffer_copy(argument.config)
        return 0

    def _export(self, chip: StandInChip, descriptor: int, argument: ExportTlb) -> int:
        if self.version < (2, 10, 0):
            return errno.EINVAL
        if argument.argsz != 32 or argument.flags or argument.offset % mmap.PAGESIZE or argument.size % mmap.PAGESIZE:
            return errno.EINVAL
        window = chip.windows.get(argument.id)
        if window is None or window.owner != descriptor:
            return errno.EPERM
        if argument.offset >= window.size or argument.offset + argument.size > window.size:
            return errno.EINVAL
        argument.fd = os.open(os.devnull, os.O_RDWR)
        self.exports[argument.fd] = window
        return 0


_HANDLERS: dict[int, Any] = {
    0xFA00: StandInDriver._device_info,
    0xFA05: StandInDriver._driver_info,
    0xFA0B: StandInDriver._allocate,
    0xFA0C: StandInDriver._free,
    0xFA0D: StandInDriver._configure,
    0xFA10: StandInDriver._export,
}
