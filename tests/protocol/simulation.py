"""Whole deployments in virtual time, from one seed: prefill and decode instances, a bad network, faults, restarts.

``simulate(seed, scenario)`` raises Violation where a rule does not hold; its text has the seed, which replays the run
exactly.  Each rule is a method ``rule_<number>_...`` of the two watches; the models check bytes and block owners.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from hawk_connector.protocol.circuit import CircuitLimits
from hawk_connector.protocol.decode_actions import DecodeLimits
from hawk_connector.protocol.link import LinkLimits
from hawk_connector.protocol.prefill_actions import PrefillLimits
from hawk_connector.protocol.ticket import HAWK_KEY
from hawk_connector.transport.memory_channel import NetworkFaults
from tests.protocol.simulated_decode import DecodeFaults, SimulatedDecode
from tests.protocol.simulated_engine import EngineFaults
from tests.protocol.simulated_memory import Wish
from tests.protocol.simulated_network import Network
from tests.protocol.simulated_prefill import PrefillFaults, Prompt, SimulatedPrefill
from tests.protocol.simulated_rogue import Rogue
from tests.protocol.world import BLOCK, Text, Violation, World, decode_facts, direct_facts

QUIET = NetworkFaults(delay_min_s=0.001, delay_max_s=0.005)
ROUGH = NetworkFaults(drop=0.15, duplicate=0.2, reorder=0.2, delay_min_s=0.001, delay_max_s=0.8)

_ARRIVALS_S = 6.0
_FAULTS_S = 10.0


@dataclass(frozen=True)
class Scenario:
    """What may go wrong.  Chances are per process where it is a process that it befalls, else per request.

    ``direct``: chance of a decode side to be in mode direct, where there is one rank.  ``early``: of a request's
    parameters to be given away when it begins, as no router does that waits for the answer.
    ``patient``: deadlines so long that loss alone makes nothing fail.
    """

    network: NetworkFaults = QUIET
    prefill: PrefillFaults = field(default_factory=PrefillFaults)
    decode: DecodeFaults = field(default_factory=DecodeFaults)
    engine: EngineFaults = field(default_factory=EngineFaults)
    prompts: int = 8
    aborts: float = 0.0
    restarts: float = 0.0
    pauses: float = 0.0
    jumps: float = 0.0
    skew: float = 0.0
    cuts: float = 0.0
    joins: float = 0.0
    drains: float = 0.0
    resets: float = 0.0
    rogue: float = 0.0
    misfits: float = 0.0
    tampered: float = 0.0
    layouts: bool = False
    direct: float = 0.3
    early: float = 0.0
    patient: bool = False
    calm_s: float = 250.0


@dataclass
class Outcome:
    """How every request went, and what was covered: faults by the phase that they hit, rules by how often checked."""

    wishes: dict[str, str]
    reasons: dict[str, str]
    steps: int
    covered: Counter[tuple[str, str]]
    checks: Counter[int]


def simulate(seed: int, scenario: Scenario, trace: Callable[[str], None] | None = None) -> Outcome:
    """Runs one deployment to quiescence; Violation with the seed where a rule is broken."""
    try:
        return _Run(seed, scenario, trace).outcome()
    except Violation as broken:
        raise Violation(broken.rule, f"seed {seed}: {str(broken).partition(': ')[2]}; {scenario}") from broken
    except Exception as error:
        raise Violation(0, f"seed {seed}: {type(error).__name__}: {error}; {scenario}") from error


class _Run:
    def __init__(self, seed: int, scenario: Scenario, trace: Callable[[str], None] | None) -> None:
        self.scenario = scenario
        self.world = world = World(seed, trace)
        self.network = Network(world, seed + 1, scenario.network)
        rng = world.rng
        heads, ranks = rng.choice([(1, 1), (2, 1), (2, 2), (1, 2)])
        patient = scenario.patient
        # Of its own, so that what else a seed stands for does not change with it.
        self.modes = random.Random(f"modes of {seed}")
        direct = [ranks == 1 and self.modes.random() < scenario.direct for _ in range(2)]
        if patient:  # of two layouts the one that pairs first is packed for, and that is a matter of time
            direct[1] = direct[0]
        self.prefills = self._prefills(heads, ranks, digests=not any(direct))
        link = LinkLimits(
            hello_deadline_s=60.0 if patient else 3.0,
            resend_s=0.5,
            renew_s=1.0,
            hello_every_s=rng.choice([4.0, 15.0]),
            forget_s=rng.choice([0.5, 60.0]),
            digests=world.chance(0.3) and not any(direct),
            retry_s=rng.choice([0.3, 1.0]),
            circuit=CircuitLimits(failures=100 if patient else rng.choice([1, 3]), open_s=2.0, open_max_s=10.0),
            max_links=256 if patient else rng.choice([ranks, 256]),
        )
        limits = DecodeLimits(
            link=link,
            admission_deadline_s=90.0 if patient else 5.0,
            load_deadline_s=150.0 if patient else 15.0,
            reads=rng.choice([1, 2, 4]),
        )
        first = rng.choice([1, heads])
        chips = [first, rng.choice([1, heads]) if scenario.layouts else first]
        codecs = ["bfp8", "bfp4"] if scenario.layouts else ["bfp8", "bfp8"]
        self.decodes = []
        for i in range(rng.choice([1, 2])):
            misfit = world.chance(scenario.misfits)
            by_lease = misfit and world.chance(0.5)  # one that only the decode side itself can see
            model = "other" if misfit and not by_lease else "m"
            decode = SimulatedDecode(
                world,
                self.network,
                i,
                facts=direct_facts(heads=heads, model=model)
                if direct[i]
                else decode_facts(heads=heads, chips=chips[i], codec=codecs[i], model=model),
                limits=replace(limits, link=replace(link, renew_s=50.0)) if by_lease else limits,
                claim_hold_s=150.0 if patient else 8.0,
                blocks=60 if patient else rng.choice([12, 40]),
                engine=replace(scenario.engine, rdma=world.chance(0.5)),
                faults=replace(scenario.decode, fail=scenario.decode.fail and world.chance(0.5)),
                ranks=ranks,
                misfit="lease" if by_lease else "facts" if misfit else "",
                skew=scenario.skew * world.between(-1, 1),
            )
            self.decodes.append(decode)
        self.processes: list[Any] = [*self.prefills, *self.decodes]
        for process in self.processes:
            if world.chance(scenario.joins):
                world.covered["joins late", ""] += 1
                world.after(world.between(0.5, 5.0), process.start)
            else:
                process.start()
        for decode in self.decodes:
            if world.chance(0.5):
                for prefill in self.prefills:
                    for address in prefill.addresses:
                        decode.connect(address)
        self.rogue = Rogue(world, self.network, self.decodes[0].facts, self.prefills)
        if world.chance(scenario.rogue):
            self.rogue.start()
        self.wishes: list[Wish] = []
        self.prompts: list[Prompt] = []
        # Drawn ahead of the run, so that the clients want the same whatever the network does.
        for n in range(scenario.prompts):
            self._client(n)
        self._faults()

    def _prefills(self, heads: int, ranks: int, *, digests: bool) -> list[SimulatedPrefill]:
        scenario, world, rng = self.scenario, self.world, self.world.rng
        patient = scenario.patient
        limits = PrefillLimits(
            parcel_tokens=rng.choice([1, 2, 3]) * BLOCK,
            lease_s=40.0 if patient else rng.choice([3.0, 6.0]),
            buffer_wait_s=150.0 if patient else rng.choice([2.0, 8.0]),
            verdict_keep_s=100.0 if patient else 20.0,
            max_transfers=64 if patient else rng.choice([3, 64]),
            max_peers=8,
            peer_keep_s=30.0,
            max_transfers_per_peer=1024 if patient else rng.choice([2, 1024]),
            peer_buffer_share=1.0 if patient else rng.choice([0.5, 1.0]),
            digests=world.chance(0.1) and digests,
        )
        # Room for one to a few parcels: requests must wait for the buffer and be served parcel by parcel.
        block_bytes = 2 * heads * 1088
        roomy = rng.choice([1, 2, 5, 40]) if not patient else rng.choice([4, 40])
        return [
            SimulatedPrefill(
                world,
                self.network,
                i,
                heads=heads,
                ranks=ranks,
                buffer_bytes=-(-roomy * block_bytes // 256) * 256 + 256,
                blocks=rng.choice([10, 30]),
                limits=limits,
                faults=scenario.prefill,
                skew=scenario.skew * world.between(-1, 1),
            )
            for i in range(rng.choice([1, 1, 2]))
        ]

    def outcome(self) -> Outcome:
        world = self.world
        world.run(_ARRIVALS_S + _FAULTS_S)
        # Nothing new comes; every deadline may pass.
        quiet = 0  # seconds in a row
        while quiet < 4 and world.now < self.scenario.calm_s:
            world.run(world.now + 1.0)
            quiet = quiet + 1 if self._quiet() else 0
        for wish in self.wishes:
            world.require(3, wish.outcome is not None and wish.over, lambda w=wish: f"{w.name} never ended")
        for process in self.processes:
            process.require_idle()
        wishes = {w.name: str(w.outcome) for w in self.wishes}
        return Outcome(wishes, {w.name: w.reason for w in self.wishes}, world.steps, world.covered, world.checks)

    def _quiet(self) -> bool:
        return (
            not self.rogue.up
            and all(process.up and not process.paused and process.idle() for process in self.processes)
            and all(wish.over for wish in self.wishes)
            and all(prompt.lost or prompt.ended_at is not None for prompt in self.prompts)
        )

    # --- faults

    def _faults(self) -> None:
        scenario, world = self.scenario, self.world
        for process in self.processes:
            side = process.name.partition("-")[0]
            for chance, fault in (
                (scenario.restarts, self._restart),
                (scenario.pauses, self._pause),
                (scenario.jumps, self._jump),
                (scenario.drains, self._drain),
                (scenario.resets, self._reset),
                (scenario.cuts if side == "prefill" else 0.0, self._cut),
            ):
                for _ in range(world.rng.choice([1, 1, 3]) if world.chance(chance) else 0):
                    world.after(world.between(0.5, _FAULTS_S), lambda p=process, f=fault: f(p))

    def _note(self, fault: str, process: Any) -> None:
        fault = f"{process.name.partition('-')[0]} {fault}"
        for phase in process.live() or [""]:
            self.world.covered[fault, phase] += 1

    def _restart(self, process: Any) -> None:
        if process.up:
            self._note("killed and restarted", process)
            process.stop()
            self.world.after(self.world.between(0.01, 3.0), process.start)

    def _pause(self, process: Any, patience: int = 20) -> None:
        """Stopped for less than a deadline, or past all of them; while it is read from, if it comes to that."""
        if patience and not any(decode.watch.running for decode in self.decodes if decode.up):
            self.world.after(0.2, lambda: self._pause(process, patience - 1))
        elif process.up:
            self._note("stopped and continued", process)
            process.pause()
            self.world.after(self.world.rng.choice([0.5, 4.0, 20.0]), process.resume)

    def _jump(self, process: Any) -> None:
        if process.up:
            self._note("clock leaps", process)
            process.jump(self.world.rng.choice([0.5, 4.0, 20.0]))

    def _drain(self, process: Any) -> None:
        """A rolling restart: it finishes what it owes, leaves, and another life comes."""
        if process.up and not process.paused:
            self._note("drained and restarted", process)
            life = process.life

            def drained() -> None:
                if process.life == life and process.up:
                    process.stop()
                    self.world.after(self.world.between(0.01, 1.0), process.start)

            process.drain(drained)

    def _reset(self, process: Any) -> None:
        if process.up:
            self._note("cache reset", process)
            process.reset()

    def _cut(self, process: Any) -> None:
        self._note("cut off", process)
        for address in process.addresses:
            self.network.cut(address)
            self.world.after(self.world.between(0.5, 8.0), lambda a=address: self.network.mend(a))

    # --- clients

    def _text(self) -> Text:
        """A prompt; some begin with one of two common prefixes."""
        world, rng = self.world, self.world.rng
        tokens = rng.randint(2, 6 * BLOCK)
        common = rng.choice([0, 0, 1, 2, 3]) if not self.scenario.patient else 0
        family, own = rng.choice("AB"), world.id()[:8]
        keys = [f"{family}:{i}" if i < common else f"{own}:{i}" for i in range(-(-tokens // BLOCK))]
        return Text(f"{rng.getrandbits(256):064x}", tokens, tuple(keys))

    def _client(self, n: int) -> None:
        """One prompt: computed by a prefill instance, then sent to decode once, several times, wrongly or never."""
        world, scenario = self.world, self.scenario
        rng = world.rng
        prompt = Prompt(world.id(), self._text())
        prompt.early = self.modes.random() < scenario.early
        self.prompts.append(prompt)
        abandon = world.chance(scenario.aborts / 2)
        kind = rng.choice(["once", "once", "once", "twice", "list", "never"])
        uses = {"once": [True], "twice": [True, True], "list": [False, True, False], "never": []}[kind]
        rng.shuffle(uses)
        plans = []
        for k, own in enumerate(uses):
            text = prompt.text
            if not own:  # another prompt of the same length, which a router gave the same parameters
                text = Text(f"{rng.getrandbits(256):064x}", text.tokens, tuple(f"other {key}" for key in text.keys))
            wish = Wish(f"{n}.{k}", text)
            if world.chance(scenario.aborts):
                wish.abort_after = world.between(0, 4.0)
            wish.refused_by_decode = world.chance(scenario.aborts / 5)
            tamper = rng.randrange(5) if world.chance(scenario.tampered) else None
            plans.append((wish, rng.choice(self.decodes), world.between(0.05, 0.5), tamper))

        def done(params: dict[str, Any]) -> None:
            for wish, decode, delay, tamper in plans:
                self.wishes.append(wish)
                said = params if tamper is None else self._tampered(params, tamper)
                world.after(delay, lambda w=wish, d=decode, p=said: d.wish(w, p))

        prefill = rng.choice(self.prefills)
        world.after(world.between(0, _ARRIVALS_S), lambda: prefill.submit(prompt, done, abandon))

    def _tampered(self, params: dict[str, Any], how: int) -> dict[str, Any]:
        """Parameters as a client may write them: well formed, and wrong."""
        world = self.world
        world.covered["parameters tampered with", ""] += 1
        entry = dict(params[HAWK_KEY])
        ranks = list(entry["ranks"])
        if how == 0:
            ranks = ranks[1:] or ranks
        elif how == 1:
            ranks.reverse()
        elif how == 2:
            ranks[-1] = {**ranks[-1], "epoch": world.id()}
        elif how == 3:
            entry["transfer"] = world.id()
        else:
            ranks += [{"address": f"nobody:{1 + world.rng.randrange(3)}", "epoch": world.id()}]
        return {**params, HAWK_KEY: {**entry, "ranks": ranks}}


def lossless(scenario: Scenario) -> Scenario:
    return replace(scenario, network=QUIET)
