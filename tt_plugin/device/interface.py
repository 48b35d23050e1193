"""What HAWK needs of a device: banks, buffers, pools, writes, copies, a flush and a sign of health.

Two classes implement it: ``simulated.SimulatedDevice`` (our own, banks in host memory) and ``ttnn_device.TtnnDevice``
(TTNN's, on a card, a simulated chip or a mock one).  Addresses are relative to a bank's base address; a buffer has one
address in all banks of all chips.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from hawk_connector.layout.kv_pool import KVPoolLayout
from hawk_connector.plan.runs import BankCopies

from .banks import BankTable

__all__ = ["Device", "Pools", "Written"]


@dataclass(frozen=True, slots=True)
class Written:
    """The last bytes that were written to one bank: what a flush must find in memory."""

    chip: int
    bank: int
    address: int
    nbytes: int


class Device(Protocol):
    """An opened mesh of chips that are alike."""

    @property
    def table(self) -> BankTable:
        """The banks of each chip, as the device itself says."""
        ...

    @property
    def chips(self) -> int: ...

    @property
    def copies_inside(self) -> bool:
        """Whether ``copy`` leaves the bytes in the device, so that staging can pay."""
        ...

    def allocate(self, bytes_per_bank: int, what: str = "buffer") -> int:
        """Address of a buffer that takes ``bytes_per_bank`` in every bank, in one piece.

        Raises CapacityError where there is no room; ``what`` is for its text.
        """
        ...

    def free(self, address: int) -> None:
        """Gives a buffer back.  ValueError where none is held at ``address``."""
        ...

    def write(self, chip: int, bank: int, address: int, data: NDArray[np.uint8]) -> None:
        """Writes bytes into a bank.  They are there once ``flush`` has returned.

        ValueError where they do not fit the bank, DeviceError where the device fails.
        """
        ...

    def read(self, chip: int, bank: int, address: int, nbytes: int) -> NDArray[np.uint8]:
        """A copy of ``nbytes`` of a bank; errors as ``write``."""
        ...

    def copy(self, copies: BankCopies) -> None:
        """Copies bytes inside chips, after everything that was written before."""
        ...

    def flush(self, written: Iterable[Written]) -> None:
        """Returns once the bytes of ``written``, and all that went the same way before them, are in memory."""
        ...

    def health(self) -> Sequence[str]:
        """What is wrong, a line for each bank that does not keep what is written to it; empty where all is well."""
        ...

    def close(self) -> None: ...


class Pools(Protocol):
    """A decode side's KV cache on a device."""

    @property
    def device(self) -> Device: ...

    @property
    def layout(self) -> KVPoolLayout: ...

    @property
    def num_blocks(self) -> int:
        """Blocks of each pool."""
        ...

    @property
    def buffer_addresses(self) -> tuple[int, ...]:
        """Address of each pool; pools are in KVPoolLayout's order."""
        ...

    def zero_blocks(self, block_ids: Iterable[int]) -> None:
        """Writes zeros over blocks, in every pool and chip."""
        ...

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copies whole blocks inside every pool and chip."""
        ...

    def free(self) -> None: ...
