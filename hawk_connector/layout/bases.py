"""BaseTable: where each bank of a chip begins."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["BaseTable"]


@dataclass(frozen=True, slots=True)
class BaseTable:
    """Base address of each bank, in bytes; a buffer at ``address`` begins at ``bases[bank] + address`` in each."""

    bases: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.bases:
            raise ValueError("a base table needs at least one bank; got none")
        if min(self.bases) < 0:
            raise ValueError(f"base addresses must not be negative; got {min(self.bases)}")

    @classmethod
    def of_device(cls, banks: Iterable[tuple[int, int]]) -> BaseTable:
        """From a live device's bank table: pairs (bank id, base address) in any order.

        ValueError where the ids are not 0, 1, 2 ... without gaps.
        """
        rows = sorted(banks)
        ids = [bank for bank, _ in rows]
        if ids != list(range(len(rows))):
            raise ValueError(f"a bank table has banks 0..{len(rows) - 1}, each once; got ids {ids}")
        return cls(tuple(base for _, base in rows))

    @property
    def banks(self) -> int:
        return len(self.bases)
