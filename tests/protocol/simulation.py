"""Whole deployments in virtual time, from one seed: prefill and decode instances, a bad network, faults, restarts.

``simulate(seed, scenario)`` raises Violation where an invariant does not hold; its text has the seed, which replays
the run exactly.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from hawk_connector.protocol.decode_actions import DecodeLimits
from hawk_connector.protocol.link import LinkLimits
from hawk_connector.protocol.prefill_actions import PrefillLimits
from hawk_connector.transport.memory_channel import NetworkFaults
from tests.protocol.simulated_decode import EngineFaults, SimulatedDecode, Wish
from tests.protocol.simulated_prefill import Prompt, SimulatedPrefill
from tests.protocol.world import BLOCK, Violation, World, decode_facts, require

QUIET = NetworkFaults(delay_min_s=0.001, delay_max_s=0.005)
ROUGH = NetworkFaults(drop=0.15, duplicate=0.2, reorder=0.2, delay_min_s=0.001, delay_max_s=0.8)


@dataclass(frozen=True)
class Scenario:
    """What may go wrong.  ``patient``: deadlines so long that loss alone makes nothing fail."""

    network: NetworkFaults = QUIET
    engine: EngineFaults = field(default_factory=EngineFaults)
    prompts: int = 8
    aborts: float = 0.0
    pack_failures: float = 0.0
    preemptions: float = 0.0
    restarts: float = 0.0
    layouts: bool = False
    patient: bool = False
    calm_s: float = 200.0


@dataclass
class Outcome:
    """How every request went, and what was moved."""

    wishes: dict[str, str]
    reasons: dict[str, str]
    steps: int


def simulate(seed: int, scenario: Scenario) -> Outcome:
    """Runs one deployment to quiescence; Violation with the seed where an invariant breaks."""
    try:
        return _Run(seed, scenario).outcome()
    except Exception as error:
        raise Violation(f"simulate({seed}, {scenario}): {type(error).__name__}: {error}") from error


class _Run:
    def __init__(self, seed: int, scenario: Scenario) -> None:
        self.scenario = scenario
        self.world = world = World(seed, scenario.network)
        rng = world.rng
        heads, ranks = rng.choice([(1, 1), (2, 1), (2, 2), (1, 2)])
        patient = scenario.patient
        self.prefill_limits = PrefillLimits(
            parcel_tokens=rng.choice([1, 2, 3]) * BLOCK,
            lease_s=40.0 if patient else rng.choice([3.0, 6.0]),
            buffer_wait_s=150.0 if patient else rng.choice([3.0, 8.0]),
            verdict_keep_s=100.0 if patient else 20.0,
            max_transfers=64,
            max_peers=8,
            peer_keep_s=30.0,
        )
        link = LinkLimits(
            hello_deadline_s=60.0 if patient else 3.0,
            resend_s=0.5,
            renew_s=1.0,
            hello_every_s=rng.choice([4.0, 15.0]),
            forget_s=rng.choice([0.5, 60.0]),
            max_links=rng.choice([1, 256]),
        )
        self.decode_limits = DecodeLimits(
            link=link,
            admission_deadline_s=90.0 if patient else 5.0,
            load_deadline_s=150.0 if patient else 15.0,
            reads=rng.choice([1, 2, 4]),
        )
        claim_hold_s = 150.0 if patient else 8.0
        # Room for one to a few parcels: requests must wait for the buffer and be served parcel by parcel.
        block_bytes = 2 * heads * 1088
        roomy = rng.choice([1, 2, 5, 40]) if not patient else rng.choice([4, 40])
        self.prefills = [
            SimulatedPrefill(
                world,
                i,
                heads=heads,
                ranks=ranks,
                buffer_bytes=-(-roomy * block_bytes // 256) * 256 + 256,
                blocks=rng.choice([10, 30]),
                limits=self.prefill_limits,
                pack_failures=scenario.pack_failures,
                preemptions=scenario.preemptions,
            )
            for i in range(rng.choice([1, 1, 2]))
        ]
        first = rng.choice([1, heads])
        chips = [first, rng.choice([1, heads]) if scenario.layouts else first]
        codecs = ["bfp8", "bfp4"] if scenario.layouts else ["bfp8", "bfp8"]
        self.decodes = [
            SimulatedDecode(
                world,
                i,
                facts=decode_facts(heads=heads, chips=chips[i], codec=codecs[i]),
                limits=self.decode_limits,
                claim_hold_s=claim_hold_s,
                blocks=60 if patient else rng.choice([12, 40]),
                faults=scenario.engine,
            )
            for i in range(rng.choice([1, 2]))
        ]
        for decode in self.decodes:
            if world.chance(0.5):
                for prefill in self.prefills:
                    for rank in prefill.ranks:
                        decode.connect(rank.address)
        self.wishes: list[Wish] = []
        # Drawn ahead of the run, so that the clients want the same whatever the network does.
        for n in range(scenario.prompts):
            self._client(n)
        for process in [*self.prefills, *self.decodes]:
            if world.chance(scenario.restarts):
                world.after(world.between(0.5, 8.0), lambda p=process: self._restart(p))

    def outcome(self) -> Outcome:
        self.world.run(40.0)
        # Nothing new comes; every deadline may pass.
        self.world.run(40.0 + self.scenario.calm_s)
        for process in [*self.prefills, *self.decodes]:
            process.require_idle()
        for wish in self.wishes:
            require(wish.outcome is not None, f"{wish.name} never ended")
        return Outcome(
            {w.name: str(w.outcome) for w in self.wishes}, {w.name: w.reason for w in self.wishes}, self.world.steps
        )

    def _restart(self, process: Any) -> None:
        process.stop()
        self.world.after(self.world.between(0.01, 3.0), process.start)

    def _client(self, n: int) -> None:
        """One prompt: computed by a prefill instance, then sent to decode once, several times, wrongly or never."""
        world = self.world
        rng = world.rng
        tokens = rng.randint(2, 6 * BLOCK)
        prompt = Prompt(world.id(), f"{rng.getrandbits(256):064x}", tokens)
        abandon = world.chance(self.scenario.aborts / 2)
        kind = rng.choice(["once", "once", "once", "twice", "list", "never"])
        uses = {"once": [True], "twice": [True, True], "list": [False, True, False], "never": []}[kind]
        rng.shuffle(uses)
        plans = []
        for k, own in enumerate(uses):
            digest = prompt.digest if own else f"{rng.getrandbits(256):064x}"
            prefix = rng.choice([0, 0, rng.randint(0, (tokens - 1) // BLOCK)])
            content = prompt.content if own else lambda block: "the KV of another prompt"
            wish = Wish(f"{n}.{k}", digest, prompt.transfer, tokens, content, prefix)
            abort_after = world.between(0, 4.0) if world.chance(self.scenario.aborts) else None
            plans.append((wish, rng.choice(self.decodes), world.between(0.05, 0.5), abort_after))

        def done(params: dict[str, Any]) -> None:
            for wish, decode, delay, abort_after in plans:
                self.wishes.append(wish)
                world.after(delay, lambda w=wish, d=decode, a=abort_after: d.wish(w, params, a))

        prefill = rng.choice(self.prefills)
        world.after(world.between(0, 6.0), lambda: prefill.submit(prompt, done, abandon))


def lossless(scenario: Scenario) -> Scenario:
    return replace(scenario, network=QUIET)
