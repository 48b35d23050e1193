"""How long a read will take, from those before it: for sleeping through a wait that would otherwise be a busy one."""

from __future__ import annotations

import threading

from ..plan.segments import Segments

__all__ = ["Pace"]

# What a segment costs beside its bytes, in bytes that the carrier moves in the same time (benchmarks/read_cost.py).
_SMALLEST_COST_BYTES = 16384
# Of the expected time; the rest is waited for in the carrier's own way.
_SLEPT = 0.8
# A shorter sleep is not worth its wake-up.
_SHORTEST_S = 0.002
# A longer one would be a long time to be wrong.
_LONGEST_S = 0.5


class Pace:
    """Thread-safe.  Starts with nothing to go by, and then sleeps nothing."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seconds_per_byte = 0.0

    def sleep_s(self, segments: Segments) -> float:
        """Seconds in which ``segments`` are not expected to arrive; 0 where they are too few to say."""
        seconds = _SLEPT * self._seconds_per_byte * _cost(segments)
        return min(seconds, _LONGEST_S) if seconds >= _SHORTEST_S else 0.0

    def took(self, segments: Segments, seconds: float) -> None:
        """A read of ``segments`` has ended well after ``seconds``, any sleep included.

        One that slept longer than it needed looks as if it had taken just as long as the sleep: that is a part of what
        was expected, so the estimate falls until sleeps end before reads do.  It rises by no more than a half at once.
        """
        found = seconds / _cost(segments)
        with self._lock:
            known = self._seconds_per_byte
            self._seconds_per_byte = (known + min(found, 2 * known)) / 2 if known else found


def _cost(segments: Segments) -> int:
    """Bytes that a carrier moves in the same time as these, whatever their sizes."""
    return segments.nbytes + segments.count * _SMALLEST_COST_BYTES
