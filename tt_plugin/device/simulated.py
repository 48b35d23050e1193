"""A simulated NPU: chips whose banks are host memory.

Each chip is one anonymous mapping of ``banks * bank_span`` bytes that the kernel backs with pages only where they are
touched, so that a chip with 32 GiB of DRAM costs what its pools use.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from hawk_connector.errors import CapacityError
from hawk_connector.plan.runs import BankCopies

from .banks import BankTable, LockstepAllocator
from .interface import Written

__all__ = ["SimulatedDevice"]

# Python's mmap module does not name it; the value is Linux' on every architecture that vLLM runs on.
MAP_NORESERVE = 0x4000


class SimulatedDevice:
    """``chips`` chips with the banks of ``table``.

    ``memory``: for each chip uint8 ``[banks * bank_span]``; byte ``a`` of bank ``b`` (``a`` relative to the bank's
    base address) is at ``b * bank_span + a``.  ``allocator``: the one allocator of all banks and chips.
    """

    copies_inside = True

    def __init__(self, chips: int, table: BankTable) -> None:
        if chips < 1:
            raise ValueError(f"a device has at least one chip; got {chips}")
        self.table = table
        self.chips = chips
        self.bank_span = -(-table.bank_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self.allocator = LockstepAllocator(table)
        self._mappings = [self._map(table.banks * self.bank_span, chip) for chip in range(chips)]
        self.memory: tuple[NDArray[np.uint8], ...] = tuple(
            np.frombuffer(mapping, dtype=np.uint8) for mapping in self._mappings
        )

    @property
    def origins(self) -> NDArray[np.int64]:
        """Host address of each bank's first byte, the one at the bank's base address: int64 ``[chips, banks]``."""
        starts = np.array([memory.ctypes.data for memory in self.memory], dtype=np.int64)
        return starts[:, None] + np.arange(self.table.banks, dtype=np.int64) * self.bank_span

    def bank(self, chip: int, bank: int) -> NDArray[np.uint8]:
        """All bytes of one bank: uint8 ``[bank_bytes]``."""
        start = bank * self.bank_span
        return self.memory[chip][start : start + self.table.bank_bytes]

    def allocate(self, bytes_per_bank: int, what: str = "buffer") -> int:
        return self.allocator.allocate(bytes_per_bank, what)

    def free(self, address: int) -> None:
        self.allocator.free(address)

    def write(self, chip: int, bank: int, address: int, data: NDArray[np.uint8]) -> None:
        self.table.check_range(address, len(data))
        self.bank(chip, bank)[address : address + len(data)] = data

    def read(self, chip: int, bank: int, address: int, nbytes: int) -> NDArray[np.uint8]:
        self.table.check_range(address, nbytes)
        return self.bank(chip, bank)[address : address + nbytes].copy()

    def copy(self, copies: BankCopies) -> None:
        source = copies.source_bank * self.bank_span + copies.source
        target = copies.bank * self.bank_span + copies.address
        columns = (copies.chip.tolist(), source.tolist(), target.tolist(), copies.length.tolist())
        for chip, start, end, length in zip(*columns, strict=True):
            memory = self.memory[chip]
            memory[end : end + length] = memory[start : start + length]

    def flush(self, written: Iterable[Written]) -> None:
        """Nothing to do: the banks are host memory."""

    def health(self) -> Sequence[str]:
        return ()

    def close(self) -> None:
        """Gives the memory back.

        The addresses stay mapped, as zeros, for as long as the device or a view of it lives: a view never dangles, and
        a byte that arrives late hits nothing else.
        """
        for mapping in self._mappings:
            mapping.madvise(mmap.MADV_DONTNEED)

    def _map(self, size: int, chip: int) -> mmap.mmap:
        try:
            mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
        except OSError as error:
            raise CapacityError(
                f"cannot map the DRAM of simulated chip {chip}: {error.strerror}",
                expected=f"{size} bytes of address space (memory is only used where pools are written)",
                fix="Lift the limit on address space (ulimit -v), set vm.overcommit_memory to 0 or 1, or use a "
                "smaller device or fewer chips.",
            ) from error
        mapping.madvise(mmap.MADV_DONTDUMP)
        return mapping
