"""From pools that TTNN allocated to the direct path: windows on the right chips, shown to be the right ones.

TTNN counts chips in its own order and the driver in that of the bus, and a window that is aimed at the wrong tile looks
like any other.  So before anything is registered, TTNN writes another mark into every bank of every chip, and each must
be seen through its window.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from hawk_connector.errors import ConfigError

from ..device.interface import Device, Pools, Written
from ..device.tt_kmd import NocTile, Syscalls
from ..device.windows import BankSite, WindowSet
from .windows import WindowLanding, WindowPools

__all__ = ["SiliconPools", "TiledDevice", "window_landing"]

_MARK_BYTES = 64


class TiledDevice(Device, Protocol):
    """A device that also says where its banks are on the chip's network."""

    @property
    def tiles(self) -> Sequence[tuple[int, int]]:
        """(x, y) of each bank's memory controller, equal on all chips."""
        ...


class SiliconPools(Pools, Protocol):
    """Pools on such a device."""

    @property
    def device(self) -> TiledDevice: ...


def window_landing(
    pools: SiliconPools, nodes: Sequence[str], system: Syscalls | None = None
) -> tuple[WindowSet, WindowLanding]:
    """The direct path into ``pools``; ``nodes``: device node of each chip, in the device's order.

    Close the landing, then the windows.  Raises what ``WindowSet`` raises, and ConfigError where a window shows other
    memory than TTNN writes; nothing is left open then.
    """
    device, layout = pools.device, pools.layout
    table = device.table
    if len(nodes) != device.chips:
        raise ConfigError(
            "device nodes and chips do not go together",
            expected=f"{device.chips} nodes, one for each chip in TTNN's order",
            got=f"{len(nodes)} ({', '.join(nodes) or 'none'})",
            fix="Set tt_plugin.landing.device_nodes.",
        )
    sites = [BankSite(NocTile(*tile), base) for tile, base in zip(device.tiles, table.bases, strict=True)]
    pool_bytes = layout.rule.slots(layout.pool_pages(pools.num_blocks)) * layout.page_pitch
    marks = device.allocate(_MARK_BYTES, "the marks by which bank windows are known")
    try:
        length = max(max(pools.buffer_addresses) + pool_bytes, marks + _MARK_BYTES)
        windows = WindowSet(nodes, [sites] * device.chips, length, system)
        try:
            _recognise(device, windows, nodes, marks)
            return windows, WindowLanding(WindowPools(windows, layout, pools.num_blocks, pools.buffer_addresses))
        except BaseException:
            windows.close()
            raise
    finally:
        device.free(marks)


def _recognise(device: TiledDevice, windows: WindowSet, nodes: Sequence[str], address: int) -> None:
    places = [(chip, bank) for chip in range(device.chips) for bank in range(device.table.banks)]
    # Random, since what an earlier process left there must not pass for a mark.
    random = np.random.default_rng()
    marks = {place: random.integers(0, 256, _MARK_BYTES, dtype=np.uint8) for place in places}
    for (chip, bank), mark in marks.items():
        device.write(chip, bank, address, mark)
    device.flush(Written(chip, bank, address, _MARK_BYTES) for chip, bank in places)
    seen = {windows.read(chip, bank, address, _MARK_BYTES): (chip, bank) for chip, bank in places}
    for (chip, bank), mark in marks.items():
        found = seen.get(mark.tobytes())
        if found == (chip, bank):
            continue
        where = "nowhere" if found is None else f"in bank {found[1]} of {nodes[found[0]]}"
        raise ConfigError(
            f"bank {bank} of chip {chip} is not what its window on {nodes[chip]} shows",
            expected=f"TTNN's mark through the window of bank {bank}",
            got=f"it {where}",
            fix="Give tt_plugin.landing.device_nodes in TTNN's order of chips, or use the bounce path.",
        )
