"""A prefill instance: vLLM's scheduler and blocks in small, and a PrefillProtocol on each rank."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from hawk_connector.protocol.messages import (
    Abort,
    Accepted,
    Claimed,
    Done,
    Hello,
    Pull,
    Renew,
    decode_message,
    encode,
)
from hawk_connector.protocol.prefill import PrefillProtocol
from hawk_connector.protocol.prefill_actions import Ended, Pack, PrefillLimits, ReleaseBlocks, Send
from hawk_connector.protocol.ticket import HAWK_KEY, RankAddress
from hawk_connector.protocol.transfer import ParcelState
from tests.protocol.world import BLOCK, BUFFER_ADDRESS, World, kv_bytes, prefill_facts, require


@dataclass
class Prompt:
    """One request on the prefill side.  ``run`` rises whenever vLLM takes its blocks away."""

    transfer: str
    digest: str
    tokens: int
    table: list[int] = field(default_factory=list)
    run: int = 0
    held: bool = False  # finished or abandoned, blocks kept for HAWK
    unreleased: set[int] = field(default_factory=set)

    def content(self, block: int) -> str:
        """What the finished block's KV must be."""
        return f"{self.transfer}/{block}/{min(BLOCK, self.tokens - block * BLOCK)}"


@dataclass
class Rank:
    index: int
    address: str
    protocol: PrefillProtocol
    server: Any
    buffer: bytearray
    packs: deque[Pack] = field(default_factory=deque)
    packing: bool = False
    out: dict[int, Pack] = field(default_factory=dict)
    claims: dict[str, tuple[str, str]] = field(default_factory=dict)
    ended: set[str] = field(default_factory=set)


