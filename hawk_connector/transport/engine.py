"""The transfer engine: one-sided reads out of a peer's registered memory.

:class:`TransferEngine` holds the rules that every carrier needs and few keep by themselves: local ranges are
checked before each read, batches are cut and bounded over all threads, and :meth:`TransferEngine.close` is a
fence. Carriers (Mooncake, the in-process one) implement the four ``_`` methods.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..config import MAX_SEGMENTS_IN_FLIGHT
from ..errors import LocalError, ReadStopped, TransferFailed
from ..plan.segments import Segments

__all__ = ["EngineFactory", "RegisteredRanges", "SegmentBudget", "Segments", "TransferEngine"]

Addresses: TypeAlias = NDArray[np.int64]

# User-space addresses end far below; int64 keeps address arithmetic in one signed type.
_ADDRESS_LIMIT = 2**63

# Rest of the time that close() grants a read past the carrier's own time-out, which is allowed to be late.
_CLOSE_GRACE_S = 5.0


class RegisteredRanges:
    """The local memory that an engine may touch: disjoint [start, start + length) ranges, sorted.

    Thread-safe: each change replaces the arrays, readers take one consistent pair.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        empty = np.empty(0, dtype=np.int64)
        self._bounds: tuple[Addresses, Addresses] = (empty, empty)

    def add(self, address: int, length: int) -> None:
        """Raises LocalError for an empty range or one that overlaps a registered one."""
        if length < 1 or address < 1 or address + length > _ADDRESS_LIMIT:
            raise LocalError(
                "cannot register memory", expected="a non-empty range", got=describe_range(address, length)
            )
        with self._lock:
            starts, ends = self._bounds
            after = int(np.searchsorted(starts, address, side="right"))
            for neighbour in (after - 1, after):
                if 0 <= neighbour < len(starts):
                    start, end = int(starts[neighbour]), int(ends[neighbour])
                    if start < address + length and address < end:
                        raise LocalError(
                            f"cannot register {describe_range(address, length)}: it overlaps the registered "
                            f"{describe_range(start, end - start)}",
                            fix="Register each region once, and unregister it before its memory is reused.",
                        )
            self._bounds = (
                np.insert(starts, after, address),
                np.insert(ends, after, address + length),
            )

    def remove(self, address: int) -> None:
        """Forget the range that starts at ``address``; raises LocalError when there is none."""
        with self._lock:
            starts, ends = self._bounds
            found = np.flatnonzero(starts == address)
            if not len(found):
                raise LocalError(f"no registered memory starts at {address:#x}")
            self._bounds = (np.delete(starts, found), np.delete(ends, found))

    def first_outside(self, address: Addresses, length: Addresses) -> int | None:
        """Index of the first range that is empty or not wholly inside one registered range, or None."""
        starts, ends = self._bounds
        if not len(address):
            return None
        if not len(starts):
            return 0
        owner = np.searchsorted(starts, address, side="right") - 1
        # Written as a difference, so that no sum can pass int64 (lengths are untrusted here).
        outside = (owner < 0) | (length < 1) | (length > ends[np.maximum(owner, 0)] - address)
        return int(np.argmax(outside)) if bool(outside.any()) else None

    def starts(self) -> list[int]:
        return [int(start) for start in self._bounds[0]]


class SegmentBudget:
    """How many segments may be in flight, over all threads; served in the order of asking.

    In order, because many small batches would otherwise keep a full-sized one waiting for ever.
    """

    def __init__(self, capacity: int) -> None:
        self._free = capacity
        self._queue: deque[object] = deque()
        self._changed = threading.Condition()

    @contextmanager
    def held(self, count: int, timeout_s: float) -> Iterator[None]:
        """Hold ``count`` (at most the capacity) for the block; raises TimeoutError after ``timeout_s``."""
        ticket = object()
        with self._changed:
            self._queue.append(ticket)
            try:
                ready = self._changed.wait_for(
                    lambda: self._queue[0] is ticket and self._free >= count, timeout=timeout_s
                )
                if not ready:
                    raise TimeoutError
                self._free -= count
            finally:
                self._queue.remove(ticket)
                self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._free += count
                self._changed.notify_all()


