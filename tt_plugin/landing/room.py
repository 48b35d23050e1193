"""Room: a bounded number of bytes that parcels take and give back, on the threads that read them."""

from __future__ import annotations

import threading
from collections import deque

from hawk_connector.errors import CapacityError
from hawk_connector.protocol.regions import RegionAllocator

__all__ = ["Room"]


class Room:
    """Offsets in ``[0, nbytes)``, handed out in the order of asking.

    In order, because small parcels would otherwise keep a large one waiting for ever.  ``what`` and ``fix`` are for
    the text of errors: the memory's name, and the sentence that says how to have more of it.
    """

    def __init__(self, nbytes: int, wait_s: float, what: str, fix: str) -> None:
        self._regions = RegionAllocator(nbytes)
        self._wait_s = wait_s
        self._what = what
        self._fix = fix
        self._queue: deque[object] = deque()
        self._changed = threading.Condition()

    @property
    def capacity(self) -> int:
        return self._regions.capacity

    @property
    def held_bytes(self) -> int:
        """Bytes that parcels hold now; 0 when idle."""
        with self._changed:
            return self._regions.held_bytes

    @property
    def waiting(self) -> int:
        """Threads that wait for room."""
        with self._changed:
            return len(self._queue)

    def take(self, nbytes: int) -> int:
        """Offset of ``nbytes``, waiting for others to give theirs back.

        CapacityError where more is asked for than there ever is, or where the wait runs out.
        """
        if nbytes > self.capacity:
            raise CapacityError(
                f"a parcel does not fit the {self._what}",
                expected=f"at most {self.capacity} bytes",
                got=f"{nbytes} bytes",
                fix=self._fix,
            )
        ticket = object()
        found: list[int] = []
        with self._changed:
            self._queue.append(ticket)
            try:
                self._changed.wait_for(lambda: self._try(ticket, nbytes, found), self._wait_s)
            finally:
                self._queue.remove(ticket)
                self._changed.notify_all()
            if found:
                return found[0]
            raise CapacityError(
                f"the {self._what} was full for {self._wait_s:g} s",
                expected=f"{nbytes} bytes free of {self.capacity}",
                got=f"{self._regions.held_bytes} bytes held, by parcels that are read or wait for a fence",
                fix=self._fix,
            )

    def give_back(self, offset: int) -> None:
        """Ends what ``take`` began."""
        with self._changed:
            self._regions.release(offset)
            self._changed.notify_all()

    def _try(self, ticket: object, nbytes: int, found: list[int]) -> bool:
        if self._queue[0] is not ticket:
            return False
        offset = self._regions.allocate(nbytes)
        if offset is not None:
            found.append(offset)
        return offset is not None
