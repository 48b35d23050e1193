"""A decode instance: vLLM's requests, blocks and prefix cache in small, and the two machines that share an epoch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hawk_connector.plan.pairing import DecodeFacts
from hawk_connector.protocol.admission import AdmissionLimits, AdmissionProtocol, VerdictKind
from hawk_connector.protocol.circuit import CircuitState
from hawk_connector.protocol.decode import DecodeProtocol
from hawk_connector.protocol.decode_actions import (
    DecodeLimits,
    Disconnect,
    Fence,
    PeerOutcome,
    Read,
    Report,
    SendTo,
    StopRead,
)
from hawk_connector.protocol.messages import (
    Accepted,
    Claimed,
    Gone,
    Ready,
    Refused,
    Renewed,
    Stale,
    Welcome,
    decode_message,
    encode,
)
from hawk_connector.protocol.ticket import Ticket, parse_params
from hawk_connector.series import Failure
from tests.protocol.simulated_engine import EngineFaults, Engines
from tests.protocol.simulated_memory import DecodeMemory, Wish
from tests.protocol.simulated_network import Client, Network
from tests.protocol.simulated_process import Process
from tests.protocol.simulation_decode_rules import DecodeWatch
from tests.protocol.world import BLOCK, World

_FROM_PREFILL = (Welcome, Refused, Stale, Claimed, Ready, Renewed, Accepted, Gone)
_TICK_S = 0.25
_IDLE_TICK_S = 1.0


@dataclass(frozen=True)
class DecodeFaults:
    """``preempt``: chance of a request that decodes to lose its blocks.  ``fail``: vLLM's policy, against recompute."""

    preempt: float = 0.0
    fail: bool = False


@dataclass
class Machines:
    """Both machines of one life, and their ends of the network."""

    admission: AdmissionProtocol
    worker: DecodeProtocol
    clients: list[Client] = field(default_factory=list)