class TransferEngine(ABC):
    """Reads from peers, and lets peers read what was registered here. One per peer epoch on the reading side.

    Methods may be called from any thread; ``read`` and ``close`` block and belong on worker threads, never
    on vLLM's step thread.
    """

    def __init__(self, *, timeout_s: float, max_segments_per_batch: int = MAX_SEGMENTS_IN_FLIGHT) -> None:
        """``timeout_s``: after how long the carrier gives up a batch without progress."""
        if not 1 <= max_segments_per_batch <= MAX_SEGMENTS_IN_FLIGHT:
            raise LocalError(
                "max_segments_per_batch is out of its limits",
                expected=f"1 .. {MAX_SEGMENTS_IN_FLIGHT}",
                got=str(max_segments_per_batch),
            )
        self._timeout_s = timeout_s
        self._max_segments_per_batch = max_segments_per_batch
        self._ranges = RegisteredRanges()
        self._budget = SegmentBudget(MAX_SEGMENTS_IN_FLIGHT)
        self._state = threading.Condition()
        self._reads = 0
        self._bytes_in_flight = 0
        self._closing = False
        self._closed = False

    @property
    @abstractmethod
    def session(self) -> str:
        """The name ("host:port") that peers pass to their ``read``."""

    @property
    def closed(self) -> bool:
        """Whether the fence has passed."""
        return self._closed

    def register(self, address: int, length: int) -> None:
        """Make [address, address + length) readable for peers and usable as the local side of reads.

        Raises LocalError when it is empty, overlaps registered memory, or the carrier refuses it.
        """
        self._refuse_if_closing()
        self._ranges.add(address, length)
        try:
            self._register(address, length)
        except BaseException:
            self._ranges.remove(address)
            raise

    def unregister(self, address: int) -> None:
        """Undo the registration that starts at ``address``. Does **not** stop a read: only close() does."""
        self._ranges.remove(address)
        self._unregister(address)

    def read(self, session: str, segments: Segments, stopped: Callable[[], bool] = lambda: False) -> None:
        """Read every segment from the peer ``session``; returns when all bytes are in local memory.

        ``stopped`` is asked before each batch; once it says so, no more of them are begun and ReadStopped is raised.
        Raises LocalError, before anything is read, when a local range is not wholly inside one registered
        range; TransferFailed when a read failed, timed out or met a closed engine. After TransferFailed
        any local byte of ``segments`` may still change until close() has returned.
        """
        outside = self._ranges.first_outside(segments.local, segments.length)
        if outside is not None:
            address, length = int(segments.local[outside]), int(segments.length[outside])
            raise LocalError(
                f"segment {outside} does not lie in registered local memory",
                expected="a non-empty range inside one registered region",
                got=describe_range(address, length),
                fix="This is a bug in the plan or the landing; nothing was read.",
            )
        with self._reading(segments.nbytes):
            for batch in segments.batches(self._max_segments_per_batch):
                # Whoever is ahead ends by the carrier's time-out; a wait of many of those is a fault.
                patience_s = 10 * self._timeout_s
                try:
                    with self._budget.held(batch.count, patience_s):
                        self._refuse_if_closing()
                        if stopped():
                            raise ReadStopped(f"reading from {session} was stopped between two batches")
                        self._read_batch(session, batch)
                except TimeoutError:
                    raise TransferFailed(
                        f"reading from {session}: the transfer engine was full for {patience_s:g} s"
                    ) from None

    def close(self) -> None:
        """The fence: after it returns, no late byte of any read of this engine can arrive.

        Refuses new reads, waits for those in flight (each ends by the carrier's time-out), then drops the
        carrier. Repeatable. Raises LocalError if reads outlive their time-out: the fence has then *not*
        passed, their memory stays unusable, and close() may be called again.
        """
        with self._state:
            self._closing = True
            # The carrier grants 1 ns a byte on top of its time-out.
            limit = self._timeout_s + self._bytes_in_flight * 1e-9 + _CLOSE_GRACE_S
            if not self._state.wait_for(lambda: self._reads == 0, timeout=limit):
                raise LocalError(
                    f"{self._reads} reads did not end within {limit:.1f} s; the engine is not fenced",
                    fix="Their memory must stay in quarantine; close again later.",
                )
            if not self._closed:
                self._close()
                self._closed = True

    @abstractmethod
    def _register(self, address: int, length: int) -> None: ...

    @abstractmethod
    def _unregister(self, address: int) -> None: ...

    @abstractmethod
    def _read_batch(self, session: str, segments: Segments) -> None:
        """Read at most ``max_segments_per_batch`` segments; raises TransferFailed. Ends by the time-out."""

    @abstractmethod
    def _close(self) -> None:
        """Drop the carrier. No read is in flight."""

    def _refuse_if_closing(self) -> None:
        if self._closing:
            raise TransferFailed("the transfer engine was closed", fix="Use the engine that replaced it.")

    @contextmanager
    def _reading(self, nbytes: int) -> Iterator[None]:
        with self._state:
            self._refuse_if_closing()
            self._reads += 1
            self._bytes_in_flight += nbytes
        try:
            yield
        finally:
            with self._state:
                self._reads -= 1
                self._bytes_in_flight -= nbytes
                self._state.notify_all()


EngineFactory: TypeAlias = Callable[[], TransferEngine]
"""Makes a fresh engine: one for a process's own memory, one for each peer epoch that is read from."""


def describe_range(address: int, length: int) -> str:
    """An address range as messages show it."""
    return f"[{address:#x}, {address + length:#x}) ({length} bytes)"
