"""Pulls that came before their transfers: with several prefill ranks one may be a step behind the rank that answered.

A rank cannot tell such a transfer from one that it will never hear of, so the Pull waits a moment and then gets Gone.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from .lease import Clock
from .messages import Pull

__all__ = ["EarlyPull", "EarlyPulls"]


@dataclass(frozen=True, slots=True)
class EarlyPull:
    """``pull`` came over the connection ``identity`` and is answered by ``until``."""

    identity: str
    pull: Pull
    until: float


class EarlyPulls:
    """At most ``limit`` of them, one a transfer, each for ``wait_s``.  Waiting for 0 s keeps none."""

    def __init__(self, limit: int, wait_s: float, clock: Clock) -> None:
        self._limit = limit
        self._wait_s = wait_s
        self._clock = clock
        self._waiting: OrderedDict[str, EarlyPull] = OrderedDict()

    def __len__(self) -> int:
        return len(self._waiting)

    def keep(self, identity: str, pull: Pull) -> bool:
        """Keeps the Pull, or its repetition; False where it is to be answered at once.

        Another claim on the same transfer is not kept: which of the two comes first is not known yet.
        """
        known = self._waiting.get(pull.transfer)
        if known is not None and known.pull.claim != pull.claim:
            return False
        if known is None and (self._wait_s <= 0 or len(self._waiting) >= self._limit):
            return False
        until = known.until if known is not None else self._clock() + self._wait_s
        self._waiting[pull.transfer] = EarlyPull(identity, pull, until)
        return True

    def take(self, transfer: str) -> EarlyPull | None:
        """The Pull that waits for this transfer, which has begun now or is wanted no more."""
        return self._waiting.pop(transfer, None)

    def take_late(self) -> list[EarlyPull]:
        """Those that have waited for long enough."""
        now = self._clock()
        late = [early for early in self._waiting.values() if early.until <= now]
        for early in late:
            del self._waiting[early.pull.transfer]
        return late

    def next_deadline(self) -> float | None:
        return min((early.until for early in self._waiting.values()), default=None)
