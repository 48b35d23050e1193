"""Which transfers have not moved for too long.  Looks at snapshots and a clock, and touches nothing.

A transfer that renews its lease, or is asked about again and again, does not move by that: what counts is
``TransferSnapshot.mark``.  Deadlines end such transfers by themselves; the watchdog says before that why they wait.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

import msgspec

from .lease import Clock
from .snapshot import TransferSnapshot

__all__ = ["Stall", "Watchdog"]


# Looked at in one turn: a look takes time in proportion to the transfer's parcels, and others wait meanwhile.
_A_TURN = 64

Live = TypeVar("Live")


@dataclass(frozen=True, slots=True)
class Stall:
    """``times``: how often this transfer has been found not moving since it last moved, this time included."""

    snapshot: TransferSnapshot
    times: int


@dataclass(slots=True)
class _Seen:
    mark: tuple[str | int, ...]
    since: float
    report_at: float
    times: int = 0


class Watchdog:
    """``stall_s``: how long a transfer may stand still unremarked; it is reported then, and each time that it has
    stood still for twice as long as at the last report."""

    def __init__(self, stall_s: float, clock: Clock) -> None:
        self._stall_s = stall_s
        self._clock = clock
        self._seen: dict[str, _Seen] = {}
        self._round: deque[str] = deque()
        self._next_round = clock()

    def turn(self, live: Mapping[str, Live], view: Callable[[str, Live], TransferSnapshot]) -> list[Stall]:
        """Looks at some of ``live`` through ``view``: at all of them four times in ``stall_s``, a bounded number of
        them at a time.  Gives those to report."""
        now = self._clock()
        if not self._round and now >= self._next_round:
            self._next_round = now + self._stall_s / 4
            for ended in self._seen.keys() - live.keys():
                del self._seen[ended]
            self._round.extend(live)
        names = list(islice(self._round, _A_TURN))
        for _ in names:
            self._round.popleft()
        return self.look((name, view(name, live[name])) for name in names if name in live)

    def look(self, snapshots: Iterable[tuple[str, TransferSnapshot]]) -> list[Stall]:
        """Takes note of ``snapshots`` by name; gives those to report now, with ``still_s`` filled in."""
        now = self._clock()
        stalls: list[Stall] = []
        for name, snapshot in snapshots:
            seen = self._seen.get(name)
            if seen is None or seen.mark != snapshot.mark:
                self._seen[name] = _Seen(snapshot.mark, now, now + self._stall_s)
            elif now >= seen.report_at:
                seen.times += 1
                still = now - seen.since
                seen.report_at = now + still
                stalls.append(Stall(msgspec.structs.replace(snapshot, still_s=still), seen.times))
        return stalls

    def timed(self, name: str, snapshot: TransferSnapshot) -> TransferSnapshot:
        """``snapshot`` with ``still_s`` as far as it is known."""
        seen = self._seen.get(name)
        if seen is None or seen.mark != snapshot.mark:
            return snapshot
        return msgspec.structs.replace(snapshot, still_s=self._clock() - seen.since)
