"""How often something may happen: token buckets, alone and by name.  No wall clock: time is handed in."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass

__all__ = ["RateBook", "TokenBucket"]


@dataclass(slots=True)
class TokenBucket:
    """Holds up to ``burst`` tokens and gains ``per_s`` of them a second; begins full.

    A clock that goes back gains nothing and costs nothing.
    """

    per_s: float
    burst: float
    tokens: float
    filled_at: float

    @classmethod
    def full(cls, per_s: float, burst: float, now: float) -> TokenBucket:
        return cls(per_s, burst, burst, now)

    def take(self, now: float) -> bool:
        """Takes one token; False where there is none."""
        self.tokens = min(self.burst, self.tokens + max(0.0, now - self.filled_at) * self.per_s)
        self.filled_at = now
        if self.tokens < 1.0:
            return False
        self.tokens -= 1.0
        return True


@dataclass(slots=True)
class _Entry:
    bucket: TokenBucket
    refused: int = 0


class RateBook:
    """A bucket for each name, at most ``names`` of them: the one least recently asked for is forgotten.

    Whoever is forgotten begins anew with a full bucket, so ``names`` should exceed what can be active at once.
    """

    def __init__(self, per_s: float, burst: float, names: int, clock: Callable[[], float]) -> None:
        self._per_s = per_s
        self._burst = burst
        self._names = names
        self._clock = clock
        self._entries: OrderedDict[Hashable, _Entry] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def allows(self, name: Hashable) -> bool:
        """Whether ``name`` may once more, now.  What is refused is counted for ``unsaid``."""
        now = self._clock()
        entry = self._entries.get(name)
        if entry is None:
            entry = self._entries[name] = _Entry(TokenBucket.full(self._per_s, self._burst, now))
            if len(self._entries) > self._names:
                self._entries.popitem(last=False)
        self._entries.move_to_end(name)
        if entry.bucket.take(now):
            return True
        entry.refused += 1
        return False

    def unsaid(self, name: Hashable) -> int:
        """How often ``name`` was refused since the last call."""
        entry = self._entries.get(name)
        if entry is None:
            return 0
        refused, entry.refused = entry.refused, 0
        return refused
