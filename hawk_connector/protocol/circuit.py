"""The circuit of one prefill rank: after failures in a row requests do not wait for it, until one has tried it again.

CLOSED -> OPEN -> HALF_OPEN -> CLOSED, or OPEN again for twice as long.  No I/O, no threads, no wall clock.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from .lease import Clock

__all__ = ["Circuit", "CircuitLimits", "CircuitState"]


class CircuitState(Enum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@dataclass(frozen=True, slots=True)
class CircuitLimits:
    """``failures``: in a row, until it opens.  ``open_s``: for how long at first, doubled each time that the probe
    fails, up to ``open_max_s``."""

    failures: int = 3
    open_s: float = 5.0
    open_max_s: float = 60.0


class Circuit:
    """Failures of one peer's present life.

    A peer that is *silent* is not tried by requests at all: its link goes on asking, and the answer half-opens the
    circuit.  One that answers but fails is tried by a request once its time is over; should it fall silent meanwhile,
    its answer ends that time, since whatever cut it off may have been why it failed.  A new life begins anew.
    """

    def __init__(self, limits: CircuitLimits, clock: Clock) -> None:
        self.reason = ""
        self._limits = limits
        self._clock = clock
        self._life: str | None = None
        self._failures = 0
        self._openings = 0
        self._open_until: float | None = None
        self._probe = ""
        self._probe_until = -math.inf

    @property
    def state(self) -> CircuitState:
        if self._open_until is None:
            return CircuitState.CLOSED
        return CircuitState.OPEN if self._clock() < self._open_until else CircuitState.HALF_OPEN

    @property
    def detail(self) -> str:
        """The circuit in words; empty while it is closed."""
        if self._open_until is None:
            return ""
        times = f"failed {self._failures} times in a row, last: {self.reason}"
        if self._open_until == math.inf:
            return f"{times}; tried again as soon as it answers"
        left = max(0.0, self._open_until - self._clock())
        return f"{times}; " + (f"tried again in {left:.1f} s" if left else "one transfer is tried")

    def admit(self, request: str) -> bool:
        """Whether ``request`` may use the peer now; while half-open the first may, and is the probe.

        The probe ends with ``ended``, or, should its end get lost, by time.
        """
        state = self.state
        if state is not CircuitState.HALF_OPEN:
            return state is CircuitState.CLOSED
        now = self._clock()
        if now < self._probe_until:
            return False
        self._probe = request
        self._probe_until = now + self._limits.open_max_s
        return True

    def ended(self, request: str, served: bool | None, reason: str = "") -> None:
        """What ``request`` wanted of the peer has ended: it served or failed, or (None) that cannot be said.

        In the last case another request may be the probe if this one was.  While half-open only the probe's failure
        counts: whatever else fails then began before the circuit opened.
        """
        if served:
            self.succeeded()
        elif served is not None:
            if request == self._probe or self.state is not CircuitState.HALF_OPEN:
                self.failed(reason)
        elif request == self._probe:
            self._probe_until = -math.inf

    def failed(self, reason: str, *, silent: bool = False) -> None:
        """The peer failed.  What began before the circuit opened and fails now changes nothing."""
        self._failures += 1
        self.reason = reason
        if self._failures < self._limits.failures:
            return
        if silent:
            self._open_until = math.inf
        elif self.state is CircuitState.OPEN:
            return
        else:
            # 2.0 ** 60 seconds are for ever: the exponent is bounded so that the power is a number.
            wait = min(self._limits.open_s * 2.0 ** min(self._openings, 60), self._limits.open_max_s)
            self._openings += 1
            self._open_until = self._clock() + wait
        self._probe_until = -math.inf

    def succeeded(self) -> None:
        """The peer did what was asked of it."""
        self._failures = self._openings = 0
        self._open_until = None
        self._probe_until = -math.inf

    def heard(self, life: str) -> None:
        """The peer answered, as the life with this epoch."""
        if life != self._life:
            self._life = life
            self.succeeded()
        elif self._open_until == math.inf:
            self._open_until = self._clock()
