"""Clocks and leases.  Time is always handed in: a clock is any callable that gives seconds and never goes back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["RESEND_GROWTH", "Clock", "Lease", "Resend"]

# A message is repeated after at most this many times its first pause.
RESEND_GROWTH = 8

Clock = Callable[[], float]


@dataclass(slots=True)
class Lease:
    """A time until which something is kept.  An expired lease stays expired: renewing it does nothing."""

    until: float

    def expired(self, now: float) -> bool:
        return now >= self.until

    def renew(self, now: float, seconds: float) -> bool:
        """Extends the lease to ``now + seconds`` unless it has expired; says whether it lives."""
        if self.expired(now):
            return False
        self.until = max(self.until, now + seconds)
        return True


@dataclass(slots=True)
class Resend:
    """When a message that wants an answer is sent again, and when its sender gives up.

    Grows by half with each repetition up to eight times the period, so that a slow peer is not drowned.
    """

    period_s: float
    deadline: float
    next_at: float
    wait_s: float = 0.0

    @classmethod
    def start(cls, now: float, period_s: float, deadline: float) -> Resend:
        return cls(period_s, deadline, now + period_s, period_s)

    def given_up(self, now: float) -> bool:
        return now >= self.deadline

    def due(self, now: float) -> bool:
        """Whether to send again now; if so, the next time is set."""
        if now < self.next_at or self.given_up(now):
            return False
        self.wait_s = min(self.wait_s * 1.5, self.period_s * RESEND_GROWTH)
        self.next_at = now + self.wait_s
        return True
