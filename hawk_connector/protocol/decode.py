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

from collections import Counter
from collections.abc import Mapping
from typing import Any

from ..plan.pairing import DecodeFacts
from .decode_actions import DecodeAction, DecodeLimits, Disconnect, Fence, Read, Report, SendTo
from .lease import Clock, Resend
from .link import LinkState, PeerLink, unfed_heads
from .link_book import LinkBook
from .load import Farewell, Fetch, FetchState, Load, RankFetches, about
from .messages import (
    Abort,
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
from .ticket import Ticket

__all__ = ["DecodeProtocol"]


class DecodeProtocol:
    """One decode worker, life ``epoch``."""

    def __init__(self, epoch: str, facts: DecodeFacts, limits: DecodeLimits, clock: Clock) -> None:
        self.epoch = epoch
        self._book = LinkBook(epoch, facts, limits.link, clock, self._needed, self._disconnect)
        self._limits = limits
        self._clock = clock
        self._loads: dict[str, Load] = {}
        self._reads: dict[int, tuple[str, str, int]] = {}
        self._next_read = 0
        self._fencing: dict[str, bool] = {}
        self._engine_epochs: dict[str, str] = {}
        self._farewells: list[Farewell] = []
        self._actions: list[DecodeAction] = []

    # --- outputs

    @property
    def links(self) -> Mapping[str, PeerLink]:
        """The links by address."""
        return self._book.links

    def take_actions(self) -> list[DecodeAction]:
        actions, self._actions = self._actions, []
        return actions

    def held(self) -> dict[str, int]:
        """Everything held, by name; all zero when idle."""
        return {
            "loads": len(self._loads),
            "blocks": sum(len(load.block_ids) for load in self._loads.values()),
            "reads": len(self._reads),
            "quarantined_blocks": sum(len(ld.block_ids) for ld in self._loads.values() if ld.failure is not None),
            "fences": len(self._fencing),
            "farewells": len(self._farewells),
        }

    # --- inputs from vLLM

    def connect(self, address: str) -> None:
        """Pairs with a prefill rank ahead of any request, and keeps the link whatever becomes of it."""
        self._book.keep(address)
        self._say(address, self._book.use(address).refresh())

    def load(self, request: str, ticket: Ticket, first_block: int, block_ids: tuple[int, ...]) -> None:
        """Load a claimed transfer's blocks ``first_block`` and up into ``block_ids``."""
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
        )
        self._loads[request] = load
        self._pursue(load)

    def refuse(self, request: str, block_ids: tuple[int, ...], reason: str) -> None:
        """A load that failed before it began: reported at once, nothing was ever read."""
        self._actions.append(Report(request, False, False, reason, block_ids, 0))

    def abort(self, request: str) -> None:
        """vLLM dropped the request; it is reported as soon as its blocks are safe."""
        load = self._loads.get(request)
        if load is not None:
            load.aborted = True
            self._fail(load, "aborted")

    # --- inputs from engines

    def read_ended(self, read: int, ok: bool, reason: str = "") -> None:
        """A read has returned.  ``ok``: its bytes are in local memory (and landed)."""
        request, address, index = self._reads.pop(read)
        load = self._loads[request]
        rank = next(r for r in load.ranks if r.rank.address == address)
        fetch = (rank.fetches or [])[index]
        fetch.state = FetchState.READ
        if not ok:
            fetch.read_failed = True
            self._fencing.setdefault(address, False)
            self._fail(load, f"reading from {address}: {reason}")
        elif load.failure is None:
            now = self._clock()
            fetch.done = Resend.start(now, self._limits.link.resend_s, load.deadline)
            self._say_done(load, rank, fetch)
        self._fence_when_quiet(address)
        self._settle(load)
        self._start_reads()

    def fenced(self, address: str) -> None:
        """The engine that read from ``address`` is gone, and with it every byte that could still arrive."""
        self._fencing.pop(address, None)
        self._engine_epochs.pop(address, None)
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
            self._farewells = [f for f in self._farewells if not about(f.ticket, f.rank, address, message)]
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
                self._fail(load, f"not complete within {self._limits.load_deadline_s:g} s")
            self._pursue(load)
        for farewell in self._farewells:
            if farewell.resend.due(now):
                self._say_abort(farewell)
        self._farewells = [f for f in self._farewells if not f.resend.given_up(now)]
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
                    self._fail(load, f"{address} is {state}: {link.detail}")
                else:
                    self._say(address, link.refresh())
                continue
            rank.pairing = link.pairing
            if link.pairing is not None and not link.pairing.shares:
                rank.needless = True
                continue
            if now >= load.renew_at:
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
            self._fail(load, f"{rank.rank.address} gave the transfer up: {message.reason}")
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
        if rank.fetches is not None:
            return
        wanted = load.first_block + len(load.block_ids)
        if claimed.blocks != wanted:
            self._fail(load, f"{rank.rank.address} cuts the transfer into {claimed.blocks} blocks, not {wanted}")
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
        expected = link.pairing.plan(fetch.blocks).nbytes
        if ready.nbytes != expected:
            self._fail(load, f"{rank.rank.address} offers {ready.nbytes} bytes for a parcel of {expected}")
            return
        fetch.state, fetch.generation, fetch.address = FetchState.OFFERED, ready.generation, ready.address

    def _start_reads(self) -> None:
        """Starts offered parcels, oldest load first, up to each peer's limit, not through an engine to be fenced."""
        running = Counter(address for _, address, _ in self._reads.values())
        for load in self._loads.values():
            for rank in load.ranks:
                address = rank.rank.address
                link = self.links.get(address)
                if load.failure is not None or address in self._fencing or link is None:
                    continue
                if link.welcome is None or link.pairing is None or link.remote_epoch != rank.rank.epoch:
                    continue
                for fetch in rank.fetches or ():
                    if running[address] >= self._limits.reads:
                        break
                    if fetch.state is FetchState.OFFERED:
                        fetch.state = FetchState.READING
                        read, self._next_read = self._next_read, self._next_read + 1
                        self._reads[read] = (load.request, address, fetch.index)
                        running[address] += 1
                        self._engine_epochs[address] = rank.rank.epoch
                        skip = max(0, load.first_block - fetch.first_block)
                        first = fetch.first_block + skip - load.first_block
                        ids = (0,) * skip + load.block_ids[first : first + fetch.blocks - skip]
                        plan = link.pairing.plan(fetch.blocks)
                        session = link.welcome.engine
                        self._actions.append(Read(read, load.request, address, session, fetch.address, plan, ids, skip))

    def _fail(self, load: Load, reason: str) -> None:
        if load.failure is None:
            load.failure = reason
        self._settle(load)

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
        elif any(rank.reading or rank.read_failed for rank in load.ranks):
            return
        del self._loads[load.request]
        parcels = sum(1 for rank in load.ranks for f in rank.fetches or () if f.state is FetchState.ACCEPTED)
        if load.failure is not None:
            self._part(load)
        self._actions.append(
            Report(load.request, load.failure is None, load.aborted, load.failure or "", load.block_ids, parcels)
        )

    # --- fences

    def _watch_epoch(self, link: PeerLink) -> None:
        """A peer that came back as another life: its old engine must not be used again."""
        used = self._engine_epochs.get(link.address)
        if used is not None and link.remote_epoch is not None and link.remote_epoch != used:
            self._fencing.setdefault(link.address, False)
            self._fence_when_quiet(link.address)

    def _watch_unused(self) -> None:
        """A peer that left for good: its engine holds descriptors, threads and registrations of ours."""
        for address in list(self._engine_epochs):
            if address not in self._fencing and self._book.unused(address):
                self._fencing[address] = False
                self._fence_when_quiet(address)

    def _fence_when_quiet(self, address: str) -> None:
        """Asks for the fence once no read of that engine is running."""
        if self._fencing.get(address) is False and not any(a == address for _, a, _ in self._reads.values()):
            self._fencing[address] = True
            self._actions.append(Fence(address))

    # --- links and messages

    def _needed(self) -> set[str]:
        """The peers that a load or a farewell is with."""
        loading = {rank.rank.address for load in self._loads.values() for rank in load.ranks}
        return loading | {farewell.rank.address for farewell in self._farewells}

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
        now = self._clock()
        for rank in load.ranks:
            if not rank.needless:
                deadline = now + self._limits.admission_deadline_s
                resend = Resend.start(now, self._limits.link.resend_s, deadline)
                farewell = Farewell(rank.rank, load.ticket, resend)
                self._farewells.append(farewell)
                self._say_abort(farewell)

    def _say_abort(self, farewell: Farewell) -> None:
        rank, ticket = farewell.rank, farewell.ticket
        self._say(
            rank.address,
            Abort(
                epoch=self.epoch,
                to=rank.epoch,
                transfer=ticket.transfer,
                claim=ticket.claim,
                digest=ticket.digest,
            ),
        )

    def _fields(self, load: Load, rank: RankFetches) -> dict[str, Any]:
        ticket = load.ticket
        return {
            "epoch": self.epoch,
            "to": rank.rank.epoch,
            "transfer": ticket.transfer,
            "claim": ticket.claim,
        }


def _fetch(rank: RankFetches, parcel: int) -> Fetch | None:
    return rank.fetches[parcel] if rank.fetches is not None and parcel < len(rank.fetches) else None
