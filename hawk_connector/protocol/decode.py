"""The decode worker's state machine: loads, reads, fences.  No I/O, no threads, no wall clock.

Inputs: ``load`` and ``abort`` (what vLLM wants), ``receive`` (what prefill ranks said), ``read_ended`` and ``fenced``
(what the engines did), ``tick``.  Outputs are actions, taken with ``take_actions``.

Theory of operation.  A load pulls from each rank that sends it heads.  Each parcel goes AWAITED -> OFFERED ->
READING -> READ -> ACCEPTED; bytes are believed only on Accepted.  A load that cannot succeed any more keeps its
blocks until no late byte can arrive: reads that run are awaited, and if one of them *failed*, the engine that carried
it is fenced first (``failed`` does not mean ``stopped``).  Only then is the failure reported, once, and the prefill
side told.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from ..plan.block_plan import BlockPlan
from ..plan.pairing import DecodeFacts
from ..series import Failure
from .decode_actions import (
    DecodeAction,
    DecodeLimits,
    Disconnect,
    Fence,
    PeerOutcome,
    Read,
    Report,
    SendTo,
    StopRead,
)
from .farewells import Farewells
from .lease import Clock, Resend
from .link import LinkState, PeerLink, unfed_heads
from .link_book import LinkBook
from .load import Fetch, FetchState, Load, RankFetches, about
from .messages import (
    Accepted,
    Claimed,
    DecodeMessage,
    Done,
    Gone,
    Pull,
    Ready,
    Refused,
    Renew,
    Renewed,
    Stale,
    Welcome,
)
from .read_book import ReadBook, RunningRead
from .ticket import Ticket

__all__ = ["DecodeProtocol"]

_MAX_OUTCOMES = 1024


class DecodeProtocol:
    """One decode worker, life ``epoch``."""

    def __init__(self, epoch: str, facts: DecodeFacts, limits: DecodeLimits, clock: Clock) -> None:
        self.epoch = epoch
        self._book = LinkBook(epoch, facts, limits.link, clock, self._needed, self._disconnect)
        self._limits = limits
        self._clock = clock
        self._loads: dict[str, Load] = {}
        self._reads = ReadBook(limits.reads)
        self._farewells = Farewells(epoch, limits.link.resend_s, limits.admission_deadline_s, clock)
        self._actions: list[DecodeAction] = []
        # Bounded for a device process that has no scheduler to tell.
        self._outcomes: deque[PeerOutcome] = deque(maxlen=_MAX_OUTCOMES)

    # --- outputs

    @property
    def links(self) -> Mapping[str, PeerLink]:
        """The links by address."""
        return self._book.links

    @property
    def live(self) -> Mapping[str, Load]:
        """Loads that have not ended, by request, the oldest first.  Not to be changed."""
        return self._loads

    def take_actions(self) -> list[DecodeAction]:
        actions, self._actions = self._actions, []
        return actions

    def take_outcomes(self) -> list[PeerOutcome]:
        """How the ranks did their parts of loads since the last call, for the scheduler's circuits."""
        outcomes = list(self._outcomes)
        self._outcomes.clear()
        return outcomes

    def held(self) -> dict[str, int]:
        """Everything held, by name; all zero when idle."""
        return {
            "loads": len(self._loads),
            "blocks": sum(len(load.block_ids) for load in self._loads.values()),
            "reads": self._reads.reads,
            "quarantined_blocks": sum(len(ld.block_ids) for ld in self._loads.values() if ld.failure is not None),
            "fences": self._reads.fences,
            "farewells": len(self._farewells),
        }

    # --- inputs from vLLM

    def connect(self, address: str) -> None:
        """Pairs with a prefill rank ahead of any request, and keeps the link whatever becomes of it."""
        self._book.keep(address)
        self._say(address, self._book.use(address).refresh())

    def load(
        self, request: str, ticket: Ticket, first_block: int, block_ids: tuple[int, ...], left_out: int = 0
    ) -> None:
        """Load a claimed transfer's blocks ``first_block`` and up into ``block_ids``, its last ``left_out`` not."""
        now = self._clock()
        load = Load(
            request,
            ticket,
            first_block,
            block_ids,
            begun_at=now,
            deadline=now + self._limits.load_deadline_s,
            renew_at=now + self._limits.link.renew_s,
            ranks=[RankFetches(rank) for rank in ticket.ranks],
            left_out=left_out,
        )
        self._loads[request] = load
        for rank in load.ranks:
            shut = self._book.use(rank.rank.address).admit(request, rank.rank.epoch)
            if shut is not None:
                self._fail(load, "circuit", shut)
                return
        self._pursue(load)

    def refuse(self, request: str, block_ids: tuple[int, ...], failure: Failure, reason: str) -> None:
        """A load that failed before it began: reported at once, nothing was ever read."""
        self._actions.append(Report(request, False, False, reason, block_ids, 0, failure))

    def abort(self, request: str) -> None:
        """vLLM dropped the request; it is reported as soon as its blocks are safe."""
        load = self._loads.get(request)
        if load is not None:
            load.aborted = True
            self._fail(load, "aborted", "aborted")

    # --- inputs from engines

    def read_ended(
        self, read: int, ok: bool, reason: str = "", *, failure: Failure = "read", stopped: bool = False
    ) -> None:
        """A read has returned.  ``ok``: its bytes are in local memory (and landed); otherwise ``failure`` says why.

        ``stopped``: it never began, or ended between two batches as it was told: no byte of it can still arrive.
        """
        running = self._reads.end(read)
        address = running.address
        load = self._loads[running.request]
        rank = next(r for r in load.ranks if r.rank.address == address)
        fetch = (rank.fetches or [])[running.parcel]
        fetch.state = FetchState.READ
        if not ok and stopped:
            self._fail(load, failure, f"reading from {address}: {reason}")
        elif not ok:
            fetch.read_failed = True
            self._reads.want_fence(address)
            self._fail(load, failure, f"reading from {address}: {reason}", by=[rank])
        elif load.failure is None:
            now = self._clock()
            fetch.done = Resend.start(now, self._limits.link.resend_s, load.deadline)
            self._say_done(load, rank, fetch)
        self._fence_when_quiet(address)
        self._settle(load)
        self._start_reads()

    def fenced(self, address: str) -> None:
        """The engine that read from ``address`` is gone, and with it every byte that could still arrive."""
        self._reads.fenced(address)
        for load in list(self._loads.values()):
            for rank in load.ranks:
                if rank.rank.address == address:
                    for fetch in rank.fetches or ():
                        fetch.read_failed = False
            self._settle(load)
        self._start_reads()

    # --- inputs from peers

    def receive(
        self, address: str, message: Welcome | Refused | Stale | Claimed | Ready | Renewed | Accepted | Gone
    ) -> None:
        link = self.links.get(address)
        if link is None or message.to != self.epoch:
            return
        if isinstance(message, (Welcome, Refused, Stale)):
            self._say(address, link.receive(message))
            self._watch_epoch(link)
            for load in list(self._loads.values()):
                self._pursue(load)
            return
        link.heard_at = self._clock()
        if isinstance(message, Gone):
            self._farewells.heard(address, message)
        for load in list(self._loads.values()):
            for rank in load.ranks:
                if about(load.ticket, rank.rank, address, message):
                    self._heard(load, rank, message)
                    self._start_reads()
                    return

    def tick(self) -> None:
        """Lets time pass: repeats, renewals, deadlines."""
        now = self._clock()
        for address, hello in self._book.tick():
            self._say(address, hello)
        self._watch_unused()
        for load in list(self._loads.values()):
            if load.failure is None and now >= load.deadline:
                late = [rank for rank in load.ranks if not rank.complete]
                self._fail(load, "deadline", f"not complete within {self._limits.load_deadline_s:g} s", by=late)
            self._pursue(load)
        for address, abort in self._farewells.tick():
            self._say(address, abort)
        self._start_reads()

    # --- the life of a load

    def _pursue(self, load: Load) -> None:
        """Sends what can be sent for a load that may still succeed."""
        now = self._clock()
        for rank in load.ranks:
            if load.failure is not None:
                return
            if rank.complete:
                continue
            address = rank.rank.address
            link = self._book.use(address)
            if link.remote_epoch != rank.rank.epoch or link.state is not LinkState.PAIRED:
                if link.settled_since(load.begun_at):
                    state = "another life" if link.state is LinkState.PAIRED else link.state.value
                    self._fail(load, _failure_of(link), f"{address} is {state}: {link.detail}")
                else:
                    self._say(address, link.refresh())
                continue
            rank.pairing = link.pairing
            if link.pairing is not None and not link.pairing.shares:
                rank.needless = True
                continue
            if now >= load.renew_at and rank.pull is not None:  # there is nothing to renew before the first Pull
                self._say(address, Renew(**self._fields(load, rank)))
            waits = rank.wants_offers
            if waits and rank.pull is None:
                rank.pull = Resend.start(now, self._limits.link.resend_s, load.deadline)
                self._say_pull(load, rank)
            elif waits and rank.pull is not None and rank.pull.due(now):
                self._say_pull(load, rank)
            for fetch in rank.fetches or ():
                if fetch.state is FetchState.READ and fetch.done is not None and fetch.done.due(now):
                    self._say_done(load, rank, fetch)
            if now >= link.heard_at + self._limits.link.hello_deadline_s and not rank.reading:
                self._say(address, link.refresh())
        if now >= load.renew_at:
            load.renew_at = now + self._limits.link.renew_s
        self._settle(load)

    def _heard(self, load: Load, rank: RankFetches, message: Claimed | Ready | Renewed | Accepted | Gone) -> None:
        if load.failure is not None:
            return
        if isinstance(message, Gone):
            if message.reason == "released" and rank.all_read:
                return  # all of it has been accepted, so an answer to a Done is still under way or will be repeated
            self._fail(load, message.reason, f"{rank.rank.address} gave the transfer up: {message.reason}")
        elif isinstance(message, Claimed):
            self._cut(load, rank, message)
        elif isinstance(message, Ready):
            self._offered(load, rank, message)
        elif isinstance(message, Accepted):
            fetch = _fetch(rank, message.parcel)
            if fetch is not None and fetch.state is FetchState.READ and fetch.generation == message.generation:
                fetch.state, fetch.done = FetchState.ACCEPTED, None
                self._settle(load)

    def _cut(self, load: Load, rank: RankFetches, claimed: Claimed) -> None:
        """The rank has said how it cuts the transfer; checked against what decode allocated."""
        if claimed.ended_ago_s is not None:
            load.prefilled_at = self._clock() - claimed.ended_ago_s
        if rank.fetches is not None:
            return
        wanted = load.first_block + len(load.block_ids) + load.left_out
        if claimed.blocks != wanted:
            reason = f"{rank.rank.address} cuts the transfer into {claimed.blocks} blocks, not {wanted}"
            self._fail(load, "offer", reason, by=[rank])
            return
        rank.fetches = []
        for index, first in enumerate(range(0, claimed.blocks, claimed.parcel_blocks)):
            count = min(claimed.parcel_blocks, claimed.blocks - first)
            fetch = Fetch(index, first, count)
            if first + count <= load.first_block:
                fetch.state = FetchState.SKIPPED
            rank.fetches.append(fetch)

    def _offered(self, load: Load, rank: RankFetches, ready: Ready) -> None:
        fetch = _fetch(rank, ready.parcel)
        link = self.links[rank.rank.address]
        if fetch is None or link.pairing is None or fetch.state is not FetchState.AWAITED:
            return
        plan = link.pairing.parcel(fetch.first_block, fetch.blocks, load.ticket.tokens)
        if ready.nbytes != plan.nbytes:
            reason = f"{rank.rank.address} offers {ready.nbytes} bytes for a parcel of {plan.nbytes}"
            self._fail(load, "offer", reason, by=[rank])
            return
        if isinstance(plan, BlockPlan):
            try:
                plan = plan.at(link.welcome.cache if link.welcome is not None else (), ready.blocks)
            except ValueError as error:
                self._fail(load, "offer", f"{rank.rank.address} offers a parcel in place: {error}", by=[rank])
                return
        if self._limits.link.digests and not ready.digest:
            reason = f"{rank.rank.address} offers a parcel without the digest that parcel_digest asks for"
            self._fail(load, "offer", f"{reason}; install the same release of hawk-connector on both sides", by=[rank])
            return
        fetch.state, fetch.generation, fetch.address = FetchState.OFFERED, ready.generation, ready.address
        fetch.digest, fetch.plan = ready.digest, plan

    def _start_reads(self) -> None:
        """Starts offered parcels, oldest load first, up to each peer's limit, not through an engine to be fenced."""
        for load in self._loads.values():
            for rank in load.ranks:
                address = rank.rank.address
                link = self.links.get(address)
                if load.failure is not None or link is None:
                    continue
                if link.welcome is None or link.pairing is None or link.remote_epoch != rank.rank.epoch:
                    continue
                for fetch in rank.fetches or ():
                    if not self._reads.may_start(address):
                        break
                    if fetch.state is FetchState.OFFERED and fetch.plan is not None:
                        fetch.state = FetchState.READING
                        read = self._reads.start(RunningRead(load.request, address, fetch.index), rank.rank.epoch)
                        skip = max(0, load.first_block - fetch.first_block)
                        first = fetch.first_block + skip - load.first_block
                        ids = (0,) * skip + load.block_ids[first : first + fetch.blocks - skip]
                        # A digest is of all blocks up to the end: one that is read in part cannot be checked.
                        digest = fetch.digest if len(ids) == fetch.blocks else ""
                        self._actions.append(
                            Read(
                                read, load.request, address, link.session, fetch.address, fetch.plan, ids, skip, digest
                            )
                        )

    def _fail(self, load: Load, kind: Failure, reason: str, by: Sequence[RankFetches] = ()) -> None:
        """The load cannot succeed any more; ``by``: the ranks whose failure that is."""
        if load.failure is None:
            load.failure, load.failure_kind = reason, kind
            self._actions.extend(StopRead(number) for number in self._reads.of(load.request))
            for rank in by:
                self._judge(load, rank, False)
        self._settle(load)

    def _judge(self, load: Load, rank: RankFetches, served: bool | None) -> None:
        """How the rank did its part, once a load: for its circuit here, and for the scheduler's."""
        if rank.judged:
            return
        rank.judged = True
        reason = "" if served else load.failure or ""
        self._outcomes.append(PeerOutcome(load.request, rank.rank.address, rank.rank.epoch, served, reason))
        link = self.links.get(rank.rank.address)
        if link is not None and link.remote_epoch == rank.rank.epoch:
            link.circuit.ended(load.request, served, reason)

    def _settle(self, load: Load) -> None:
        """Reports the load where it is over: all accepted, or failed with nothing left that could still write."""
        if load.request not in self._loads:
            return
        if load.failure is None:
            if not load.complete:
                return
            unfed = unfed_heads([rank.pairing for rank in load.ranks if rank.pairing is not None])
            if unfed:
                load.failure = f"its ranks do not send each (chip, head) once: {unfed[:4]}"
                load.failure_kind = "heads"
        elif any(rank.reading or rank.read_failed for rank in load.ranks):
            return
        del self._loads[load.request]
        for rank in load.ranks:
            self._judge(load, rank, True if load.failure is None else None)
        parcels = sum(1 for rank in load.ranks for f in rank.fetches or () if f.state is FetchState.ACCEPTED)
        if load.failure is not None:
            self._part(load)
        ok, reason = load.failure is None, load.failure or ""
        handover = self._clock() - load.prefilled_at if ok and load.prefilled_at is not None else None
        self._actions.append(
            Report(load.request, ok, load.aborted, reason, load.block_ids, parcels, load.failure_kind, handover)
        )

    # --- fences

    def _watch_epoch(self, link: PeerLink) -> None:
        """A peer that came back as another life: its old engine must not be used again."""
        used = self._reads.epoch(link.address)
        if used is not None and link.remote_epoch is not None and link.remote_epoch != used:
            self._reads.want_fence(link.address)
            self._fence_when_quiet(link.address)

    def _watch_unused(self) -> None:
        """A peer that left for good: its engine holds descriptors, threads and registrations of ours."""
        for address in self._reads.engines():
            if self._book.unused(address):
                self._reads.want_fence(address)
                self._fence_when_quiet(address)

    def _fence_when_quiet(self, address: str) -> None:
        """Asks for the fence once no read of that engine is running."""
        if self._reads.due_fence(address):
            self._actions.append(Fence(address))

    # --- links and messages

    def _needed(self) -> set[str]:
        """The peers that a load or a farewell is with."""
        loading = {rank.rank.address for load in self._loads.values() for rank in load.ranks}
        return loading | self._farewells.addresses()

    def _disconnect(self, address: str) -> None:
        self._actions.append(Disconnect(address))

    def _say(self, address: str, message: DecodeMessage | None) -> None:
        if message is not None:
            self._actions.append(SendTo(address, message))

    def _say_pull(self, load: Load, rank: RankFetches) -> None:
        pull = Pull(
            digest=load.ticket.digest,
            tokens=load.ticket.tokens,
            deliver=True,
            first_block=load.first_block,
            **self._fields(load, rank),
        )
        self._say(rank.rank.address, pull)

    def _say_done(self, load: Load, rank: RankFetches, fetch: Fetch) -> None:
        done = Done(parcel=fetch.index, generation=fetch.generation, **self._fields(load, rank))
        self._say(rank.rank.address, done)

    def _part(self, load: Load) -> None:
        """Tells every rank that nothing more is wanted; repeated until it answers."""
        for rank in load.ranks:
            if not rank.needless:
                self._say(rank.rank.address, self._farewells.say(rank.rank, load.ticket))

    def _fields(self, load: Load, rank: RankFetches) -> dict[str, Any]:
        ticket = load.ticket
        return {
            "epoch": self.epoch,
            "to": rank.rank.epoch,
            "transfer": ticket.transfer,
            "claim": ticket.claim,
        }


def _failure_of(link: PeerLink) -> Failure:
    if link.state is LinkState.PAIRED:
        return "restarted"
    return "refused" if link.state is LinkState.REFUSED else "no_answer"


def _fetch(rank: RankFetches, parcel: int) -> Fetch | None:
    return rank.fetches[parcel] if rank.fetches is not None and parcel < len(rank.fetches) else None
