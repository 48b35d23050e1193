"""Admission: the decode scheduler makes sure of a transfer before it gives a request blocks to load it into.

A request that gets Gone here simply computes its own KV; nothing has been allocated and nothing has failed.  No I/O,
no threads, no wall clock; what to send is taken with ``take_actions``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from ..plan.pairing import DecodeFacts
from ..series import Failure
from .decode_actions import Disconnect, PeerOutcome, SendTo
from .farewells import Farewells
from .lease import Clock, Resend
from .link import LinkLimits, LinkState, PeerLink, unfed_heads
from .link_book import LinkBook
from .load import about
from .messages import (
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
from .snapshot import TransferSnapshot, clipped
from .ticket import RankAddress, Ticket

__all__ = ["AdmissionLimits", "AdmissionProtocol", "Verdict", "VerdictKind"]


# How much later than asked for by ``verdict`` a claim is given up unasked: what vLLM has just been told is CLAIMED it
# gives blocks to in the same step.
_UNASKED_GRACE_S = 5.0


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """Times in seconds.  ``claim_hold_s``: how long a claimed request may wait for blocks; the prefill side's send
    buffer waits with it."""

    link: LinkLimits
    admission_deadline_s: float
    claim_hold_s: float


class VerdictKind(Enum):
    PENDING = "pending"
    CLAIMED = "claimed"  # load it
    GONE = "gone"  # the transfer is not for this request: compute
    FAILED = "failed"  # it should have worked: vLLM's failure policy decides


@dataclass(frozen=True, slots=True)
class Verdict:
    """``failure``: ``reason`` in one word."""

    kind: VerdictKind
    reason: str = ""
    failure: Failure | None = None


@dataclass(slots=True)
class _Ask:
    rank: RankAddress
    resend: Resend | None = None
    claimed: bool = False
    needless: bool = False


@dataclass(slots=True)
class _Asked:
    request: str
    ticket: Ticket
    since: float
    deadline: float
    asks: list[_Ask]
    verdict: Verdict = field(default_factory=lambda: Verdict(VerdictKind.PENDING))
    renew_at: float = 0.0
    hold_until: float = 0.0

    @property
    def open(self) -> bool:
        """Whether the prefill side may believe that the transfer is wanted."""
        return self.verdict.kind in (VerdictKind.PENDING, VerdictKind.CLAIMED)


class AdmissionProtocol:
    """Claims transfers for requests that wait to be scheduled."""

    def __init__(self, epoch: str, facts: DecodeFacts, limits: AdmissionLimits, clock: Clock) -> None:
        self.epoch = epoch
        self._book = LinkBook(epoch, facts, limits.link, clock, self._needed, self._disconnect)
        self._limits = limits
        self._clock = clock
        self._asked: dict[str, _Asked] = {}
        self._farewells = Farewells(epoch, limits.link.resend_s, limits.admission_deadline_s, clock)
        self._actions: list[SendTo | Disconnect] = []
        self.draining = False

    @property
    def links(self) -> Mapping[str, PeerLink]:
        """The links by address."""
        return self._book.links

    def take_actions(self) -> list[SendTo | Disconnect]:
        """What to send and to disconnect since the last call, in order."""
        actions, self._actions = self._actions, []
        return actions

    def held(self) -> dict[str, int]:
        return {"admissions": len(self._asked), "farewells": len(self._farewells)}

    @property
    def waiting(self) -> Mapping[str, object]:
        """What is known of the requests that wait, by request, the oldest first."""
        return self._asked

    def snapshot(self, request: str) -> TransferSnapshot:
        """One of ``waiting`` as it stands now."""
        now, asked = self._clock(), self._asked[request]
        silent = ", ".join(ask.rank.address for ask in asked.asks if not ask.claimed and not ask.needless)
        pending = asked.verdict.kind is VerdictKind.PENDING
        claimed = asked.verdict.kind is VerdictKind.CLAIMED
        until, key = (asked.deadline, "admission_deadline_s") if pending else (asked.hold_until, "claim_hold_s")
        return TransferSnapshot(
            transfer=asked.ticket.transfer,
            request=clipped(request),
            phase=asked.verdict.kind.value,
            peer=clipped(", ".join(ask.rank.address for ask in asked.asks), 1024),
            age_s=max(0.0, now - asked.since),
            waits_for=clipped(f"the claim of {silent}" if pending else "vLLM to give it blocks", 1024),
            detail=clipped(asked.verdict.reason, 1024),
            deadline=key if asked.open else "",
            deadline_in_s=until - now if pending or claimed else None,
        )

    def connect(self, address: str) -> None:
        """Pairs with a prefill rank ahead of any request, and keeps the link whatever becomes of it."""
        self._book.keep(address)
        self._refresh(self._book.use(address))

    def has_room(self, addresses: Iterable[str]) -> bool:
        """Whether a transfer of the ranks at ``addresses`` may be asked for; not while too many others are awaited."""
        return self._book.has_room(addresses)

    def ask(self, request: str, ticket: Ticket) -> None:
        """Asks every rank of the ticket's transfer for the claim, unless one is not to be waited for (its circuit)."""
        now = self._clock()
        asks = [_Ask(rank) for rank in ticket.ranks]
        asked = self._asked[request] = _Asked(request, ticket, now, now + self._limits.admission_deadline_s, asks)
        asked.renew_at = now + self._limits.link.renew_s
        if self.draining:
            self._give_up(asked, VerdictKind.GONE, "draining", "this side is draining")
            return
        for ask in asks:
            shut = self._book.use(ask.rank.address).admit(request, ask.rank.epoch)
            if shut is not None:
                self._give_up(asked, VerdictKind.FAILED, "circuit", shut)
                return
        self._pursue(asked)

    def verdict(self, request: str) -> Verdict | None:
        """How it stands now, deadlines included; None for a request that was not asked for."""
        asked = self._asked.get(request)
        if asked is None:
            return None
        self._judge(asked, 0.0)
        return asked.verdict

    def hand_over(self, request: str) -> Ticket | None:
        """The worker takes over the claim: no more renewals from here.  None, and told so, where there is no claim."""
        asked = self._asked.get(request)
        if asked is None or asked.verdict.kind is not VerdictKind.CLAIMED:
            self.drop(request)
            return None
        del self._asked[request]
        return asked.ticket

    def drop(self, request: str) -> None:
        """The request wants the transfer no more: the prefill side is told, until it answers."""
        asked = self._asked.pop(request, None)
        if asked is not None and asked.open:
            self._let_go(asked)
            self._part(asked)

    def drop_all(self) -> None:
        """No request wants its transfer any more."""
        for request in list(self._asked):
            self.drop(request)

    def drain(self) -> None:
        """No transfer is asked for any more; claims that are held go on."""
        self.draining = True

    def peer_outcome(self, outcome: PeerOutcome) -> None:
        """How a load of the worker went, as far as it concerns a rank's circuit."""
        link = self.links.get(outcome.address)
        if link is not None and link.remote_epoch == outcome.epoch:
            link.circuit.ended(outcome.request, outcome.served, outcome.reason)

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
            self._farewells.heard(address, message)
        for asked in self._asked.values():
            for ask in asked.asks:
                if not about(asked.ticket, ask.rank, address, message):
                    continue
                if isinstance(message, Claimed):
                    ask.claimed, ask.resend = True, None
                    self._conclude(asked)
                    self._pursue(asked)
                elif isinstance(message, Gone):
                    self._give_up(asked, VerdictKind.GONE, message.reason, message.reason, gone=ask)
                return

    def tick(self) -> None:
        """Lets time pass: repeats, renewals, deadlines."""
        now = self._clock()
        for address, hello in self._book.tick():
            self._say(address, hello)
        for asked in self._asked.values():
            self._pursue(asked)
            self._judge(asked, _UNASKED_GRACE_S)
            if asked.open and now >= asked.renew_at:
                asked.renew_at = now + self._limits.link.renew_s
                for ask in asked.asks:
                    if ask.claimed:
                        fields = _fields(self.epoch, asked.ticket, ask.rank)
                        self._say(ask.rank.address, Renew(**fields))
        for address, abort in self._farewells.tick():
            self._say(address, abort)

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
            link = self._book.use(ask.rank.address)
            if link.remote_epoch != ask.rank.epoch or link.state is not LinkState.PAIRED:
                if not link.settled_since(asked.since):
                    self._refresh(link)
                    earlier_claimed = False
                    continue
                if link.state is LinkState.PAIRED:
                    self._give_up(asked, VerdictKind.GONE, "restarted", "restarted", gone=ask)
                else:
                    reason = f"{ask.rank.address} is {link.state.value}: {link.detail}"
                    failure: Failure = "refused" if link.state is LinkState.REFUSED else "no_answer"
                    self._give_up(asked, VerdictKind.FAILED, failure, reason, gone=ask)
                return
            if link.pairing is not None and not link.pairing.shares:
                ask.needless = True
                self._conclude(asked)
                continue
            if earlier_claimed and ask.resend is None:
                ask.resend = Resend.start(now, self._limits.link.resend_s, asked.deadline)
                self._say_pull(asked, ask)
            elif ask.resend is not None and ask.resend.due(now):
                self._say_pull(asked, ask)
            earlier_claimed = False

    def _conclude(self, asked: _Asked) -> None:
        if asked.verdict.kind is not VerdictKind.PENDING or not all(a.claimed or a.needless for a in asked.asks):
            return
        pairings = [self._book.use(ask.rank.address).pairing for ask in asked.asks]
        unfed = unfed_heads([p for p in pairings if p is not None])
        if unfed:
            self._give_up(
                asked, VerdictKind.GONE, "heads", f"its ranks do not send each (chip, head) once: {unfed[:4]}"
            )
        else:
            asked.verdict = Verdict(VerdictKind.CLAIMED)
            asked.hold_until = self._clock() + self._limits.claim_hold_s

    def _judge(self, asked: _Asked, grace_s: float) -> None:
        """Gives up what has waited for too long: for the prefill side's answer, or with it for decode's blocks."""
        now = self._clock()
        if asked.verdict.kind is VerdictKind.PENDING and now >= asked.deadline:
            silent = ", ".join(a.rank.address for a in asked.asks if not a.claimed and not a.needless)
            waited = f"{self._limits.admission_deadline_s:g} s"
            for ask in asked.asks:
                link = self.links.get(ask.rank.address)
                # A link that is down or refused counts for itself.
                if link is not None and link.state is LinkState.PAIRED and ask.resend is not None and not ask.claimed:
                    link.circuit.ended(asked.request, False, f"no answer to a Pull within {waited}")
            self._give_up(asked, VerdictKind.FAILED, "no_answer", f"no answer from {silent} within {waited}")
        elif asked.verdict.kind is VerdictKind.CLAIMED and now >= asked.hold_until + grace_s:
            reason = f"waited too long for blocks here (claim_hold_s {self._limits.claim_hold_s:g} s)"
            self._give_up(asked, VerdictKind.GONE, "blocks", reason)

    def _give_up(
        self, asked: _Asked, kind: VerdictKind, failure: Failure, reason: str, gone: _Ask | None = None
    ) -> None:
        if not asked.open:
            return  # this is the answer to our farewell: the first verdict stays, and nobody is told again
        asked.verdict = Verdict(kind, reason, failure)
        self._let_go(asked)
        self._part(asked, but=gone)

    def _let_go(self, asked: _Asked) -> None:
        """The request's end says nothing about its ranks; whichever it was the probe of may be tried by another."""
        for ask in asked.asks:
            link = self.links.get(ask.rank.address)
            if link is not None:
                link.circuit.ended(asked.request, None)

    def _part(self, asked: _Asked, but: _Ask | None = None) -> None:
        # Ranks that were not asked yet hold the transfer too.  Only Gone says that it may be another's.
        ours = asked.verdict.kind is not VerdictKind.GONE or self.draining
        for ask in asked.asks:
            link = self.links.get(ask.rank.address)
            if link is not None and link.state is LinkState.REFUSED:
                continue  # it would only say Stale to whom it has not paired with
            if ask is not but and not ask.needless and (ours or ask.claimed or ask.resend is not None):
                self._say(ask.rank.address, self._farewells.say(ask.rank, asked.ticket))

    # --- links and messages

    def _needed(self) -> set[str]:
        """The peers that an open request or a farewell is with."""
        asked = {ask.rank.address for asked in self._asked.values() if asked.open for ask in asked.asks}
        return asked | self._farewells.addresses()

    def _disconnect(self, address: str) -> None:
        self._actions.append(Disconnect(address))

    def _refresh(self, link: PeerLink) -> None:
        self._say(link.address, link.refresh())

    def _say(self, address: str, message: DecodeMessage | None) -> None:
        if message is not None:
            self._actions.append(SendTo(address, message))

    def _say_pull(self, asked: _Asked, ask: _Ask) -> None:
        fields = _fields(self.epoch, asked.ticket, ask.rank)
        pull = Pull(digest=asked.ticket.digest, tokens=asked.ticket.tokens, deliver=False, **fields)
        self._say(ask.rank.address, pull)


def _fields(epoch: str, ticket: Ticket, rank: RankAddress) -> dict[str, Any]:
    return {"epoch": epoch, "to": rank.epoch, "transfer": ticket.transfer, "claim": ticket.claim}
