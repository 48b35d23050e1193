"""Reads that run, the engines that carry them (one for each life of a prefill rank), and the fences that end those."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

__all__ = ["ReadBook", "RunningRead"]


@dataclass(frozen=True, slots=True)
class RunningRead:
    """A read that has not returned: parcel ``parcel`` of ``request`` from the rank at ``address``."""

    request: str
    address: str
    parcel: int


class ReadBook:
    """``limit``: reads in flight from one peer.

    A fence is *wanted* until the peer's last read has returned, then *asked for* once, then ``fenced``.  No read starts
    between the first and the last.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._reads: dict[int, RunningRead] = {}
        self._running: Counter[str] = Counter()
        self._next = 0
        self._asked_for: dict[str, bool] = {}
        self._epochs: dict[str, str] = {}

    @property
    def reads(self) -> int:
        return len(self._reads)

    @property
    def fences(self) -> int:
        """Fences that are wanted or asked for."""
        return len(self._asked_for)

    def may_start(self, address: str) -> bool:
        """Whether another read from ``address`` may start now."""
        return address not in self._asked_for and self._running[address] < self._limit

    def start(self, read: RunningRead, epoch: str) -> int:
        """A read starts, through the engine of the rank's life ``epoch``; its number."""
        number, self._next = self._next, self._next + 1
        self._reads[number] = read
        self._running[read.address] += 1
        self._epochs[read.address] = epoch
        return number

    def end(self, number: int) -> RunningRead:
        """The read that has returned."""
        read = self._reads.pop(number)
        self._running[read.address] -= 1
        return read

    def of(self, request: str) -> list[int]:
        """Numbers of the reads that run for ``request``."""
        return [number for number, read in self._reads.items() if read.request == request]

    # --- engines

    def engines(self) -> dict[str, str]:
        """The life of each rank that an engine may be open to, by address; those that are to be fenced left out."""
        return {address: epoch for address, epoch in self._epochs.items() if address not in self._asked_for}

    def epoch(self, address: str) -> str | None:
        """The life of the rank that the present engine reads from."""
        return self._epochs.get(address)

    def want_fence(self, address: str) -> None:
        self._asked_for.setdefault(address, False)

    def due_fence(self, address: str) -> bool:
        """Whether the fence is to be asked for now: it is wanted and the last read has returned.  True once."""
        if self._asked_for.get(address) is not False or self._running[address]:
            return False
        self._asked_for[address] = True
        return True

    def fenced(self, address: str) -> None:
        """The engine is gone."""
        self._asked_for.pop(address, None)
        self._epochs.pop(address, None)
        if not self._running[address]:
            del self._running[address]
