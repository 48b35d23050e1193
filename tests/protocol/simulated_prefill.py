"""A prefill instance: vLLM's scheduler, blocks and prefix cache in small, and a PrefillProtocol on each rank."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hawk_connector.errors import ProtocolError
from hawk_connector.protocol.messages import (
    PROTOCOL_VERSION,
    Abort,
    Done,
    ForeignHello,
    Hello,
    Message,
    Pull,
    Ready,
    Renew,
    decode_message,
    encode,
    foreign_hello,
)
from hawk_connector.protocol.prefill import PrefillProtocol
from hawk_connector.protocol.prefill_actions import Ended, Hash, Pack, PrefillLimits, ReleaseBlocks, Send, Settle
from hawk_connector.protocol.ticket import HAWK_KEY
from tests.protocol.simulated_blocks import BlockPool
from tests.protocol.simulated_network import Network, Server
from tests.protocol.simulated_process import Process
from tests.protocol.simulation_prefill_rules import PrefillWatch
from tests.protocol.world import (
    BLOCK,
    BUFFER_ADDRESS,
    CACHE_ADDRESS,
    Session,
    Text,
    World,
    digest_of,
    kv_bytes,
    prefill_facts,
)

_FROM_DECODE = (Hello, Pull, Renew, Done, Abort)
_TICK_S = 0.5


@dataclass(eq=False)
class Prompt:
    """One request on the prefill side.  ``run`` rises whenever vLLM takes its blocks away."""

    transfer: str
    text: Text
    table: list[int] = field(default_factory=list)
    run: int = 0
    hits: int = 0  # blocks from the prefix cache
    computed: int = 0
    ended_at: float | None = None  # finished or abandoned; the blocks are kept for HAWK
    lost: bool = False  # with the process that computed it
    early: bool = False  # its parameters are given away as soon as it begins
    unreleased: set[int] = field(default_factory=set)


@dataclass(eq=False)
class Rank:
    index: int
    address: str
    protocol: PrefillProtocol
    watch: PrefillWatch
    buffer: bytearray
    memory: list[str]  # what is in each of vLLM's blocks on this rank
    tables: dict[str, tuple[int, ...]] = field(default_factory=dict)  # blocks of each transfer, as last heard of
    lag: float = 0.0  # how far it may be behind the scheduler; each rank is a process of its own
    caught_up_at: float = 0.0
    steps: deque[Callable[[Rank], object]] = field(default_factory=deque)
    server: Server | None = None
    packs: deque[Pack] = field(default_factory=deque)
    packing: Pack | None = None

    def block(self, block: int, nbytes: int) -> bytes:
        """What is in one of vLLM's blocks now."""
        return kv_bytes(f"{self.memory[block]}/{self.index}", nbytes)

    def offered(self, ready: Ready) -> bytes:
        """What a peer would read now."""
        if ready.blocks:
            each = ready.nbytes // len(ready.blocks)
            return b"".join(self.block(block, each) for block in ready.blocks)
        start = ready.address - BUFFER_ADDRESS
        return bytes(self.buffer[start : start + ready.nbytes])


@dataclass(frozen=True)
class PrefillFaults:
    """Chances: of a pack to fail; of a step to preempt a prompt."""

    pack: float = 0.0
    preempt: float = 0.0


