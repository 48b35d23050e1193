"""Tenstorrent's kernel driver (tt-kmd) as this package uses it: device nodes, windows, dma-bufs; in Python alone.

Numbers and layouts are those of the driver's public header, ioctl.h, which has kept them from 2.0 on (windows came
with 1.32, the driver's own version with 2.0, dma-bufs with 2.10).  All are ``_IO(0xFA, nr)``: the size is not part of
the number, and the driver reads and writes the argument in place.  Fields called reserved are zero.

Every system call goes through ``Syscalls``, so that a stand-in driver can take the place of the kernel's and nothing
above it knows.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

from hawk_connector.errors import CapacityError, ConfigError, HawkError, LocalError, UnsupportedError

__all__ = [
    "BLACKHOLE",
    "OLDEST_DRIVER",
    "OLDEST_EXPORTER",
    "WORMHOLE",
    "DeviceNode",
    "Grant",
    "LinuxSyscalls",
    "NocOrdering",
    "NocTile",
    "Syscalls",
    "Version",
]

GET_DEVICE_INFO = 0xFA00
GET_DRIVER_INFO = 0xFA05
ALLOCATE_TLB = 0xFA0B
FREE_TLB = 0xFA0C
CONFIGURE_TLB = 0xFA0D
EXPORT_TLB_DMABUF = 0xFA10

# In: bytes of the answer that the caller has room for.  Out: bytes of the whole answer, then PCI ids, bus/device/
# function, log2 of the largest DMA buffer, PCI domain, reserved.
DEVICE_INFO = struct.Struct("<I I8H")
# In: as above.  Out: as above, version of the interface, major, minor, patch, reserved.
DRIVER_INFO = struct.Struct("<I II4B")
# In: bytes of the window, reserved.  Out: id, reserved, mmap offset uncached, write-combined, reserved.
ALLOCATE = struct.Struct("<QQ IIQQQ")
FREE = struct.Struct("<I")
# In: id, reserved; address, x_end, y_end, x_start, y_start, noc, mcast, ordering, linked, static_vc, 3 bytes and two
# words reserved.  Out: reserved.
CONFIGURE = struct.Struct("<II Q4H5B3x2I Q")
# Bytes of this argument, flags, window, dma-buf descriptor (out), offset and size of the exported part.
EXPORT = struct.Struct("<III i QQ")

BLACKHOLE = 0xB140
WORMHOLE = 0x401E

_INTERFACE = 2  # of drivers 2.x

Version = tuple[int, int, int]

OLDEST_DRIVER: Version = (2, 0, 0)
OLDEST_EXPORTER: Version = (2, 10, 0)

_GIB = 1 << 30


class NocOrdering(IntEnum):
    """How the chip orders what comes through a window.

    STRICT keeps PCI Express' order, in which a read stays behind earlier writes; RELAXED and POSTED give it up.
    """

    RELAXED = 0
    STRICT = 1
    POSTED = 2


@dataclass(frozen=True, slots=True)
class NocTile:
    """A tile of the chip's network, in the (translated) coordinates that the device's bank table uses."""

    x: int
    y: int


@dataclass(frozen=True, slots=True)
class Grant:
    """A window that this node owns: its id, its size, and the mmap offset of its write-combined view."""

    window: int
    size: int
    mmap_offset: int


class Syscalls(Protocol):
    """The system calls that this module makes; each raises OSError."""

    def open(self, path: str, flags: int) -> int: ...

    def ioctl(self, descriptor: int, request: int, argument: bytearray) -> None:
        """Reads and writes ``argument`` in place."""
        ...

    def mmap(self, descriptor: int, length: int, offset: int) -> mmap.mmap:
        """A shared mapping that may be read and written."""
        ...

    def close(self, descriptor: int) -> None: ...


class LinuxSyscalls:
    """The kernel's."""

    def open(self, path: str, flags: int) -> int:
        return os.open(path, flags)

    def ioctl(self, descriptor: int, request: int, argument: bytearray) -> None:
        fcntl.ioctl(descriptor, request, argument, True)

    def mmap(self, descriptor: int, length: int, offset: int) -> mmap.mmap:
        mapping = mmap.mmap(descriptor, length, offset=offset)
        # A child that vLLM forks must not keep the window taken after this process gave it back.
        mapping.madvise(mmap.MADV_DONTFORK)
        return mapping

    def close(self, descriptor: int) -> None:
        os.close(descriptor)