class SimulatedPrefill:
    """``ranks`` side channels at ``prefill-<index>:<1 + rank>``; dies and comes back as another epoch."""

    def __init__(
        self,
        world: World,
        index: int,
        *,
        heads: int,
        ranks: int,
        buffer_bytes: int,
        blocks: int,
        limits: PrefillLimits,
        pack_failures: float,
        preemptions: float,
    ) -> None:
        self.world = world
        self.index = index
        self.heads, self.ranks_count, self.buffer_bytes = heads, ranks, buffer_bytes
        self.blocks, self.limits = blocks, limits
        self.pack_failures, self.preemptions = pack_failures, preemptions
        self.life = 0
        self.up = False
        self.ranks: list[Rank] = []
        self.prompts: dict[str, Prompt] = {}
        world.ends.append(self)
        self.start()

    # --- the process

    def start(self) -> None:
        world = self.world
        self.life += 1
        self.up = True
        self.memory = [f"junk {self.life}"] * self.blocks
        self.free = list(range(self.blocks))
        self.prompts = {}
        self.ranks = []
        for r in range(self.ranks_count):
            address = f"prefill-{self.index}:{1 + r}"
            facts = prefill_facts(heads=self.heads, ranks=self.ranks_count, rank=r, buffer_bytes=self.buffer_bytes)
            session = f"engine/{address}"  # the same in every life: an address must not be enough
            protocol = PrefillProtocol(facts, self.limits, world.id(), session, BUFFER_ADDRESS, world.clock)
            buffer = bytearray(self.buffer_bytes)
            world.buffers[session] = buffer
            self.ranks.append(Rank(r, address, protocol, world.server(address), buffer))
        self._tick(self.life)

    def stop(self) -> None:
        self.up = False
        for rank in self.ranks:
            rank.server.close()
            del self.world.buffers[rank.protocol.session]

    def _tick(self, life: int) -> None:
        if life != self.life or not self.up:
            return
        for rank in self.ranks:
            rank.protocol.tick()
            self._dispatch(rank)
        self.world.after(0.5, lambda: self._tick(life))

    def receive_all(self) -> None:
        for rank in self.ranks:
            while self.up and (received := rank.server.receive()) is not None:
                message = decode_message(received.payload)
                assert isinstance(message, (Hello, Pull, Renew, Done, Abort))
                rank.protocol.receive(received.peer, message)
                self._dispatch(rank)

    # --- vLLM

    def submit(self, prompt: Prompt, done: Any, abandon: bool) -> None:
        """Computes a prompt when there are blocks for it; ``done(params)`` is called when it has finished."""
        need = -(-prompt.tokens // BLOCK)
        if not self.up or len(self.free) < need:
            self.world.after(0.5, lambda: self.submit(prompt, done, abandon))
            return
        prompt.table = [self.free.pop() for _ in range(need)]
        first = prompt.transfer not in self.prompts
        self.prompts[prompt.transfer] = prompt
        if first:
            self._tell(lambda p: p.begin(prompt.transfer, prompt.digest, prompt.tokens))
        run, life = prompt.run, self.life
        self.world.after(self.world.between(0, 0.2), lambda: self._compute(prompt, run, life, 0, done, abandon))

    def _compute(self, prompt: Prompt, run: int, life: int, computed: int, done: Any, abandon: bool) -> None:
        world = self.world
        if life != self.life or not self.up or run != prompt.run:
            return
        if world.chance(self.preemptions):
            self._tell(lambda p: p.preempted(prompt.transfer))
            prompt.run += 1
            self._free(prompt)
            world.after(world.between(0, 0.5), lambda: life == self.life and self.submit(prompt, done, abandon))
            return
        if abandon and world.chance(0.3):
            self._end(prompt, lambda p: p.abandoned(prompt.transfer))
            return
        computed = min(prompt.tokens, computed + world.rng.randint(1, 3 * BLOCK))
        for i, block in enumerate(prompt.table):
            inside = min(BLOCK, computed - i * BLOCK)
            if inside > 0:
                self.memory[block] = f"{prompt.transfer}/{i}/{inside}"
        self._tell(lambda p: p.computed(prompt.transfer, computed))
        if computed < prompt.tokens or abandon:
            world.after(world.between(0, 0.2), lambda: self._compute(prompt, run, life, computed, done, abandon))
            return
        self._end(prompt, lambda p: p.finished(prompt.transfer))
        ranks = [{"address": r.address, "epoch": r.protocol.epoch} for r in self.ranks]
        entry = {"v": 1, "transfer": prompt.transfer, "tokens": prompt.tokens, "ranks": ranks, "first_token": None}
        done({"do_remote_prefill": True, HAWK_KEY: entry})

    def _end(self, prompt: Prompt, say: Any) -> None:
        prompt.held = True
        prompt.unreleased = {rank.index for rank in self.ranks}
        for rank in self.ranks:
            if not say(rank.protocol):
                self._released(rank, prompt.transfer)
            self._dispatch(rank)

    def _tell(self, say: Any) -> None:
        for rank in self.ranks:
            say(rank.protocol)
            self._dispatch(rank)

    def _released(self, rank: Rank, transfer: str) -> None:
        prompt = self.prompts[transfer]
        require(prompt.held, f"blocks of {transfer} given back before the request has ended")
        require(rank.index in prompt.unreleased, f"blocks of {transfer} given back twice")
        out = [p for p in rank.out.values() if p.transfer == transfer]
        require(not out, f"blocks of {transfer} given back while packs {out} read them")
        prompt.unreleased.discard(rank.index)
        if not prompt.unreleased:
            self._free(prompt)

    def _free(self, prompt: Prompt) -> None:
        """vLLM writes to blocks that it has back at once."""
        for block in prompt.table:
            self.memory[block] = f"junk {self.world.rng.random()}"
        self.free += prompt.table
        self.world.rng.shuffle(self.free)

    # --- the packer: one pack at a time, in order

    def _dispatch(self, rank: Rank) -> None:
        for action in rank.protocol.take_actions():
            if isinstance(action, Send):
                self._watch(rank, action)
                rank.server.send(action.identity, encode(action.message))
            elif isinstance(action, Pack):
                self._watch_region(rank, action)
                rank.out[action.job] = action
                rank.packs.append(action)
            elif isinstance(action, ReleaseBlocks):
                self._released(rank, action.transfer)
            else:
                assert isinstance(action, Ended)
                require(action.transfer not in rank.ended, f"{action.transfer} ended twice")
                rank.ended.add(action.transfer)
        self._pack_next(rank)

    def _pack_next(self, rank: Rank) -> None:
        if rank.packing or not rank.packs:
            return
        rank.packing = True
        job, life = rank.packs.popleft(), self.life
        table = list(self.prompts[job.transfer].table)
        half = job.plan.blocks // 2
        self._copy(rank, job, table, range(half))
        duration = self.world.between(0, 0.3)

        def end() -> None:
            if life != self.life or not self.up:
                return
            self._copy(rank, job, table, range(half, job.plan.blocks))
            rank.packing = False
            del rank.out[job.job]
            rank.protocol.packed(job.job, not self.world.chance(self.pack_failures))
            self._dispatch(rank)

        self.world.after(duration, end)

    def _copy(self, rank: Rank, job: Pack, table: list[int], blocks: range) -> None:
        each = job.plan.nbytes // job.plan.blocks
        for j in blocks:
            content = self.memory[table[job.first_block + j]]
            start = job.region + j * each
            rank.buffer[start : start + each] = kv_bytes(f"{content}/{rank.index}", each)

    # --- invariants

    def _watch(self, rank: Rank, action: Send) -> None:
        message = action.message
        if isinstance(message, (Claimed, Accepted)):
            claim = (message.to, message.claim)
            first = rank.claims.setdefault(message.transfer, claim)
            require(first == claim, f"{message.transfer} is claimed by {first} and by {claim}")

    def _watch_region(self, rank: Rank, job: Pack) -> None:
        size = job.plan.nbytes
        require(job.region >= 0 and job.region + size <= self.buffer_bytes, f"{job} lies outside the send buffer")
        taken = [(p.region, p.plan.nbytes) for p in rank.out.values()]
        for transfer in rank.protocol._transfers.values():
            offered = [p for p in transfer.parcels if p.state is ParcelState.OFFERED]
            taken += [(p.region, p.nbytes) for p in offered if p.region is not None]
        for start, length in taken:
            apart = job.region + size <= start or start + length <= job.region
            require(apart, f"region {job.region} of {job.transfer} is held by another parcel")

    def addresses(self) -> list[RankAddress]:
        return [RankAddress(rank.address, rank.protocol.epoch) for rank in self.ranks]

    def require_idle(self) -> None:
        for rank in self.ranks:
            require(not any(rank.protocol.held().values()), f"{rank.address} still holds {rank.protocol.held()}")
        held = [p.transfer for p in self.prompts.values() if p.unreleased]
        require(not held, f"prefill-{self.index}: blocks of {held} were never given back")
        require(len(self.free) == self.blocks, f"prefill-{self.index}: {self.blocks - len(self.free)} blocks are lost")