class SimulatedPrefill(Process):
    """``ranks`` side channels at ``prefill-<index>:<1 + rank>``; dies and comes back as another epoch."""

    def __init__(
        self,
        world: World,
        network: Network,
        index: int,
        *,
        heads: int,
        ranks: int,
        buffer_bytes: int,
        blocks: int,
        limits: PrefillLimits,
        faults: PrefillFaults,
        skew: float = 0.0,
    ) -> None:
        super().__init__(world, f"prefill-{index}", skew)
        self.network = network
        self.heads, self.ranks_count, self.buffer_bytes = heads, ranks, buffer_bytes
        self.blocks, self.limits, self.faults = blocks, limits, faults
        self.addresses = [f"{self.name}:{1 + r}" for r in range(ranks)]
        self.ranks: list[Rank] = []
        self.prompts: dict[str, Prompt] = {}

    # --- the process

    def start(self) -> None:
        world = self.world
        self.born()
        self.writes = 0
        self.pool = BlockPool(self.blocks, world.rng, self._wiped)
        self.prompts = {}
        self.ranks = []
        for r, address in enumerate(self.addresses):
            facts = prefill_facts(heads=self.heads, ranks=self.ranks_count, rank=r, buffer_bytes=self.buffer_bytes)
            session = f"engine/{address}"  # the same in every life: an address must not be enough
            epoch = world.id()
            protocol = PrefillProtocol(facts, self.limits, epoch, session, BUFFER_ADDRESS, self.clock)
            buffer = bytearray(self.buffer_bytes)
            protocol.expose((CACHE_ADDRESS,))
            watch = PrefillWatch(self, epoch, self.limits, address)
            rank = Rank(r, address, protocol, watch, buffer, ["never written"] * self.blocks)
            world.sessions[session] = Session(buffer, self, rank.block)
            rank.lag = world.rng.choice([0.0, 0.3]) if r else 0.0
            self.ranks.append(rank)
        for rank in self.ranks:
            # All ranks are there before a message that waited for one of them is answered.
            rank.server = self.network.serve(rank.address, self._deliver(rank))
        self._tick()

    def stop(self) -> None:
        self.die()
        for prompt in self.prompts.values():
            prompt.lost = True
        for rank in self.ranks:
            if rank.server is not None:
                self.network.close(rank.server)
            del self.world.sessions[rank.protocol.session]

    def _wiped(self, block: int) -> None:
        """vLLM writes to the block for somebody else: who, and the how manieth write it was, is in its bytes."""
        self._write(block, f"{self.name} life {self.life} write")

    def _write(self, block: int, content: str) -> None:
        """A step writes to the block; where the content is nobody's, the number of the write makes it like no other."""
        self.writes += 1
        text = f"{content} {self.writes}" if content.endswith("write") else content
        self._on_ranks(lambda rank: rank.memory.__setitem__(block, text))

    def _on_ranks(self, step: Callable[[Rank], object]) -> None:
        """Every rank does the scheduler's steps in order, some later than others."""
        world = self.world
        for rank in self.ranks:
            if rank.lag == 0.0:
                step(rank)
                continue
            rank.caught_up_at = max(rank.caught_up_at, world.now + world.between(0, rank.lag))
            rank.steps.append(step)  # the oldest first, whatever rounding does to times
            self.after(rank.caught_up_at - world.now, lambda r=rank: r.steps.popleft()(r))

    def _tick(self) -> None:
        for rank in self.ranks:
            rank.protocol.tick()
            self._dispatch(rank)
            held = [p.transfer for p in self.prompts.values() if rank.index in p.unreleased]
            rank.watch.rule_3_everything_held_has_a_deadline(held)
            rank.watch.rule_10_what_peers_send_is_bounded(rank.protocol.held(), len(rank.protocol.peers()))
        self.after(_TICK_S, self._tick)

    def _deliver(self, rank: Rank) -> Callable[[str, bytes], None]:
        return lambda identity, payload: self.soon(lambda: self._receive(rank, identity, payload))

    def _receive(self, rank: Rank, identity: str, payload: bytes) -> None:
        """As the worker does it: what is no message of a decode side costs that message only."""
        try:
            message: Message | ForeignHello = decode_message(payload, _FROM_DECODE)
        except ProtocolError:
            foreign = foreign_hello(payload)
            if foreign is None:
                self.world.covered["malformed message", ""] += 1
                return
            message = foreign
        typed = isinstance(message, (Hello, ForeignHello, Pull, Renew, Done, Abort))
        self.world.require(10, typed and len(payload) <= 1 << 20, lambda: f"{self.name}: took {message}")
        self.world.say(rank.address, "hears", message)
        rank.watch.heard(message)
        rank.protocol.receive(identity, message)  # type: ignore[arg-type]
        if isinstance(message, Pull):
            transfer = rank.protocol._transfers.get(message.transfer)
            if transfer is not None and message.deliver:
                rank.watch.skipped(transfer.id, transfer.parcel_blocks, message.first_block)
        self._dispatch(rank)
        rank.watch.answered()

    # --- vLLM

    def submit(self, prompt: Prompt, done: Callable[[dict[str, Any]], None], abandon: bool) -> None:
        """Computes a prompt when there are blocks for it; ``done(params)`` is called when it has finished."""
        text = prompt.text
        hits = self.pool.hits(text.cachable) if self.up and not self.paused else []
        table = self.pool.take(hits, text.blocks - len(hits)) if self.up and not self.paused else None
        if table is None:
            self.world.after(0.5, lambda: self.submit(prompt, done, abandon))
            return
        prompt.table, prompt.hits, prompt.computed = table, len(hits), len(hits) * BLOCK
        first = prompt.transfer not in self.prompts
        self.prompts[prompt.transfer] = prompt
        if first:

            def begin(rank: Rank) -> None:
                rank.watch.begun(prompt.transfer, text)
                rank.protocol.begin(prompt.transfer, text.digest, text.tokens)
                self._dispatch(rank)

            self._on_ranks(begin)
            if prompt.early:
                self.world.covered["parameters before the end", ""] += 1
                done(self._params(prompt))
        run = prompt.run
        self.after(self._step_s(prompt), lambda: self._compute(prompt, run, done, abandon))

    def _compute(self, prompt: Prompt, run: int, done: Callable[[dict[str, Any]], None], abandon: bool) -> None:
        world, text = self.world, prompt.text
        if run != prompt.run or prompt.ended_at is not None:
            return
        if world.chance(self.faults.preempt):
            self.note("preempted on prefill", prompt)

            def preempt(rank: Rank) -> None:
                rank.watch.preempted(prompt.transfer)
                rank.protocol.preempted(prompt.transfer)
                self._dispatch(rank)

            self._on_ranks(preempt)
            prompt.run += 1
            self.pool.give(prompt.table)
            self.after(world.between(0, 0.5), lambda: self.submit(prompt, done, abandon))
            return
        if abandon and world.chance(0.3):
            self.note("aborted on prefill", prompt)
            self._end(prompt, finished=False)
            return
        prompt.computed = min(text.tokens, prompt.computed + world.rng.randint(1, 3 * BLOCK))
        for i, block in enumerate(prompt.table):
            inside = min(BLOCK, prompt.computed - i * BLOCK)
            if inside > 0 and i >= prompt.hits:
                self._write(block, f"{text.keys[i]}/{inside}")
                if inside == BLOCK:
                    self.pool.cache(block, text.keys[i])
        computed, table = prompt.computed, tuple(prompt.table)

        def progress(rank: Rank) -> None:
            rank.tables[prompt.transfer] = table
            rank.protocol.computed(prompt.transfer, computed, table)
            self._dispatch(rank)

        self._on_ranks(progress)
        if prompt.computed < text.tokens or abandon:
            self.after(self._step_s(prompt), lambda: self._compute(prompt, run, done, abandon))
            return
        self._end(prompt, finished=True)
        if not prompt.early:
            done(self._params(prompt))

    def _step_s(self, prompt: Prompt) -> float:
        """Until the next step; long enough for who has its parameters already to read while it is computed."""
        return self.world.between(0, 1.0 if prompt.early else 0.2)

    def _params(self, prompt: Prompt) -> dict[str, Any]:
        ranks = [{"address": r.address, "epoch": r.protocol.epoch} for r in self.ranks]
        entry = {
            "v": PROTOCOL_VERSION,
            "transfer": prompt.transfer,
            "tokens": prompt.text.tokens,
            "ranks": ranks,
            "first_token": None,
        }
        return {"do_remote_prefill": True, HAWK_KEY: entry}

    def drain(self, drained: Callable[[], None]) -> None:
        """No new transfer is offered; ``drained`` is called when nothing is owed any more."""

        def drain(rank: Rank) -> None:
            rank.watch.draining = True
            rank.protocol.drain()

        self._on_ranks(drain)
        self._when_drained(drained)

    def _when_drained(self, drained: Callable[[], None]) -> None:
        if any(any(rank.protocol.held().values()) for rank in self.ranks):
            self.after(0.5, lambda: self._when_drained(drained))
        else:
            drained()

    def reset(self) -> None:
        """vLLM's prefix cache is reset, as for new weights."""
        if not self.up or self.paused:
            return
        self.pool.reset()

        def reset(rank: Rank) -> None:
            rank.watch.reset()
            rank.protocol.reset()
            self._dispatch(rank)

        self._on_ranks(reset)

    def _end(self, prompt: Prompt, *, finished: bool) -> None:
        prompt.ended_at = self.clock()
        prompt.unreleased = {rank.index for rank in self.ranks}

        def end(rank: Rank) -> None:
            tell = rank.protocol.finished if finished else rank.protocol.abandoned
            if not tell(prompt.transfer):
                self._released(rank, prompt.transfer)  # it was never taken, or has ended
            elif finished:
                rank.watch.finished(prompt.transfer)
            self._dispatch(rank)

        self._on_ranks(end)

    def _tell(self, say: Callable[[PrefillProtocol], object]) -> None:
        def step(rank: Rank) -> None:
            say(rank.protocol)
            self._dispatch(rank)

        self._on_ranks(step)

    def _released(self, rank: Rank, transfer: str) -> None:
        prompt, require = self.prompts[transfer], self.world.require
        require(1, prompt.ended_at is not None, lambda: f"blocks of {transfer} given back before the request has ended")
        require(1, rank.index in prompt.unreleased, lambda: f"blocks of {transfer} given back twice")
        rank.watch.rule_1_blocks_are_given_back_when_no_pack_reads_them(transfer)
        prompt.unreleased.discard(rank.index)
        if not prompt.unreleased:
            self.pool.give(prompt.table)

    # --- the packer: one pack at a time, in order

    def _dispatch(self, rank: Rank) -> None:
        for action in rank.protocol.take_actions():
            if isinstance(action, Send):
                self.world.say(rank.address, "says ", action.message)
                rank.watch.said(action.message, rank.offered, lambda t, i, n, r=rank: self._expected(r, t, i, n))
                if rank.server is not None:
                    self.network.reply(rank.server, action.identity, encode(action.message))
            elif isinstance(action, Pack):
                rank.watch.packing(action, self.buffer_bytes)
                rank.packs.append(action)
            elif isinstance(action, Settle):
                rank.watch.settling(action)
                self.after(self.world.between(0, 0.2), lambda a=action: self._settled(rank, a))
            elif isinstance(action, Hash):
                self.after(self.world.between(0, 0.2), lambda a=action: self._hash(rank, a))
            elif isinstance(action, ReleaseBlocks):
                self._released(rank, action.transfer)
            elif isinstance(action, Ended):
                rank.watch.ended(action.transfer)
        if rank.packing is None and rank.packs:
            self._pack(rank, rank.packs.popleft())

    def _pack(self, rank: Rank, job: Pack) -> None:
        rank.packing = job
        table = rank.tables[job.transfer]
        half = job.plan.blocks // 2
        self._copy(rank, job, table, range(half))

        def end() -> None:
            self._copy(rank, job, table, range(half, job.plan.blocks))
            rank.packing = None
            ok = not self.world.chance(self.faults.pack)
            if not ok:
                self.note("pack fails", self.prompts[job.transfer])
            rank.watch.packed(job.job)
            rank.protocol.packed(job.job, ok)
            self._dispatch(rank)

        self.after(self.world.between(0, 0.3), end)

    def _settled(self, rank: Rank, job: Settle) -> None:
        rank.watch.packed(job.job)
        rank.protocol.packed(job.job, True)
        self._dispatch(rank)

    def _hash(self, rank: Rank, job: Hash) -> None:
        each = job.plan.nbytes // job.plan.blocks
        wanted = rank.buffer[job.region + job.skip_blocks * each : job.region + job.plan.nbytes]
        rank.protocol.hashed(job.job, None if self.world.chance(self.faults.pack / 4) else digest_of(bytes(wanted)))
        self._dispatch(rank)

    def _copy(self, rank: Rank, job: Pack, table: tuple[int, ...], blocks: range) -> None:
        each = job.plan.nbytes // job.plan.blocks
        for j in blocks:
            content = rank.memory[table[job.first_block + j]]
            start = job.region + j * each
            rank.buffer[start : start + each] = kv_bytes(f"{content}/{rank.index}", each)

    def _expected(self, rank: Rank, text: Text, parcel: int, nbytes: int) -> bytes | None:
        """The parcel's bytes as the prompt's tokens make them."""
        transfer = next(t for t, known in rank.watch.texts.items() if known is text)
        cut = rank.protocol._transfers[transfer].parcel_blocks
        blocks = range(parcel * cut, min((parcel + 1) * cut, text.blocks))
        each = nbytes // len(blocks)
        return b"".join(kv_bytes(f"{text.content(i)}/{rank.index}", each) for i in blocks)

    # --- what a fault hits

    def note(self, fault: str, prompt: Prompt) -> None:
        self.world.covered[fault, self.phase(prompt)] += 1
        self.world.say(self.name, f"{fault}: {prompt.transfer} ({self.phase(prompt)})")

    def phase(self, prompt: Prompt) -> str:
        ranks = self.ranks
        if any(r.packing is not None and r.packing.transfer == prompt.transfer for r in ranks):
            return "packing"
        if any(pack.transfer == prompt.transfer for r in ranks for pack in r.packs):
            return "queued to be packed"
        if prompt.ended_at is None:
            return "computing"
        if prompt.unreleased:
            return "queued for buffer"
        if all(prompt.transfer in r.watch.ended_at for r in ranks):
            return "ended"
        return "claimed" if any(prompt.transfer in r.watch.claims for r in ranks) else "offered"

    def live(self) -> list[str]:
        """The phases of all transfers that have not ended."""
        phases = [self.phase(prompt) for prompt in self.prompts.values()]
        return [phase for phase in phases if phase != "ended"]

    # --- the end

    def idle(self) -> bool:
        return (
            all(not any(rank.protocol.held().values()) for rank in self.ranks)
            and not any(p.unreleased or p.ended_at is None for p in self.prompts.values())
            and self.pool.free == self.blocks
        )

    def require_idle(self) -> None:
        require = self.world.require
        for rank in self.ranks:
            held = rank.protocol.held()
            require(5, not any(held.values()), f"{rank.address} still holds {held}")
        kept = [p.transfer for p in self.prompts.values() if p.unreleased]
        require(5, not kept, lambda: f"{self.name}: blocks of {kept} were never given back")
        lost = self.blocks - self.pool.free
        require(5, lost == 0, lambda: f"{self.name}: {lost} blocks are lost")
