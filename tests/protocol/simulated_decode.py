"""A decode instance: vLLM's requests and blocks in small, the two machines that share an epoch, and read engines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hawk_connector.address import Address
from hawk_connector.plan.pairing import DecodeFacts, pair
from hawk_connector.protocol.admission import AdmissionLimits, AdmissionProtocol, VerdictKind
from hawk_connector.protocol.decode import DecodeProtocol
from hawk_connector.protocol.decode_actions import DecodeLimits, Disconnect, Fence, Read, Report, SendTo
from hawk_connector.protocol.messages import decode_message, encode
from hawk_connector.protocol.ticket import Ticket, parse_params
from tests.protocol.world import BLOCK, BUFFER_ADDRESS, World, kv_bytes, prefill_facts, require


@dataclass(frozen=True)
class EngineFaults:
    """Chances per read.  A failed or timed-out read writes some of its bytes late, unless the engine is dropped."""

    fail: float = 0.0
    hang: float = 0.0
    timeout_s: float = 3.0


@dataclass
class Wish:
    """One request on the decode side, and how it went: ``outcome`` is set exactly once."""

    name: str
    digest: str
    transfer: str
    tokens: int
    content: Callable[[int], str]
    prefix: int = 0  # blocks that decode has cached
    stage: str = "new"
    ticket: Ticket | None = None
    blocks: tuple[int, ...] = ()
    outcome: str | None = None
    reason: str = ""


@dataclass(eq=False)
class Engine:
    """A transfer engine for one peer's address; after ``closed`` no byte of it arrives."""

    closed: bool = False
    fencing: bool = False
    running: set[int] = field(default_factory=set)
    epoch: str = ""  # the peer's life that it reads from