class SimulatedDecode(Process):
    def __init__(
        self,
        world: World,
        network: Network,
        index: int,
        *,
        facts: DecodeFacts,
        limits: DecodeLimits,
        claim_hold_s: float,
        blocks: int,
        engine: EngineFaults,
        faults: DecodeFaults,
        ranks: int,
        misfit: str = "",
        skew: float = 0.0,
    ) -> None:
        super().__init__(world, f"decode-{index}", skew)
        self.network = network
        self.facts, self.limits = facts, limits
        self.admission_limits = AdmissionLimits(limits.link, limits.admission_deadline_s, claim_hold_s)
        self.blocks, self.ranks, self.faults, self.engine_faults, self.misfit = blocks, ranks, faults, engine, misfit
        self.known: list[str] = []
        self.wishes: dict[str, Wish] = {}

    # --- the process

    def start(self) -> None:
        world = self.world
        self.born()
        epoch = world.id()
        if self.misfit == "facts":
            world.misfits.add(epoch)
        machines = Machines(
            AdmissionProtocol(epoch, self.facts, self.admission_limits, self.clock),
            DecodeProtocol(epoch, self.facts, self.limits, self.clock),
        )
        self.machines, self.admission, self.worker = machines, machines.admission, machines.worker
        machines.clients = [
            self.network.client(lambda a, p: self.soon(lambda: self._receive(machines.admission, a, p))),
            self.network.client(lambda a, p: self.soon(lambda: self._receive(machines.worker, a, p))),
        ]
        self.watch = DecodeWatch(self, epoch, self.limits, self.admission_limits, misfit=bool(self.misfit))
        self.memory = DecodeMemory(world, self.facts, self.ranks, self.blocks)
        self.pool = self.memory.pool
        self.engines = Engines(self, self.engine_faults, self.memory.write)
        self.wishes = {}
        for address in self.known:
            self._connect(address)
        self._flush()
        self._tick()

    def stop(self) -> None:
        self.die()
        for client in self.machines.clients:
            self.network.leave(client)
        self.engines.close()
        for wish in self.wishes.values():
            wish.outcome = wish.outcome or "lost"
            wish.over = True

    def connect(self, address: str) -> None:
        self.known.append(address)
        if self.up:
            self._connect(address)
            self._flush()

    def _connect(self, address: str) -> None:
        self.admission.connect(address)
        self.worker.connect(address)

    def _tick(self) -> None:
        self.admission.tick()
        self.worker.tick()
        self._flush()
        self.watch.rule_3_everything_held_has_a_deadline()
        for machine in (self.admission, self.worker):
            links = len(machine.links)
            self.watch.rule_10_what_peers_name_is_bounded(links, self.limits.link.max_links + len(self.known) + 12)
        self.after(_TICK_S if self.busy() else _IDLE_TICK_S, self._tick)

    def _receive(self, machine: AdmissionProtocol | DecodeProtocol, address: str, payload: bytes) -> None:
        message = decode_message(payload, _FROM_PREFILL)
        self.world.say(self.name, "hears", message)
        if machine is self.worker:
            self.watch.heard(address, message)
        machine.receive(address, message)  # type: ignore[arg-type]
        if isinstance(message, Welcome):
            self.watch.rule_8_misfits_do_not_pair(list(machine.links.values()))
        self._flush()

    def _flush(self) -> None:
        for said in self.admission.take_actions():
            if isinstance(said, SendTo):
                self._send(0, said)
            else:
                self.network.disconnect(self.machines.clients[0], said.address)
        for action in self.worker.take_actions():
            if isinstance(action, SendTo):
                self.watch.said(action.address, action.message)
                self._send(1, action)
            elif isinstance(action, Read):
                self._read(action)
            elif isinstance(action, StopRead):
                self.engines.stop(action.id)
            elif isinstance(action, Disconnect):
                self.network.disconnect(self.machines.clients[1], action.address)
            elif isinstance(action, Fence):
                self._fence(action.address)
            elif isinstance(action, Report):
                self._report(action)
        for outcome in self.worker.take_outcomes():
            # By way of vLLM's step outputs, of which one may get lost with the step.
            if not self.world.chance(0.05):
                self.after(self.world.between(0, 0.3), lambda o=outcome: self._tell(o))

    def _tell(self, outcome: PeerOutcome) -> None:
        self.admission.peer_outcome(outcome)
        self._flush()

    def _send(self, which: int, action: SendTo) -> None:
        self.world.say(self.name, "says ", action.message)
        self.network.send(self.machines.clients[which], action.address, encode(action.message))

    # --- vLLM's scheduler

    def wish(self, wish: Wish, params: dict[str, Any]) -> None:
        """A client sends a request with the parameters that the prefill side, or somebody else, gave."""
        self.wishes[wish.name] = wish
        if not self.up or self.paused:
            self._ended(wish, "lost", "")
            wish.over = True
            return
        parsed = parse_params(params)
        assert parsed is not None
        wish.ticket = Ticket(parsed.transfer, self.world.id(), wish.text.digest, wish.text.tokens, parsed.ranks)
        wish.stage = "asked"
        if self.admission.has_room([rank.address for rank in parsed.ranks]):
            # The circuit is the life's that was last heard here; for another one the request may wait.
            links = [(self.admission.links.get(rank.address), rank.epoch) for rank in parsed.ranks]
            known = [link for link, epoch in links if link is not None and link.remote_epoch == epoch]
            shut = any(link.circuit.state is CircuitState.OPEN for link in known)
            self.admission.ask(wish.name, wish.ticket)
            self.watch.asked(wish.name)
            if shut or self.admission.draining:
                self.world.covered["circuit open" if shut else "draining", "before admission"] += 1
                self.watch.rule_3_who_cannot_be_served_is_told_at_once(self.admission.verdict(wish.name))
            self._flush()
        if wish.refused_by_decode:
            self._abort(wish)
            return
        self.after(0.1, lambda: self._schedule(wish))
        if wish.abort_after is not None:
            self.after(wish.abort_after, lambda: self._abort(wish))

    def _schedule(self, wish: Wish) -> None:
        """vLLM's scheduler looks at a waiting request."""
        if wish.over or wish.stage != "asked":
            return
        text = wish.text
        verdict = self.admission.verdict(wish.name)
        self._flush()
        hits = self.pool.hits(text.cachable)
        wanted = text.tokens - len(hits) * BLOCK
        worthwhile = wanted > 1 or not hits
        kind = verdict.kind if verdict is not None else None
        fails = kind is VerdictKind.FAILED and self.faults.fail
        if kind is VerdictKind.PENDING:
            self._look_again(wish)
        elif worthwhile and (kind is VerdictKind.CLAIMED or fails):
            table = self.pool.take(hits, text.blocks - len(hits))
            if table is None:
                wish.stage = "asked"
                self._look_again(wish)
                return
            self.watch.answered(wish.name)
            self._allocated(wish, len(hits), table, verdict.reason if verdict is not None and fails else "")
        else:
            self.admission.drop(wish.name)
            self.watch.answered(wish.name)
            self._flush()
            reason = verdict.reason if verdict is not None else "no claim"
            self._ended(wish, "cached" if kind is VerdictKind.CLAIMED else kind.value if kind else "none", reason)
            wish.stage = "waits to compute"
            self._compute(wish)

    def _look_again(self, wish: Wish) -> None:
        self.after(self.world.between(0.05, 0.2), lambda: self._schedule(wish))

    def _allocated(self, wish: Wish, first: int, table: Sequence[int], refused: str) -> None:
        wish.first, wish.table = first, tuple(table)
        self.memory.own(wish, wish.name)
        wish.stage = "loading"
        ticket = self.admission.hand_over(wish.name)
        self._flush()
        own = wish.table[first:]
        if refused or ticket is None:
            reason = refused or "its claim was given up before vLLM gave it blocks"
            self.after(self.world.between(0, 0.1), lambda: self._refuse(wish, reason))
        else:
            self.after(self.world.between(0, 0.1), lambda: self._load(wish, ticket, own))

    def _refuse(self, wish: Wish, reason: str) -> None:
        self.worker.refuse(wish.name, wish.table[wish.first :], "no_answer", reason)
        self._flush()

    def _load(self, wish: Wish, ticket: Ticket, blocks: tuple[int, ...]) -> None:
        self.watch.loading(wish.name, ticket, blocks)
        self.worker.load(wish.name, ticket, wish.first, blocks)
        if wish.stage == "aborting":
            self.worker.abort(wish.name)
        self._flush()

    def _abort(self, wish: Wish) -> None:
        """The client is gone, or vLLM gives the request up."""
        if wish.over or wish.stage == "aborting":
            return
        self.note("aborted on decode", wish)
        if wish.stage == "loading":
            wish.stage = "aborting"
            self.worker.abort(wish.name)
        else:
            self.admission.drop(wish.name)
            self.watch.answered(wish.name)
            self._over(wish)
        self._flush()

    def drain(self, drained: Callable[[], None]) -> None:
        """No transfer is asked for any more; ``drained`` is called when no request needs one."""
        self.admission.drain()
        self._flush()
        self._when_drained(drained)

    def _when_drained(self, drained: Callable[[], None]) -> None:
        if self.busy() or any(not wish.over for wish in self.wishes.values()):
            self.after(0.5, lambda: self._when_drained(drained))
        else:
            drained()

    def reset(self) -> None:
        """vLLM's prefix cache is reset: waiting requests compute their own KV."""
        if self.up and not self.paused:
            self.pool.reset()
            self.admission.drop_all()
            self._flush()

    def _report(self, report: Report) -> None:
        self.watch.reported(report)
        wish = self.wishes[report.request]
        if report.ok:
            self.memory.require_own_bytes(wish, 4)
            self._ended(wish, "loaded", "")
            self._decode(wish)
        elif report.aborted or wish.stage == "aborting":
            self._over(wish)
        else:
            self._ended(wish, "broken", report.reason)
            if self.faults.fail:
                self._over(wish)  # vLLM gives the blocks to others at once
            else:
                self._compute_in_place(wish)

    # --- vLLM's worker

    def _compute(self, wish: Wish) -> None:
        """The request computes what the cache lacks, once there are blocks."""
        if wish.over:
            return
        hits = self.pool.hits(wish.text.cachable)
        table = self.pool.take(hits, wish.text.blocks - len(hits))
        if table is None:
            self.after(0.3, lambda: self._compute(wish))
            return
        wish.first, wish.table = len(hits), tuple(table)
        self._compute_in_place(wish)

    def _compute_in_place(self, wish: Wish) -> None:
        wish.stage = "computing"
        self.memory.own(wish, f"computing {wish.name}")

        def done() -> None:
            if wish.over:
                return
            self.memory.compute(wish)
            self._decode(wish)

        self.after(self.world.between(0.05, 0.5), done)

    def _decode(self, wish: Wish) -> None:
        """It decodes now: any byte that arrives from here on would be wrong."""
        wish.stage = "decoding"
        self.memory.own(wish, f"decoding {wish.name}")
        for i, block in enumerate(wish.table[wish.first :], start=wish.first):
            if wish.text.full(i):
                self.pool.cache(block, wish.text.keys[i])
        self.after(self.world.between(0, 2.0), lambda: self._decoded(wish))

    def _decoded(self, wish: Wish) -> None:
        if wish.over:
            return
        self.memory.require_own_bytes(wish, 1)
        if not wish.preempted and self.world.chance(self.faults.preempt):
            self.note("preempted on decode", wish)
            wish.preempted, wish.stage = True, "waits to compute"
            self.pool.give(wish.table)
            wish.table = ()
            self._compute(wish)
        else:
            self._over(wish)

    def _ended(self, wish: Wish, outcome: str, reason: str) -> None:
        self.world.require(1, wish.outcome is None, lambda: f"{wish.name} ended: {wish.outcome}, now {outcome}")
        self.world.say(self.name, f"{wish.name} is {outcome} {reason}")
        wish.outcome, wish.reason = outcome, reason

    def _over(self, wish: Wish) -> None:
        wish.outcome = wish.outcome or "aborted"
        wish.stage, wish.over = "over", True
        self.pool.give(wish.table)
        wish.table = ()

    # --- engines

    def _read(self, read: Read) -> None:
        named = len(read.block_ids) == read.plan.blocks
        self.world.require(8, named, lambda: f"{read} does not name a block for each of its plan's")
        self.watch.reading(read)

        def ended(ok: bool, why: str, stopped: bool) -> None:
            if not ok:
                self.note(f"read fails: {why}", self.wishes[read.request])
            self.watch.read_ended(read.id, ok, stopped)
            failure: Failure = "corrupt" if why == "other digest" else "read"
            self.worker.read_ended(read.id, ok, why, failure=failure, stopped=stopped)
            self._flush()

        self.engines.read(read, ended)

    def _fence(self, address: str) -> None:
        self.watch.fencing(address)

        def fenced() -> None:
            self.watch.fenced(address)
            self.worker.fenced(address)
            self._flush()

        self.engines.fence(address, fenced)

    # --- what a fault hits

    def note(self, fault: str, wish: Wish) -> None:
        self.world.covered[fault, self.phase(wish)] += 1
        self.world.say(self.name, f"{fault}: {wish.name} ({self.phase(wish)})")

    def phase(self, wish: Wish) -> str:
        if wish.stage == "asked":
            verdict = self.admission._asked.get(wish.name)
            claimed = verdict is not None and verdict.verdict.kind is VerdictKind.CLAIMED
            return "claimed, waits for blocks" if claimed else "before admission"
        load = self.watch.loads.get(wish.name)
        if wish.stage not in ("loading", "aborting") or load is None:
            return wish.stage
        if load.unfenced:
            return "quarantined"
        if any(owner == wish.name for owner, _ in self.watch.running.values()):
            return "reading"
        if load.dones - load.accepted:
            return "read, verdict awaited"
        return "partly accepted" if load.accepted else "awaits an offer"

    def live(self) -> list[str]:
        return [self.phase(wish) for wish in self.wishes.values() if not wish.over]

    # --- the end

    def busy(self) -> bool:
        return bool(self.admission._asked or self.admission._farewells or any(self.worker.held().values()))

    def idle(self) -> bool:
        return not self.busy() and all(wish.over for wish in self.wishes.values()) and self.pool.free == self.blocks

    def require_idle(self) -> None:
        require = self.world.require
        for held in (self.worker.held(), self.admission.held()):
            require(5, not any(held.values()), lambda h=held: f"{self.name} still holds {h}")
        open_ = [w.name for w in self.wishes.values() if not w.over]
        require(3, not open_, lambda: f"{self.name}: {open_} never ended")
        lost = self.blocks - self.pool.free
        require(5, lost == 0, lambda: f"{self.name}: {lost} blocks are lost")
