"""Farewells: to a rank whose transfer is wanted no more, an Abort, repeated until it is answered or too late."""

from __future__ import annotations

from dataclasses import dataclass

from .lease import Clock, Resend
from .load import about
from .messages import Abort, Gone
from .ticket import RankAddress, Ticket

__all__ = ["Farewells"]


@dataclass(slots=True)
class _Farewell:
    rank: RankAddress
    ticket: Ticket
    resend: Resend


class Farewells:
    """Of one decode machine, life ``epoch``.  ``deadline_s``: after it the prefill side's lease has to do."""

    def __init__(self, epoch: str, resend_s: float, deadline_s: float, clock: Clock) -> None:
        self._epoch = epoch
        self._resend_s = resend_s
        self._deadline_s = deadline_s
        self._clock = clock
        self._said: list[_Farewell] = []

    def __len__(self) -> int:
        return len(self._said)

    def addresses(self) -> set[str]:
        """The ranks that have not answered yet."""
        return {farewell.rank.address for farewell in self._said}

    def say(self, rank: RankAddress, ticket: Ticket) -> Abort:
        """The first Abort of the ticket's claim on ``rank``."""
        now = self._clock()
        self._said.append(_Farewell(rank, ticket, Resend.start(now, self._resend_s, now + self._deadline_s)))
        return self._abort(rank, ticket)

    def heard(self, address: str, gone: Gone) -> None:
        """The rank at ``address`` has answered."""
        self._said = [f for f in self._said if not about(f.ticket, f.rank, address, gone)]

    def tick(self) -> list[tuple[str, Abort]]:
        """Lets time pass; the (address, Abort) pairs to send again."""
        now = self._clock()
        again = [(f.rank.address, self._abort(f.rank, f.ticket)) for f in self._said if f.resend.due(now)]
        self._said = [f for f in self._said if not f.resend.given_up(now)]
        return again

    def _abort(self, rank: RankAddress, ticket: Ticket) -> Abort:
        return Abort(
            epoch=self._epoch,
            to=rank.epoch,
            transfer=ticket.transfer,
            claim=ticket.claim,
            digest=ticket.digest,
        )
