"""What is left of ended transfers on the prefill side: verdicts, so that a repeated question gets the same answer."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from .lease import Clock
from .messages import Abort, Done, GoneReason, Pull, Renew
from .transfer import Claim, ParcelState, Transfer

__all__ = ["Graveyard", "Tombstone"]


@dataclass(frozen=True, slots=True)
class Tombstone:
    """The claim that a transfer had, which of its (parcel, generation) were accepted, and why it ended."""

    claim: Claim | None
    accepted: frozenset[tuple[int, int]]
    reason: GoneReason

    @classmethod
    def of(cls, transfer: Transfer) -> Tombstone:
        accepted = frozenset((p.index, p.generation) for p in transfer.parcels if p.state is ParcelState.ACCEPTED)
        return cls(transfer.claim, accepted, transfer.gone or "released")

    def answer(self, message: Pull | Renew | Done | Abort) -> GoneReason | None:
        """Why the transfer is gone, for who sent this; None where it is a Done whose parcel was accepted."""
        asking = Claim(message.epoch, message.claim)
        if isinstance(message, Done) and self.claim == asking and (message.parcel, message.generation) in self.accepted:
            return None
        return self.reason if self.claim in (None, asking) else "claimed"


class Graveyard:
    """Tombstones of the last ``keep_s`` seconds, by transfer."""

    def __init__(self, keep_s: float, clock: Clock) -> None:
        self._keep_s = keep_s
        self._clock = clock
        self._stones: OrderedDict[str, tuple[float, Tombstone]] = OrderedDict()

    def bury(self, transfer: Transfer) -> None:
        self._stones[transfer.id] = self._clock() + self._keep_s, Tombstone.of(transfer)

    def find(self, transfer: str) -> Tombstone | None:
        kept = self._stones.get(transfer)
        return kept[1] if kept is not None else None

    def tick(self) -> None:
        """Forgets what has been kept for long enough."""
        now = self._clock()
        while (until := self.next_deadline()) is not None and until <= now:
            self._stones.popitem(last=False)

    def next_deadline(self) -> float | None:
        """When the oldest is forgotten; each is kept for as long, so they stand in that order."""
        return next((until for until, _ in self._stones.values()), None)
