"""Bank windows: a Blackhole's DRAM banks as memory of this process, for a network card to write into.

A Blackhole's BAR4 holds eight windows of 4 GiB, one for each DRAM channel.  Here one is taken for each bank of each
chip, aimed at the bank's tile and mapped; the mapping is registered with a transfer engine like any memory.  It has no
pages behind it, so that takes a peer-memory client (``hawk_peermem``), or a dma-buf (``export``) for an engine that
takes one.  Mooncake's Python interface takes none.

A window's aim is set before it is mapped and never again: whoever holds the mapping would write somewhere else.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hawk_connector.errors import CapacityError, LocalError, TransferFailed, UnsupportedError

from .tt_kmd import BLACKHOLE, WORMHOLE, DeviceNode, Grant, NocOrdering, NocTile, Syscalls

__all__ = ["WINDOW_BYTES", "BankSite", "BankWindow", "Hold", "WindowSet"]

WINDOW_BYTES = 4 << 30

# What a host load reads at once.
_WORD = 4


@dataclass(frozen=True, slots=True)
class BankSite:
    """Where a chip keeps a bank: the tile of its DRAM channel, and the bank's first address in the channel."""

    tile: NocTile
    base: int


class BankWindow:
    """One bank, mapped.  ``origin``: host address of the bank's first byte."""

    def __init__(self, node: DeviceNode, site: BankSite, length: int) -> None:
        """Takes a window of ``node``, aims and maps it so that ``length`` bytes of the bank can be reached.

        Gives the window back where any of that fails, and raises what the node raised.
        """
        first = site.base // WINDOW_BYTES * WINDOW_BYTES
        self._start = site.base - first  # of the bank, in the window
        end = self._start + length
        if length < 1 or end > WINDOW_BYTES:
            raise LocalError(
                f"a bank at {site.base:#x} does not fit one window",
                expected=f"1 .. {WINDOW_BYTES - self._start} bytes",
                got=f"{length} bytes",
            )
        self.site = site
        self.length = length
        self._node = node
        self._grant: Grant | None = node.allocate(WINDOW_BYTES)
        try:
            # STRICT: a flush is a read that must stay behind the writes before it.
            node.aim(self._grant, site.tile, first, NocOrdering.STRICT)
            self._mapping: mmap.mmap | None = node.map(self._grant, -(-end // mmap.PAGESIZE) * mmap.PAGESIZE)
        except BaseException:
            node.free(self._grant)
            raise
        self.origin = ctypes.addressof(ctypes.c_char.from_buffer(self._mapping)) + self._start

    def read(self, address: int, nbytes: int = _WORD) -> bytes:
        """Bytes of the bank, as the chip has them.  Slow: a read over PCI Express waits for its answer."""
        if self._mapping is None:
            raise LocalError("the window was given back")
        if not 0 <= address <= address + nbytes <= self.length:
            raise ValueError(
                f"bytes {address:#x} to {address + nbytes:#x} lie outside the window's {self.length} bytes"
            )
        start = self._start + address
        return self._mapping[start : start + nbytes]

    def export(self, address: int, nbytes: int) -> int:
        """Descriptor of a dma-buf over bytes of the bank; see ``DeviceNode.export``."""
        if self._grant is None:
            raise LocalError("the window was given back")
        return self._node.export(self._grant, self._start + address, nbytes)

    def close(self) -> None:
        """Unmaps the window and gives it back.  Repeatable; LocalError where a view of the mapping still lives."""
        if self._mapping is not None:
            try:
                self._mapping.close()
            except BufferError:
                raise LocalError(f"{self._node.path}: a window is still in use and stays mapped") from None
            self._mapping = None
        if self._grant is not None:
            grant, self._grant = self._grant, None
            self._node.free(grant)


class Hold:
    """Somebody's claim that the windows stay as they are.  ``release`` gives it up; repeatable."""

    def __init__(self, windows: WindowSet, who: str) -> None:
        self.who = who
        self._windows = windows

    def release(self) -> None:
        self._windows.let_go(self)


class WindowSet:
    """A window for each bank of each chip, from construction to ``close``; a context manager.

    ``origins``: int64 ``[chips, banks]``, host address of each bank's first byte.  ``length``: bytes of each bank that
    can be reached.
    """

    def __init__(
        self,
        paths: Sequence[str],
        sites: Sequence[Sequence[BankSite]],
        length: int,
        system: Syscalls | None = None,
    ) -> None:
        """``paths``: device node of each chip.  ``sites``: for each chip its banks in the order of its bank table, as
        many on each (but in other places where other channels are harvested).  ``length``: how much of each bank is
        mapped; the end of the highest buffer that reads shall reach is enough.

        Raises ConfigError where a node cannot be opened, UnsupportedError for a chip without such windows or a driver
        without them, CapacityError where they are taken.  What was taken by then is given back in reverse order.
        """
        banks = {len(of_chip) for of_chip in sites}
        if len(paths) != len(sites) or len(banks) != 1 or 0 in banks or len(set(paths)) != len(paths):
            raise ValueError(
                "each chip needs a node of its own and the same number of banks; got "
                f"nodes {list(paths)} and {[len(of_chip) for of_chip in sites]} banks"
            )
        self.length = length
        self._nodes: list[DeviceNode] = []
        self._windows: list[list[BankWindow]] = []
        self._holds: set[Hold] = set()
        try:
            for path, of_chip in zip(paths, sites, strict=True):
                node = DeviceNode(path, system)
                self._nodes.append(node)
                _refuse_other_chips(node)
                taken: list[BankWindow] = []
                self._windows.append(taken)
                for site in of_chip:
                    taken.append(_window(node, site, length, len(taken), len(of_chip)))
        except BaseException:
            self._give_back()
            raise
        self.origins: NDArray[np.int64] = np.array(
            [[window.origin for window in of_chip] for of_chip in self._windows], dtype=np.int64
        )

    def hold(self, who: str) -> Hold:
        """While the hold lasts ``close`` refuses.  For whoever registers the memory, until its engines are closed."""
        if not self._nodes:
            raise LocalError("the bank windows were closed")
        hold = Hold(self, who)
        self._holds.add(hold)
        return hold

    def let_go(self, hold: Hold) -> None:
        self._holds.discard(hold)

    def flush(self, last: Mapping[tuple[int, int], int]) -> None:
        """Returns when all that was written before has reached the banks.

        ``last``: for each (chip, bank) that was written, the address in the bank of the byte that was written last.
        A word there is read through the window that the writes went through: neither PCI Express nor a STRICT window
        lets a read overtake a write that came to the chip before it.  (Not shown on hardware: that a network card's
        writes have come to the chip when it says that its read is done.  If a switch could hold them up, the card
        itself would have to read the word.)  Raises TransferFailed where the chip was reset or has gone, or an
        address lies outside the windows.
        """
        chips = sorted({chip for chip, _ in last})
        try:
            # Before, since a read through a window that a reset has unmapped is fatal; after, since a chip that went
            # meanwhile answers every read with ones.
            for chip in chips:
                self._nodes[chip].check_alive()
            for (chip, bank), address in last.items():
                self._window(chip, bank).read(address // _WORD * _WORD)
            for chip in chips:
                self._nodes[chip].check_alive()
        except (LocalError, ValueError, IndexError) as error:
            raise TransferFailed(f"the bank windows could not be flushed: {error}") from error

    def read(self, chip: int, bank: int, address: int, nbytes: int) -> bytes:
        """Bytes of a bank, for checks: reading a BAR is slow."""
        return self._window(chip, bank).read(address, nbytes)

    def export(self, chip: int, bank: int, address: int, nbytes: int) -> int:
        """Descriptor of a dma-buf over bytes of a bank, for an engine that takes one; see ``DeviceNode.export``."""
        return self._window(chip, bank).export(address, nbytes)

    def close(self) -> None:
        """Gives every window back and closes the nodes.  Repeatable.

        Raises LocalError, and closes nothing, while somebody holds the windows: their memory may still be written.
        """
        if self._holds:
            names = ", ".join(sorted(hold.who for hold in self._holds))
            raise LocalError(
                f"the bank windows are still held by {names}",
                fix="Close the engines that they are registered with, release the hold, then close the windows.",
            )
        self._give_back()

    def __enter__(self) -> WindowSet:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _window(self, chip: int, bank: int) -> BankWindow:
        if not self._windows:
            raise LocalError("the bank windows were closed")
        return self._windows[chip][bank]

    def _give_back(self) -> None:
        """Everything, last first, whatever fails on the way; raises the first failure at the end.

        A node is closed in any case, and with it the driver takes its windows back.
        """
        failures: list[Exception] = []
        for of_chip in reversed(self._windows):
            for window in reversed(of_chip):
                try:
                    window.close()
                except LocalError as error:
                    failures.append(error)
        for node in reversed(self._nodes):
            try:
                node.close()
            except OSError as error:
                failures.append(error)
        self._nodes, self._windows = [], []
        if failures:
            raise failures[0]


def _refuse_other_chips(node: DeviceNode) -> None:
    if node.device_id != BLACKHOLE:
        names = {WORMHOLE: "Wormhole"}
        raise UnsupportedError(
            f"the direct path on {node.path}",
            reason="only Blackhole has windows as large as a DRAM channel",
            expected=f"a Blackhole (PCI device {BLACKHOLE:#x})",
            got=f"{names.get(node.device_id, 'another chip')} (PCI device {node.device_id:#x})",
            fix="Use the bounce path: it works on every card.",
        )


def _window(node: DeviceNode, site: BankSite, length: int, taken: int, wanted: int) -> BankWindow:
    try:
        return BankWindow(node, site, length)
    except CapacityError as full:
        raise CapacityError(
            full.what,
            expected=f"{wanted} free windows, one for each bank",
            got=f"{taken}, which were given back",
            fix=full.fix,
        ) from None
