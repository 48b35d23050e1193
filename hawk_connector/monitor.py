"""What people, probes and Prometheus see of one worker, whichever side it is on: status, watchdog, drops, epochs.

Reads what the worker hands in; knows no protocol's insides and changes nothing.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from .event_log import EventLog
from .metrics import TransferLog
from .protocol.lease import Clock
from .protocol.messages import PairingStatus, encode
from .protocol.snapshot import TransferSnapshot, describe
from .protocol.status_page import status_page
from .protocol.watchdog import Stall, Watchdog
from .rate import RateBook

__all__ = ["PeerChange", "SideMonitor"]

# Statuses that one connection may ask for: a status takes more to make than to ask for.
_STATUS_PER_S = 20.0
_STATUS_BURST = 40.0
_NAMES = 1024

# States of a link, and of its circuit, that are no cause for worry.
_GOOD = frozenset({"idle", "connecting", "paired", "closed", "half_open"})

Live = TypeVar("Live")


@dataclass(frozen=True, slots=True)
class PeerChange:
    """A peer's link or circuit is in another state than at the last look."""

    peer: str
    state: str
    detail: str


class SideMonitor(Generic[Live]):
    """``role``: "prefill" or "decode".  ``view`` makes a snapshot of a live transfer, which has a name."""

    def __init__(
        self,
        role: str,
        epoch: str,
        log: TransferLog,
        view: Callable[[str, Live], TransferSnapshot],
        *,
        stall_s: float,
        clock: Clock,
        logger: logging.Logger,
    ) -> None:
        self.events = EventLog(logger, clock)
        self._role = role
        self._epoch = epoch
        self._log = log
        self._view = view
        self._clock = clock
        self._begun_at = clock()
        self._watchdog = Watchdog(stall_s, clock)
        self._askers = RateBook(_STATUS_PER_S, _STATUS_BURST, _NAMES, clock)
        self._dropped: dict[str, int] = {}
        self._epochs: OrderedDict[str, None] = OrderedDict()
        self._states: dict[str, tuple[str, str]] = {}

    def watch(self, live: Mapping[str, Live]) -> list[Stall]:
        """Looks at some of ``live``; what is to be said with ``say``, once no lock is held."""
        return self._watchdog.turn(live, self._view)

    def say(self, stalls: Iterable[Stall]) -> None:
        """Writes the whole state of transfers that do not move to the log, and counts each once."""
        for stall in stalls:
            snapshot = stall.snapshot
            if stall.times == 1:
                self._log.count("stalls")
            self.events.warning(
                "stall",
                f"has not moved for {snapshot.still_s:.1f} s: {describe(snapshot)}",
                transfer=snapshot.transfer,
                request=snapshot.request,
                peer=snapshot.peer,
            )

    def peer_changes(self, states: Mapping[str, tuple[str, str]], detail: Callable[[str], str]) -> list[PeerChange]:
        """What has become of peers since the last look; what is to be said with ``say_peers``, once no lock is held.

        ``states``: of link and circuit by peer.
        """
        changes: list[PeerChange] = []
        for peer, (link, circuit) in states.items():
            before = self._states.get(peer, ("idle", "closed"))
            if link != before[0] and link not in ("idle", "connecting"):
                changes.append(PeerChange(peer, link, detail(peer)))
            if circuit != before[1]:
                changes.append(PeerChange(peer, f"circuit {circuit}", detail(peer)))
        self._states = dict(states)
        return changes

    def say_peers(self, changes: Iterable[PeerChange]) -> None:
        for change in changes:
            write = self.events.info if change.state.removeprefix("circuit ") in _GOOD else self.events.warning
            detail = f": {change.detail}" if change.detail else ""
            write("peer", f"{change.state.replace('_', '-')}{detail}", peer=change.peer)

    def count_drops(self, dropped: Mapping[str, int]) -> None:
        """``dropped``: messages by reason, all since the start."""
        for reason, number in dropped.items():
            self._log.count("messages_dropped", number - self._dropped.get(reason, 0), reason)
        self._dropped = dict(dropped)

    def count_epochs(self, epochs: Iterable[str]) -> None:
        """``epochs``: the lives of peers that are paired now."""
        for epoch in epochs:
            if epoch not in self._epochs:
                self._log.count("peer_epochs")
            self._epochs[epoch] = None
            self._epochs.move_to_end(epoch)
        while len(self._epochs) > _NAMES:
            self._epochs.popitem(last=False)

    def may_ask(self, peer: str) -> bool:
        """Whether ``peer`` may have a status now."""
        return self._askers.allows(peer)

    def status(
        self,
        held: Mapping[str, int],
        pairings: Sequence[PairingStatus],
        live: Mapping[str, Live],
        unready: Sequence[str],
        dropped: Mapping[str, int],
    ) -> bytes:
        """The Status message."""
        page = status_page(
            epoch=self._epoch,
            role=self._role,
            held=held,
            pairings=pairings,
            transfers=(self._watchdog.timed(name, self._view(name, each)) for name, each in live.items()),
            live=len(live),
            reports=self._log.recent(),
            unready=unready,
            dropped=dropped,
            uptime_s=self._clock() - self._begun_at,
        )
        return encode(page)