class DeviceNode:
    """One chip's device node, open.  Whoever closes it gives back what it still owns: the driver frees its windows.

    ``device_id``: PCI device id.  ``driver``: version of the driver.
    """

    def __init__(self, path: str, system: Syscalls | None = None) -> None:
        """Raises ConfigError where there is no such node, it may not be opened, or it is no node of this driver;
        UnsupportedError where the driver is too old to hand out windows."""
        self.path = path
        self._system = system if system is not None else LinuxSyscalls()
        try:
            # Without O_NONBLOCK the driver (2.10) lets us wait, with no end, for a process that holds it exclusively.
            self._descriptor = self._system.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise _cannot_open(path, error) from None
        self._open = True
        try:
            self.driver = self._driver()
            self.device_id = self._device()
        except BaseException:
            self.close()
            raise

    def check_alive(self) -> None:
        """Raises LocalError where the chip was reset or has gone since the node was opened.

        The driver unmaps all windows at a reset: a read through one would then end this process with SIGBUS.
        """
        self._driver()

    def allocate(self, size: int) -> Grant:
        """A window of exactly ``size`` bytes.

        Raises CapacityError where all of that size are taken, UnsupportedError where the chip or its BARs have none.
        """
        argument = bytearray(ALLOCATE.pack(size, 0, 0, 0, 0, 0, 0))
        try:
            self._ioctl(ALLOCATE_TLB, argument)
        except OSError as error:
            raise self._cannot_allocate(size, error) from None
        _, _, window, _, _, write_combined, _ = ALLOCATE.unpack(argument)
        return Grant(window, size, write_combined)

    def aim(self, grant: Grant, tile: NocTile, address: int, ordering: NocOrdering) -> None:
        """Lets the window show ``tile``'s memory from ``address``, a multiple of the window's size, on.

        To be done once, before the window is mapped: whoever holds the mapping (a network card above all) would
        from then on write somewhere else, and the driver does not refuse it.
        """
        argument = bytearray(
            CONFIGURE.pack(grant.window, 0, address, tile.x, tile.y, 0, 0, 0, 0, ordering, 0, 0, 0, 0, 0)
        )
        try:
            self._ioctl(CONFIGURE_TLB, argument)
        except OSError as error:
            raise LocalError(
                f"{self.path}: window {grant.window} cannot be aimed at tile ({tile.x}, {tile.y}), address {address:#x}"
                f": {error.strerror}",
                expected=f"an address that is a multiple of {grant.size:#x}, and a window of this node",
            ) from None

    def map(self, grant: Grant, length: int) -> mmap.mmap:
        """The window's first ``length`` bytes, write-combined.  Raises LocalError."""
        try:
            return self._system.mmap(self._owned(), length, grant.mmap_offset)
        except OSError as error:
            raise LocalError(
                f"{self.path}: cannot map {length} bytes of window {grant.window}: {error.strerror}",
                fix="Lift the limit on address space (ulimit -v)." if error.errno == errno.ENOMEM else None,
            ) from None

    def export(self, grant: Grant, offset: int, length: int) -> int:
        """A dma-buf of bytes [offset, offset + length) of the window, both multiples of the page size.

        The descriptor is the caller's to close; until it and all that was registered from it are gone, the driver
        keeps the window taken and refuses to reset the chip.  Raises UnsupportedError where the driver cannot.
        """
        if self.driver < OLDEST_EXPORTER:
            raise UnsupportedError(
                "a dma-buf of a window",
                reason="this driver has none",
                expected=f"tt-kmd {_dotted(OLDEST_EXPORTER)} or newer",
                got=f"tt-kmd {_dotted(self.driver)}",
                fix="Upgrade tt-kmd, or register the mapping itself, which needs a peer-memory client (hawk_peermem).",
            )
        argument = bytearray(EXPORT.pack(EXPORT.size, 0, grant.window, -1, offset, length))
        try:
            self._ioctl(EXPORT_TLB_DMABUF, argument)
        except OSError as error:
            hint = "The kernel has no dma-buf support (5.8 or newer has)." if error.errno == errno.EOPNOTSUPP else None
            raise LocalError(
                f"{self.path}: no dma-buf of window {grant.window}, bytes {offset:#x} to {offset + length:#x}: "
                f"{error.strerror}",
                expected=f"offset and length to be multiples of {mmap.PAGESIZE} inside the window",
                fix=hint,
            ) from None
        return int(EXPORT.unpack(argument)[3])

    def free(self, grant: Grant) -> None:
        """Gives the window back.  Raises LocalError while it is mapped."""
        try:
            self._ioctl(FREE_TLB, bytearray(FREE.pack(grant.window)))
        except OSError as error:
            why = "it is still mapped" if error.errno == errno.EBUSY else error.strerror
            raise LocalError(f"{self.path}: window {grant.window} cannot be given back: {why}") from None

    def close(self) -> None:
        """Repeatable."""
        if self._open:
            self._open = False
            self._system.close(self._descriptor)

    def _owned(self) -> int:
        if not self._open:
            raise LocalError(f"{self.path} was closed")
        return self._descriptor

    def _ioctl(self, request: int, argument: bytearray) -> None:
        self._system.ioctl(self._owned(), request, argument)

    def _driver(self) -> Version:
        argument = bytearray(DRIVER_INFO.pack(DRIVER_INFO.size - 4, 0, 0, 0, 0, 0, 0))
        self._ask(GET_DRIVER_INFO, argument)
        _, _, interface, major, minor, patch, _ = DRIVER_INFO.unpack(argument)
        if interface < _INTERFACE:
            raise UnsupportedError(
                f"{self.path}: this driver",
                reason="it does not speak the interface that windows are handed out by",
                expected=f"tt-kmd {_dotted(OLDEST_DRIVER)} or newer",
                got=f"interface {interface}, that of tt-kmd 1.x",
                fix="Upgrade tt-kmd, or use the bounce path.",
            )
        return (major, minor, patch)

    def _device(self) -> int:
        argument = bytearray(DEVICE_INFO.pack(DEVICE_INFO.size - 4, 0, 0, 0, 0, 0, 0, 0, 0, 0))
        self._ask(GET_DEVICE_INFO, argument)
        return int(DEVICE_INFO.unpack(argument)[3])

    def _ask(self, request: int, argument: bytearray) -> None:
        try:
            self._ioctl(request, argument)
        except OSError as error:
            if error.errno == errno.ENODEV:
                raise LocalError(
                    f"{self.path}: the chip was reset, or has gone, since it was opened",
                    fix="What its memory held is lost. Start this process again.",
                ) from None
            raise ConfigError(f"{self.path} does not answer as a node of tt-kmd: {error.strerror}") from None

    def _cannot_allocate(self, size: int, error: OSError) -> HawkError:
        name = f"{size // _GIB} GiB" if size >= _GIB else f"{size >> 20} MiB"
        if error.errno == errno.ENOMEM:
            chip = os.path.basename(self.path)
            return CapacityError(
                f"{self.path}: every window of {name} is taken",
                fix="Other processes hold them (TTNN or UMD, another decode side): /proc/driver/tenstorrent/"
                f"{chip}/pids lists who has the chip open. Stop it, or use the bounce path.",
            )
        if error.errno == errno.EINVAL:
            return UnsupportedError(
                f"{self.path}: a window of {name}",
                reason="the driver finds no such window on this chip",
                fix="On Blackhole BAR4 must be mapped in full: enable 'above 4G decoding' and large BARs in the "
                "firmware's setup. Until then use the bounce path.",
            )
        return LocalError(f"{self.path}: no window of {name}: {error.strerror}")


def _cannot_open(path: str, error: OSError) -> ConfigError:
    fixes = {
        errno.ENOENT: "Load the driver (modprobe tenstorrent); /dev/tenstorrent then has one node for each chip.",
        errno.EACCES: "Add this user to the group that owns the node, or let tt-kmd's udev rule set its mode.",
        errno.EPERM: "Let this process use the device: in a container, pass the node through (--device).",
        errno.EAGAIN: "Another process holds it exclusively, as resets and firmware updates do. Wait for its end.",
        errno.ENODEV: "The chip has fallen off the bus, or its driver was unloaded.",
    }
    return ConfigError(f"cannot open {path}: {error.strerror}", fix=fixes.get(error.errno or 0))


def _dotted(version: Version) -> str:
    return ".".join(str(part) for part in version)
