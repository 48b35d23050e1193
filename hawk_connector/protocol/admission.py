"""Admission: the decode scheduler makes sure of a transfer before it gives a request blocks to load it into.

A request that gets Gone here simply computes its own KV; nothing has been allocated and nothing has failed.  No I/O,
no threads, no wall clock; messages to send are taken with ``take_messages``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from ..plan.pairing import DecodeFacts
from .lease import Clock, Resend
from .link import LinkLimits, LinkState, PeerLink, unfed_heads
from .messages import (
    Abort,
    Accepted,
    Claimed,
    DecodeMessage,
    Gone,
    Pull,
    Ready,
    Refused,
    Renew,
    Renewed,
    Stale,
    Welcome,
)
from .ticket import RankAddress, Ticket

__all__ = ["AdmissionProtocol", "Verdict", "VerdictKind"]


class VerdictKind(Enum):
    PENDING = "pending"
    CLAIMED = "claimed"  # load it
    GONE = "gone"  # the transfer is not for this request: compute
    FAILED = "failed"  # it should have worked: vLLM's failure policy decides


@dataclass(frozen=True, slots=True)
class Verdict:
    kind: VerdictKind
    reason: str = ""


@dataclass(slots=True)
class _Ask:
    rank: RankAddress
    resend: Resend | None = None
    claimed: bool = False
    needless: bool = False


@dataclass(slots=True)
class _Asked:
    ticket: Ticket
    since: float
    deadline: float
    asks: list[_Ask]
    verdict: Verdict = field(default_factory=lambda: Verdict(VerdictKind.PENDING))
    renew_at: float = 0.0

    @property
    def open(self) -> bool:
        """Whether the prefill side may believe that the transfer is wanted."""
        return self.verdict.kind in (VerdictKind.PENDING, VerdictKind.CLAIMED)


@dataclass(slots=True)
class _Farewell:
    rank: RankAddress
    ticket: Ticket
    resend: Resend


class AdmissionProtocol:
    """Claims transfers for requests that wait to be scheduled."""

    def __init__(
        self, epoch: str, facts: DecodeFacts, limits: LinkLimits, admission_deadline_s: float, clock: Clock
    ) -> None:
        self.epoch = epoch
        self.links: dict[str, PeerLink] = {}
        self._facts = facts
        self._limits = limits
        self._deadline_s = admission_deadline_s
        self._clock = clock
        self._asked: dict[str, _Asked] = {}
        self._farewells: list[_Farewell] = []
        self._out: list[tuple[str, DecodeMessage]] = []

    def take_messages(self) -> list[tuple[str, DecodeMessage]]:
        """(address, message) pairs to send, in order."""
        out, self._out = self._out, []
        return out

    def held(self) -> dict[str, int]:
        return {"admissions": len(self._asked), "farewells": len(self._farewells)}

    def connect(self, address: str) -> None:
        """Pairs with a prefill rank ahead of any request."""
        self._refresh(self._link(address))

    def ask(self, request: str, ticket: Ticket) -> None:
        """Asks every rank of the ticket's transfer for the claim."""
        now = self._clock()
        asks = [_Ask(rank) for rank in ticket.ranks]
        self._asked[request] = _Asked(ticket, now, now + self._deadline_s, asks, renew_at=now + self._limits.renew_s)
        self._pursue(self._asked[request])

    def verdict(self, request: str) -> Verdict | None:
        """How it stands; None for a request that was not asked for."""
        asked = self._asked.get(request)
        return asked.verdict if asked is not None else None

    def forget(self, request: str) -> Ticket | None:
        """The worker takes over the claim, or nobody needs it: no more renewals from here."""
        asked = self._asked.pop(request, None)
        return asked.ticket if asked is not None else None

    def drop(self, request: str) -> None:
        """The request wants the transfer no more: the prefill side is told, until it answers."""
        asked = self._asked.pop(request, None)
        if asked is not None and asked.open:
            self._part(asked)

    def receive(
        self, address: str, message: Welcome | Refused | Stale | Claimed | Ready | Renewed | Accepted | Gone
    ) -> None:
        link = self.links.get(address)
        if link is None or message.to != self.epoch:
            return
        if isinstance(message, (Welcome, Refused, Stale)):
            self._say(address, link.receive(message))
            for asked in list(self._asked.values()):
                self._pursue(asked)
            return
        link.heard_at = self._clock()
        if isinstance(message, Gone):
            self._farewells = [f for f in self._farewells if not _about(f.ticket, f.rank, address, message)]
        for asked in self._asked.values():
            for ask in asked.asks:
                if not _about(asked.ticket, ask.rank, address, message):
                    continue
                if isinstance(message, Claimed):
                    ask.claimed, ask.resend = True, None
                    self._conclude(asked)
                    self._pursue(asked)
                elif isinstance(message, Gone):
                    self._give_up(asked, VerdictKind.GONE, message.reason, gone=ask)
                return

    def tick(self) -> None:
        """Lets time pass: repeats, renewals, deadlines."""
        now = self._clock()
        for link in self.links.values():
            self._say(link.address, link.tick())
        for asked in self._asked.values():
            self._pursue(asked)
            if asked.verdict.kind is VerdictKind.PENDING and now >= asked.deadline:
                silent = ", ".join(a.rank.address for a in asked.asks if not a.claimed and not a.needless)
                self._give_up(asked, VerdictKind.FAILED, f"no answer from {silent} within {self._deadline_s:g} s")
            if asked.open and now >= asked.renew_at:
                asked.renew_at = now + self._limits.renew_s
                for ask in asked.asks:
                    if ask.claimed:
                        fields = _fields(self.epoch, asked.ticket, ask.rank)
                        self._out.append((ask.rank.address, Renew(**fields)))
        for farewell in self._farewells:
            if farewell.resend.due(now):
                self._say_abort(farewell)
        self._farewells = [f for f in self._farewells if not f.resend.given_up(now)]

    # --- asking

    def _pursue(self, asked: _Asked) -> None:
        """Sends what can be sent for a pending request.

        All links are made at once, but ranks are asked for the claim one after another, in the ticket's order: of two
        decode sides that ask at the same time one gets all ranks, where otherwise each might get some.
        """
        now = self._clock()
        earlier_claimed = True
        for ask in asked.asks:
            if asked.verdict.kind is not VerdictKind.PENDING:
                return
            if ask.claimed or ask.needless:
                continue
            link = self._link(ask.rank.address)
            if link.remote_epoch != ask.rank.epoch or link.state is not LinkState.PAIRED:
                if not link.settled_since(asked.since):
                    self._refresh(link)
                    earlier_claimed = False
                    continue
                if link.state is LinkState.PAIRED:
                    self._give_up(asked, VerdictKind.GONE, "restarted", gone=ask)
                else:
                    reason = f"{ask.rank.address} is {link.state.value}: {link.detail}"
                    self._give_up(asked, VerdictKind.FAILED, reason, gone=ask)
                return
            if link.pairing is not None and not link.pairing.shares:
                ask.needless = True
                self._conclude(asked)
                continue
            if earlier_claimed and ask.resend is None:
                ask.resend = Resend.start(now, self._limits.resend_s, asked.deadline)
                self._say_pull(asked, ask)
            elif ask.resend is not None and ask.resend.due(now):
                self._say_pull(asked, ask)
            earlier_claimed = False

    def _conclude(self, asked: _Asked) -> None:
        if asked.verdict.kind is not VerdictKind.PENDING or not all(a.claimed or a.needless for a in asked.asks):
            return
        pairings = [self._link(ask.rank.address).pairing for ask in asked.asks]
        unfed = unfed_heads([p for p in pairings if p is not None])
        if unfed:
            self._give_up(asked, VerdictKind.GONE, f"its ranks do not send each (chip, head) once: {unfed[:4]}")
        else:
            asked.verdict = Verdict(VerdictKind.CLAIMED)

    def _give_up(self, asked: _Asked, kind: VerdictKind, reason: str, gone: _Ask | None = None) -> None:
        if not asked.open:
            return  # this is the answer to our farewell: the first verdict stays, and nobody is told again
        asked.verdict = Verdict(kind, reason)
        self._part(asked, but=gone)

    def _part(self, asked: _Asked, but: _Ask | None = None) -> None:
        now = self._clock()
        # Ranks that were not asked yet hold the transfer too.  Only Gone says that it may be another's.
        ours = asked.verdict.kind is not VerdictKind.GONE
        for ask in asked.asks:
            if self._link(ask.rank.address).state is LinkState.REFUSED:
                continue  # it would only say Stale to whom it has not paired with
            if ask is not but and not ask.needless and (ours or ask.claimed or ask.resend is not None):
                resend = Resend.start(now, self._limits.resend_s, now + self._deadline_s)
                farewell = _Farewell(ask.rank, asked.ticket, resend)
                self._farewells.append(farewell)
                self._say_abort(farewell)

    # --- links and messages

    def _link(self, address: str) -> PeerLink:
        if address not in self.links:
            self.links[address] = PeerLink(address, self.epoch, self._facts, self._limits, self._clock)
        return self.links[address]

    def _refresh(self, link: PeerLink) -> None:
        self._say(link.address, link.refresh())

    def _say(self, address: str, message: DecodeMessage | None) -> None:
        if message is not None:
            self._out.append((address, message))

    def _say_pull(self, asked: _Asked, ask: _Ask) -> None:
        fields = _fields(self.epoch, asked.ticket, ask.rank)
        pull = Pull(digest=asked.ticket.digest, tokens=asked.ticket.tokens, deliver=False, **fields)
        self._out.append((ask.rank.address, pull))

    def _say_abort(self, farewell: _Farewell) -> None:
        fields = _fields(self.epoch, farewell.ticket, farewell.rank)
        self._out.append((farewell.rank.address, Abort(digest=farewell.ticket.digest, **fields)))


def _fields(epoch: str, ticket: Ticket, rank: RankAddress) -> dict[str, Any]:
    return {"epoch": epoch, "to": rank.epoch, "transfer": ticket.transfer, "claim": ticket.claim}


def _about(
    ticket: Ticket, rank: RankAddress, address: str, message: Claimed | Ready | Renewed | Accepted | Gone
) -> bool:
    return (
        rank.address == address
        and rank.epoch == message.epoch
        and ticket.transfer == message.transfer
        and ticket.claim == message.claim
    )