class SimulatedDecode:
    def __init__(
        self,
        world: World,
        index: int,
        *,
        facts: DecodeFacts,
        limits: DecodeLimits,
        claim_hold_s: float,
        blocks: int,
        faults: EngineFaults,
    ) -> None:
        self.world, self.index, self.facts, self.limits = world, index, facts, limits
        self.claim_hold_s = claim_hold_s
        self.blocks, self.faults = blocks, faults
        self.life = 0
        self.up = False
        self.known: list[str] = []
        world.ends.append(self)
        self.start()

    # --- the process

    def start(self) -> None:
        self.life += 1
        self.up = True
        epoch = self.world.id()
        clock = self.world.clock
        admission = AdmissionLimits(self.limits.link, self.limits.admission_deadline_s, self.claim_hold_s)
        self.admission = AdmissionProtocol(epoch, self.facts, admission, clock)
        self.worker = DecodeProtocol(epoch, self.facts, self.limits, clock)
        self.clients = self.world.client(), self.world.client()
        self.engines: dict[str, Engine] = {}
        self.owner: list[str | None] = [None] * self.blocks
        self.memory: list[dict[str, bytearray]] = [{} for _ in range(self.blocks)]
        self.free = list(range(self.blocks))
        self.wishes: dict[str, Wish] = {}
        for address in self.known:
            self.admission.connect(address)
            self.worker.connect(address)
        self._flush()
        self._tick(self.life)

    def stop(self) -> None:
        self.up = False
        for client in self.clients:
            client.close()
        for engine in self.engines.values():
            engine.closed = True
        for wish in self.wishes.values():
            if wish.outcome is None:
                wish.outcome = "lost"

    def connect(self, address: str) -> None:
        self.known.append(address)
        self.admission.connect(address)
        self.worker.connect(address)
        self._flush()

    def _tick(self, life: int) -> None:
        if life != self.life or not self.up:
            return
        self.admission.tick()
        self.worker.tick()
        self._flush()
        self.world.after(0.25, lambda: self._tick(life))

    def receive_all(self) -> None:
        machines: tuple[Any, Any] = (self.admission, self.worker)
        for client, machine in zip(self.clients, machines, strict=True):
            while self.up and (received := client.receive()) is not None:
                message: Any = decode_message(received.payload)
                machine.receive(received.peer, message)
                self._flush()

    def _flush(self) -> None:
        for said in self.admission.take_actions():
            if isinstance(said, SendTo):
                self._send(0, said.address, encode(said.message))
            else:
                self.clients[0].disconnect(said.address)
        for action in self.worker.take_actions():
            if isinstance(action, SendTo):
                self._send(1, action.address, encode(action.message))
            elif isinstance(action, Read):
                self._read(action)
            elif isinstance(action, Disconnect):
                self.clients[1].disconnect(action.address)
            elif isinstance(action, Fence):
                self._fence(action.address)
            else:
                assert isinstance(action, Report)
                self._report(action)

    def _send(self, which: int, address: str, payload: bytes) -> None:
        self.clients[which].connect(Address.parse(address))
        self.clients[which].send(address, payload)

    # --- vLLM

    def wish(self, wish: Wish, params: dict[str, Any], abort_after: float | None) -> None:
        """A client sends a request with the parameters that the prefill side gave."""
        if not self.up:
            wish.outcome = "lost"
            return
        self.wishes[wish.name] = wish
        parsed = parse_params(params)
        assert parsed is not None
        wish.ticket = Ticket(parsed.transfer, self.world.id(), wish.digest, wish.tokens, parsed.ranks)
        wish.stage = "asked"
        self.admission.ask(wish.name, wish.ticket)
        self._flush()
        life = self.life
        self.world.after(0.1, lambda: self._poll(wish, life))
        if abort_after is not None:
            self.world.after(abort_after, lambda: self._abort(wish, life))

    def _poll(self, wish: Wish, life: int) -> None:
        """vLLM's scheduler looks at a waiting request."""
        if life != self.life or not self.up or wish.stage != "asked":
            return
        verdict = self.admission.verdict(wish.name)
        assert verdict is not None
        need = -(-wish.tokens // BLOCK) - wish.prefix
        if verdict.kind is VerdictKind.CLAIMED and len(self.free) >= need:
            ticket = self.admission.hand_over(wish.name)
            assert ticket is not None
            wish.blocks = tuple(self.free.pop() for _ in range(need))
            for block in wish.blocks:
                self.owner[block] = wish.name
            wish.stage = "loading"
            self.world.after(self.world.between(0, 0.1), lambda: self._load(wish, ticket, life))
        elif verdict.kind in (VerdictKind.GONE, VerdictKind.FAILED):
            self.admission.drop(wish.name)
            self._ended(wish, verdict.kind.value, verdict.reason)
        else:
            self.world.after(self.world.between(0.05, 0.2), lambda: self._poll(wish, life))
        self._flush()

    def _load(self, wish: Wish, ticket: Ticket, life: int) -> None:
        if life != self.life or not self.up:
            return
        self.worker.load(wish.name, ticket, wish.prefix, wish.blocks)
        if wish.stage == "aborting":
            self.worker.abort(wish.name)
        self._flush()

    def _abort(self, wish: Wish, life: int) -> None:
        if life != self.life or not self.up:
            return
        if wish.stage == "asked":
            self.admission.drop(wish.name)
            self._ended(wish, "aborted", "")
        elif wish.stage == "loading":
            wish.stage = "aborting"
            self.worker.abort(wish.name)
        self._flush()

    def _report(self, report: Report) -> None:
        wish = self.wishes[report.request]
        require(wish.outcome is None, f"{report.request} is reported twice")
        require(report.block_ids == wish.blocks, f"{report.request}: reports {report.block_ids}, not {wish.blocks}")
        if report.ok:
            self._require_own_bytes(wish)
            self._ended(wish, "loaded", "")
            for block in wish.blocks:  # it decodes now: any byte that arrives from here on would be wrong
                self.owner[block] = f"decoding {wish.name}"
            life = self.life
            self.world.after(self.world.between(0, 2.0), lambda: self._decoded(wish, life))
        else:
            self._ended(wish, "aborted" if report.aborted else "broken", report.reason)
            self._give_back(wish)

    def _decoded(self, wish: Wish, life: int) -> None:
        if life == self.life:
            self._give_back(wish)

    def _ended(self, wish: Wish, outcome: str, reason: str) -> None:
        require(wish.outcome is None, f"{wish.name} has ended twice: {wish.outcome}, {outcome}")
        wish.outcome, wish.reason, wish.stage = outcome, reason, "ended"

    def _give_back(self, wish: Wish) -> None:
        """vLLM reuses blocks at once."""
        for block in wish.blocks:
            self.owner[block] = None
            self.memory[block] = {}
        self.free += wish.blocks
        self.world.rng.shuffle(self.free)

    # --- engines

    def _read(self, read: Read) -> None:
        world, life = self.world, self.life
        engine = self.engines.setdefault(read.address, Engine())
        ticket = self.wishes[read.request].ticket
        assert ticket is not None
        epoch = next(rank.epoch for rank in ticket.ranks if rank.address == read.address)
        engine.epoch = engine.epoch or epoch
        require(engine.epoch == epoch, f"read {read.id} goes to another life through the old life's engine")
        require(not engine.fencing, f"read {read.id} goes through an engine that is being fenced")
        require(len(read.block_ids) == read.plan.blocks, f"{read} does not name a block for each of its plan's")
        engine.running.add(read.id)
        todo = list(range(read.skip_blocks, read.plan.blocks))
        cut = world.rng.randint(0, len(todo))
        dead = read.session not in world.buffers
        hangs = world.chance(self.faults.hang)
        fails = dead or hangs or world.chance(self.faults.fail)
        duration = self.faults.timeout_s if hangs else world.between(0, 0.6)
        self._copy(read, engine, [] if dead else todo[:cut])
        late = todo[cut:]
        if fails:
            for j in late:
                world.after(world.between(0, 2 * duration + 1), lambda j=j: self._copy(read, engine, [j]))

        def end() -> None:
            if life != self.life or not self.up:
                return
            failed = fails or read.session not in world.buffers
            if not failed:
                self._copy(read, engine, late)
            engine.running.discard(read.id)
            self.worker.read_ended(read.id, not failed, "fault" if failed else "")
            self._flush()

        world.after(duration, end)

    def _copy(self, read: Read, engine: Engine, blocks: list[int]) -> None:
        """Bytes arrive, from whatever the peer's session serves now."""
        source = self.world.buffers.get(read.session)
        if engine.closed or source is None:
            return
        each = read.plan.nbytes // read.plan.blocks
        for j in blocks:
            start = read.region - BUFFER_ADDRESS + j * each
            require(start >= 0 and start + each <= len(source), f"{read} reads outside the send buffer")
            block = read.block_ids[j]
            owner = self.owner[block]
            require(owner == read.request, f"block {block} of {owner} is written by a read for {read.request}")
            self.memory[block][read.address] = bytearray(source[start : start + each])

    def _fence(self, address: str) -> None:
        life = self.life
        engine = self.engines.get(address)
        if engine is not None:
            require(not engine.running, f"the engine of {address} is fenced while {engine.running} run")
            require(not engine.fencing, f"the engine of {address} is fenced twice")
            engine.fencing = True

        def done() -> None:
            if life != self.life or not self.up:
                return
            if engine is not None:
                engine.closed = True
                del self.engines[address]
            self.worker.fenced(address)
            self._flush()

        self.world.after(self.world.between(0, 0.5), done)

    # --- invariants

    def _require_own_bytes(self, wish: Wish) -> None:
        assert wish.ticket is not None
        ranks = len(wish.ticket.ranks)
        for r, rank in enumerate(wish.ticket.ranks):
            pairing = pair(prefill_facts(heads=self.facts.shape.kv_heads, ranks=ranks, rank=r), self.facts)
            assert not isinstance(pairing, tuple)
            if not pairing.shares:
                continue
            each = pairing.plan(1).nbytes
            for i, block in enumerate(wish.blocks, start=wish.prefix):
                found = self.memory[block].get(rank.address)
                expected = kv_bytes(f"{wish.content(i)}/{r}", each)
                require(found == expected, f"{wish.name}: block {i} from rank {r} holds other bytes than its own KV")

    def require_idle(self) -> None:
        held = {**self.worker.held(), **self.admission.held()}
        require(not any(held.values()), f"decode-{self.index} still holds {held}")
        require(len(self.free) == self.blocks, f"decode-{self.index}: {self.blocks - len(self.free)} blocks are lost")
        open_ = [w.name for w in self.wishes.values() if w.outcome is None]
        require(not open_, f"decode-{self.index}: {open_} never ended")
