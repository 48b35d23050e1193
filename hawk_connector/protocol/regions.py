"""Bookkeeping of the send buffer: which byte ranges hold parcels.  Numbers only; the memory itself lives elsewhere."""

from __future__ import annotations

from bisect import bisect_left, insort

from ..errors import LocalError

__all__ = ["REGION_ALIGNMENT", "RegionAllocator"]

REGION_ALIGNMENT = 256


class RegionAllocator:
    """First-fit allocator over ``[0, capacity)``; offsets and sizes are rounded up to REGION_ALIGNMENT bytes."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity // REGION_ALIGNMENT * REGION_ALIGNMENT
        self._free: list[tuple[int, int]] = [(0, self.capacity)] if self.capacity else []
        self._held: dict[int, int] = {}

    @property
    def held_bytes(self) -> int:
        return sum(self._held.values())

    @property
    def held_regions(self) -> int:
        return len(self._held)

    @property
    def largest_free(self) -> int:
        """Bytes of the largest free range."""
        return max((length for _, length in self._free), default=0)

    def size(self, offset: int) -> int:
        """Bytes of the held range at ``offset``."""
        return self._held[offset]

    def allocate(self, nbytes: int) -> int | None:
        """Offset of a free range of ``nbytes``, or None where none is large enough now."""
        size = -(-max(nbytes, 1) // REGION_ALIGNMENT) * REGION_ALIGNMENT
        for i, (offset, length) in enumerate(self._free):
            if length >= size:
                if length == size:
                    del self._free[i]
                else:
                    self._free[i] = (offset + size, length - size)
                self._held[offset] = size
                return offset
        return None

    def release(self, offset: int) -> None:
        """Gives the range at ``offset`` back and joins it with its free neighbours."""
        size = self._held.pop(offset, None)
        if size is None:
            raise LocalError(f"send buffer: no region is held at offset {offset}")
        insort(self._free, (offset, size))
        i = bisect_left(self._free, (offset, size))
        if i + 1 < len(self._free) and offset + size == self._free[i + 1][0]:
            size += self._free.pop(i + 1)[1]
            self._free[i] = (offset, size)
        if i > 0 and sum(self._free[i - 1]) == offset:
            before, length = self._free[i - 1]
            self._free[i - 1 : i + 1] = [(before, length + size)]
