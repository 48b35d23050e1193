"""The decode side's link to one prefill rank: who it is, whether it may be used, and whether it still lives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from ..errors import Mismatch
from ..plan.pairing import AnyPairing, DecodeFacts, DirectPairing, pair
from .circuit import Circuit, CircuitLimits
from .lease import RESEND_GROWTH, Clock, Resend
from .messages import PROTOCOL_VERSION, Hello, Refused, Stale, Welcome

__all__ = ["LinkLimits", "LinkState", "PeerLink", "unfed_heads"]


class LinkState(Enum):
    IDLE = "idle"
    CONNECTING = "connecting"
    PAIRED = "paired"
    REFUSED = "refused"
    DOWN = "down"


@dataclass(frozen=True, slots=True)
class LinkLimits:
    """Times in seconds.  ``hello_every_s``: how often a paired link shows and asks for a sign of life.

    ``retry_s``: pause before a link that is down says Hello again.  ``digests``: each parcel's digest is asked for.
    ``by_process``: reads go by the peer's session for its own machine, not by that of its transfer engine.
    ``forget_s``, ``max_links``: see ``link_book``.
    """

    hello_deadline_s: float
    resend_s: float
    renew_s: float
    hello_every_s: float = 15.0
    forget_s: float = 60.0
    max_links: int = 256
    retry_s: float = 1.0
    circuit: CircuitLimits = field(default_factory=CircuitLimits)
    digests: bool = False
    by_process: bool = False


class PeerLink:
    """One prefill rank's side channel at ``address``.

    IDLE -> CONNECTING -> PAIRED, REFUSED or DOWN; ``refresh`` goes back to CONNECTING from IDLE and REFUSED.  While a
    paired link is refreshed its old pairing stays readable, so that a sign of life costs no transfer anything; one
    that is down stays so until it is answered, and asks by itself, so that a peer that comes back is soon known.
    ``sent``: the number of the last Hello that may have gone to this address already.
    """

    def __init__(
        self, address: str, epoch: str, facts: DecodeFacts, limits: LinkLimits, clock: Clock, sent: int = 0
    ) -> None:
        self.address = address
        self.state = LinkState.IDLE
        self.welcome: Welcome | None = None
        self.pairing: AnyPairing | None = None
        self.mismatches: tuple[Mismatch, ...] = ()
        self.heard_at = clock()
        self.settled_at: float | None = None
        self.used_at = clock()
        self.circuit = Circuit(limits.circuit, clock)
        self.sent = sent
        self._epoch = epoch
        self._facts = facts
        self._limits = limits
        self._clock = clock
        self._resend: Resend | None = None
        self._asked_at = clock()
        # The life that a request wants and that has not been heard of yet, since when; and the last such life for
        # which a whole question went unanswered.
        self._awaited, self._awaited_at = "", clock()
        self._missed = ""
        # Answers to Hellos up to this number are late: a newer question has been asked or answered since.
        self._settled_number = sent

    @property
    def remote_epoch(self) -> str | None:
        return self.welcome.epoch if self.welcome is not None else None

    @property
    def dead(self) -> bool:
        """Whether the peer does not answer, or is not one to work with."""
        return self.state not in (LinkState.CONNECTING, LinkState.PAIRED)

    @property
    def session(self) -> str:
        """The peer's session that reads name."""
        if self.welcome is None:
            return ""
        return self.welcome.process if self._limits.by_process else self.welcome.engine

    @property
    def detail(self) -> str:
        """The link in words, for status pages and failures."""
        if self.state is LinkState.REFUSED:
            return "; ".join(str(m) for m in self.mismatches)
        if self.state is LinkState.DOWN:
            return f"no answer within {self._limits.hello_deadline_s:g} s"
        if self.welcome is not None and self.pairing is not None:
            facts = self.welcome.facts
            heads = ", ".join(
                f"chip {share.chip}: heads {', '.join(f'{r}->{c}' for r, c in share.heads)}"
                for share in self.pairing.shares
            )
            about = f"rank {facts.rank} of {facts.ranks}, {facts.shape.dtype}, block size {facts.block_size}"
            mode = "" if self.pairing.mode == "hawk" else f", mode {self.pairing.mode}"
            return f"{about}{mode}; {heads}"
        return ""

    def settled_since(self, since: float) -> bool:
        """Whether a verdict (paired, refused or down) was reached at ``since`` or later.

        Down only counts where the question was asked at ``since`` or later too: one that was nearly over by then says
        nothing about a peer that has come back in the meantime.
        """
        if self._resend is not None or self.settled_at is None:
            return False
        return (self._asked_at if self.state is LinkState.DOWN else self.settled_at) >= since

    def refresh(self) -> Hello | None:
        """Asks (again) for the pairing; the Hello to send, or None where one is already out."""
        if self._resend is not None:
            return None
        now = self._clock()
        self._settled_number = self.sent
        self._asked_at = now
        self._resend = Resend.start(now, self._limits.resend_s, now + self._limits.hello_deadline_s)
        if self.state not in (LinkState.PAIRED, LinkState.DOWN):
            self.state = LinkState.CONNECTING
        return self._hello()

    def admit(self, request: str, life: str) -> str | None:
        """Why ``request`` must not wait for the peer's ``life`` now, or None: it is then the circuit's probe if one is
        due.

        Who names a life that is not known here may have met the peer back before we have.  The circuit is about
        another life, so the request waits for this one, until it has been asked for once in vain.
        """
        if life not in (self.remote_epoch, self._missed):
            if life != self._awaited:
                self._awaited, self._awaited_at = life, self._clock()
            return None
        if self.circuit.admit(request):
            return None
        state = self.circuit.state.value.replace("_", "-")
        return f"the circuit of {self.address} is {state}: it {self.circuit.detail}"

    def receive(self, message: Welcome | Refused | Stale) -> Hello | None:
        """The peer's answer; for Stale the Hello that follows.  A late answer (of an earlier life?) is dropped."""
        if message.to != self._epoch:
            return None
        if isinstance(message, Stale):
            self.heard_at = self._clock()
            return self.refresh()  # not yet heard for the circuit: who does not know us may be anybody's late answer
        if not self._settled_number < message.number <= self.sent:
            return None
        self._settled_number = message.number
        self.heard_at = self._clock()
        self.circuit.heard(message.epoch)
        if isinstance(message, Refused):
            self._settle(LinkState.REFUSED, message.mismatches)
            return None
        found = self._own_verdict(message)
        if isinstance(found, tuple):
            self._settle(LinkState.REFUSED, found)
        else:
            self.welcome, self.pairing = message, found
            self._settle(LinkState.PAIRED, ())
        return None

    def tick(self) -> Hello | None:
        """Lets time pass; the Hello to send again, if any."""
        now = self._clock()
        if self._resend is None:
            pauses = {LinkState.PAIRED: self._limits.hello_every_s, LinkState.DOWN: self._limits.retry_s}
            pause = pauses.get(self.state)
            return self.refresh() if pause is not None and now >= self.settled_at_or(now) + pause else None
        if self._resend.given_up(now):
            self._settle(LinkState.DOWN, ())
            if self._asked_at >= self._awaited_at:
                self._missed = self._awaited
            self.circuit.failed(self.detail, silent=True)
            return None
        return self._hello() if self._resend.due(now) else None

    def settled_at_or(self, default: float) -> float:
        return default if self.settled_at is None else self.settled_at

    def _own_verdict(self, welcome: Welcome) -> AnyPairing | tuple[Mismatch, ...]:
        if welcome.version != PROTOCOL_VERSION:
            fix = "install the same release of hawk-connector on both sides"
            return (Mismatch("protocol version", str(welcome.version), str(PROTOCOL_VERSION), fix),)
        if welcome.lease_s < 2 * self._limits.renew_s:
            # So that one lost Renew does not end a lease.
            fix = "raise lease_s on the prefill side or lower renew_s on the decode side"
            renew = f"renew_s {self._limits.renew_s:g}, of which a lease must hold two"
            return (Mismatch("lease_s", f"{welcome.lease_s:g}", renew, fix),)
        longest = self._limits.resend_s * RESEND_GROWTH
        if welcome.verdict_keep_s <= longest:
            fix = "raise verdict_keep_s on the prefill side or lower resend_s on the decode side"
            resend = f"resend_s {self._limits.resend_s:g}, so that a Done is repeated after up to {longest:g} s"
            return (Mismatch("verdict_keep_s", f"{welcome.verdict_keep_s:g}", resend, fix),)
        if self._limits.by_process and not welcome.process:
            fix = "use protocol tcp or rdma on the decode side"
            return (Mismatch("process", "no session for its own machine", "reads with protocol local", fix),)
        verdict = pair(welcome.facts, self._facts)
        if isinstance(verdict, DirectPairing) and len(welcome.cache) != verdict.layout.layers:
            layers, fix = f"{verdict.layout.layers} layers", "install the same release of hawk-connector on both sides"
            return (Mismatch("kv cache", f"addresses of {len(welcome.cache)} layers", layers, fix),)
        return verdict

    def _settle(self, state: LinkState, mismatches: tuple[Mismatch, ...]) -> None:
        self.state = state
        self.mismatches = mismatches
        self.settled_at = self._clock()
        self._resend = None

    def _hello(self) -> Hello:
        self.sent += 1
        return Hello(
            epoch=self._epoch,
            version=PROTOCOL_VERSION,
            facts=self._facts,
            number=self.sent,
            digests=self._limits.digests,
        )


def unfed_heads(pairings: Sequence[AnyPairing]) -> list[tuple[int, int]]:
    """(chip, head) pairs of the decode side that not exactly one of a transfer's ranks sends.

    Which ranks a transfer has is what a client said, so that together they fill the cache is not to be taken for
    granted.
    """
    chips, heads = pairings[0].chips, pairings[0].heads
    fed = Counter((share.chip, head) for p in pairings for share in p.shares for _, head in share.heads)
    return [(c, h) for c in range(chips) for h in range(heads) if fed[c, h] != 1]
