"""Known devices: the bank tables that a simulated or described device has.

A live device's own bank table always wins over this catalog; these entries stand in for a device that is not there.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DEVICES", "DeviceEntry", "device_named"]

_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class DeviceEntry:
    """Memory of one chip.

    ``bases``: base address of each bank.  ``bank_bytes``: addressable bytes of a bank.
    ``first_address``: first address that an allocator hands out, relative to the base.  ``source``: where from.
    """

    name: str
    bases: tuple[int, ...]
    bank_bytes: int
    alignment: int
    first_address: int
    source: str

    @property
    def banks(self) -> int:
        return len(self.bases)


DEVICES: tuple[DeviceEntry, ...] = (
    DeviceEntry(
        "blackhole-p150",
        bases=(0,) * 8,
        bank_bytes=4 * _GIB - 16 * (1 << 20),
        alignment=64,
        first_address=0x100080,
        source="ttnn 0.81.1 bank table of a simulated p150a: 8 banks, one per GDDR channel",
    ),
    DeviceEntry(
        "blackhole-p100",
        bases=(0,) * 7,
        bank_bytes=4 * _GIB - 16 * (1 << 20),
        alignment=64,
        first_address=0x100080,
        source="ttnn 0.81.1 bank table of a mock P100: one channel harvested",
    ),
    DeviceEntry(
        "wormhole-n150",
        bases=(0, 0x40000000) * 6,
        bank_bytes=_GIB,
        alignment=32,
        first_address=0x100040,
        source="ttnn 0.81.1 bank table of an n150: 6 channels of two banks",
    ),
)


def device_named(name: str) -> DeviceEntry:
    """The catalog's entry called ``name``; ValueError names the known ones."""
    for entry in DEVICES:
        if entry.name == name:
            return entry
    raise ValueError(f"device must be one of {', '.join(d.name for d in DEVICES)}; got {name!r}")
