"""Bank tables, and the allocator that hands out one address for all banks of all chips.

TTNN allocates DRAM in lockstep: a buffer has one address, valid in every bank and on every chip of a mesh, and takes
the same number of bytes in each of them.  Addresses here are relative to a bank's base address.
"""

from __future__ import annotations

from dataclasses import dataclass

from hawk_connector.errors import CapacityError, ConfigError
from hawk_connector.layout.catalog import device_named

__all__ = ["BankTable", "LockstepAllocator"]


@dataclass(frozen=True, slots=True)
class BankTable:
    """DRAM of one chip.

    ``bases``: base address of each bank in its channel.  ``bank_bytes``: addressable bytes of each bank.
    ``alignment``: bytes to which pages and buffers are aligned.  ``first_address``: first address that may be
    handed out, relative to the base (what lies below belongs to the device's firmware).
    """

    name: str
    bases: tuple[int, ...]
    bank_bytes: int
    alignment: int
    first_address: int

    def __post_init__(self) -> None:
        if not self.bases:
            raise ValueError(f"bank table of {self.name!r} has no banks")
        if not 0 <= self.first_address < self.bank_bytes:
            raise ValueError(f"first address must lie in the bank of {self.bank_bytes} bytes; got {self.first_address}")

    @classmethod
    def named(cls, name: str) -> BankTable:
        """The table of a device in the catalog; ConfigError names the known ones."""
        try:
            entry = device_named(name)
        except ValueError as unknown:
            raise ConfigError(str(unknown)) from None
        return cls(entry.name, entry.bases, entry.bank_bytes, entry.alignment, entry.first_address)

    @property
    def banks(self) -> int:
        return len(self.bases)

    def check_range(self, address: int, nbytes: int) -> None:
        """ValueError where ``nbytes`` at ``address`` (relative to a bank's base) are not all in the bank."""
        if not 0 <= address <= address + nbytes <= self.bank_bytes:
            raise ValueError(
                f"bytes {address:#x}..{address + nbytes:#x} do not lie in a bank of {self.bank_bytes:#x} bytes"
            )


class LockstepAllocator:
    """First fit over the address range that every bank of every chip has in common."""

    def __init__(self, table: BankTable) -> None:
        self._table = table
        first = self._aligned(table.first_address)
        self._gaps: list[tuple[int, int]] = [(first, table.bank_bytes - first)]  # (address, length), ascending
        self._held: dict[int, int] = {}

    @property
    def free_bytes(self) -> int:
        """Bytes left in each bank."""
        return sum(length for _, length in self._gaps)

    @property
    def largest_gap(self) -> int:
        """Longest run of bytes that one buffer could take in each bank."""
        return max((length for _, length in self._gaps), default=0)

    def allocate(self, bytes_per_bank: int, what: str = "buffer") -> int:
        """Address of a new buffer of ``bytes_per_bank`` in every bank.

        Raises CapacityError, naming ``what`` was asked for and what is left.
        """
        if bytes_per_bank < 1:
            raise ValueError(f"{what}: a buffer needs at least one byte per bank; got {bytes_per_bank}")
        length = self._aligned(bytes_per_bank)
        for index, (address, room) in enumerate(self._gaps):
            if room >= length:
                rest = (address + length, room - length)
                self._gaps[index : index + 1] = [rest] if rest[1] else []
                self._held[address] = length
                return address
        raise CapacityError(
            f"{what} does not fit the DRAM of {self._table.name}",
            expected=f"at most {self.largest_gap} bytes per bank in one piece ({self.free_bytes} bytes left)",
            got=f"{length} bytes per bank on {self._table.banks} banks",
            fix="Lower --kv-cache-memory-bytes or --num-gpu-blocks-override, or use more chips.",
        )

    def free(self, address: int) -> None:
        """Gives a buffer back.  ValueError where ``address`` is not that of a held buffer."""
        length = self._held.pop(address, None)
        if length is None:
            raise ValueError(f"no buffer is held at address {address:#x}")
        merged: list[tuple[int, int]] = []
        for gap in sorted([*self._gaps, (address, length)]):
            if merged and sum(merged[-1]) == gap[0]:
                merged[-1] = (merged[-1][0], merged[-1][1] + gap[1])
            else:
                merged.append(gap)
        self._gaps = merged

    def _aligned(self, size: int) -> int:
        return -(-size // self._table.alignment) * self._table.alignment
