"""Which deployment, with which faults, a seed stands for."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

from hawk_connector.transport.memory_channel import NetworkFaults
from tests.protocol.simulated_decode import DecodeFaults
from tests.protocol.simulated_engine import EngineFaults
from tests.protocol.simulated_prefill import PrefillFaults
from tests.protocol.simulation import QUIET, ROUGH, Outcome, Scenario, lossless, simulate
from tests.protocol.world import Violation

LOSS = Scenario(network=ROUGH, prefill=PrefillFaults(preempt=0.1), patient=True, calm_s=450.0)
FAULTS = Scenario(
    engine=EngineFaults(fail=0.2, hang=0.1),
    prefill=PrefillFaults(pack=0.15, preempt=0.1),
    decode=DecodeFaults(preempt=0.2, fail=True),
    aborts=0.3,
    early=0.2,
)
CHAOS = Scenario(
    network=ROUGH,
    engine=EngineFaults(fail=0.15, hang=0.1),
    prefill=PrefillFaults(pack=0.05, preempt=0.15),
    decode=DecodeFaults(preempt=0.2, fail=True),
    aborts=0.3,
    restarts=0.4,
    layouts=True,
    early=0.2,
)
RESTARTS = Scenario(
    network=ROUGH,
    prefill=PrefillFaults(preempt=0.1),
    restarts=1.0,
    joins=0.3,
    drains=0.3,
    engine=EngineFaults(fail=0.05),
)
CLOCKS = Scenario(
    network=ROUGH, engine=EngineFaults(fail=0.05, longest_s=2.5), pauses=0.7, jumps=0.7, skew=0.3, cuts=0.5
)
HOSTILE = Scenario(rogue=1.0, misfits=0.3, tampered=0.3, resets=0.3, aborts=0.1, engine=EngineFaults(fail=0.05))
IN_PLACE = Scenario(
    engine=EngineFaults(fail=0.05, longest_s=2.5),
    prefill=PrefillFaults(preempt=0.25),
    direct=1.0,
    early=0.8,
    aborts=0.1,
)
NAMED = {
    "loss": LOSS,
    "faults": FAULTS,
    "chaos": CHAOS,
    "restarts": RESTARTS,
    "clocks": CLOCKS,
    "hostile": HOSTILE,
    "in place": IN_PLACE,
}


def scenario_of(seed: int) -> tuple[str, Scenario]:
    """One of the named scenarios, or (half of the seeds) every fault with a chance of its own."""
    if seed % 2:
        name = list(NAMED)[seed // 2 % len(NAMED)]
        return name, NAMED[name]
    rng = random.Random(seed)

    def chance(most: float) -> float:
        return rng.random() * most if rng.random() < 0.5 else 0.0

    rough = NetworkFaults(chance(0.2), chance(0.3), chance(0.3), 0.001, rng.choice([0.01, 0.2, 0.8, 3.0]))
    return "mixed", Scenario(
        network=rng.choice([QUIET, rough]),
        prefill=PrefillFaults(pack=chance(0.2), preempt=chance(0.2)),
        decode=DecodeFaults(preempt=chance(0.4), fail=rng.random() < 0.5),
        engine=EngineFaults(fail=chance(0.3), hang=chance(0.2), corrupt=chance(0.2), longest_s=rng.choice([0.6, 2.5])),
        aborts=chance(0.5),
        restarts=chance(0.6),
        pauses=chance(0.6),
        jumps=chance(0.6),
        skew=chance(0.4),
        cuts=chance(0.6),
        joins=chance(0.5),
        drains=chance(0.3),
        resets=chance(0.4),
        rogue=chance(1.0),
        misfits=chance(0.4),
        tampered=chance(0.4),
        layouts=rng.random() < 0.3,
        prompts=rng.choice([4, 8, 16]),
        direct=rng.choice([0.0, 0.3, 0.8]),
        early=chance(0.4),
    )


def play(seed: int, trace: Callable[[str], None] | None = None) -> tuple[str, Outcome]:
    """Runs what the seed stands for; Violation where a rule is broken."""
    name, scenario = scenario_of(seed)
    outcome = simulate(seed, scenario, trace)
    if scenario.patient:
        rule_6_loss_changes_nothing_but_time(seed, scenario, outcome)
    return name, outcome


def rule_6_loss_changes_nothing_but_time(seed: int, scenario: Scenario, rough: Outcome) -> None:
    """The same deployment on a network that loses, repeats and reorders nothing: every request goes as well."""
    calm = simulate(seed, lossless(scenario))
    rough.checks[6] += 1
    if by_transfer(rough) != by_transfer(calm):
        raise Violation(6, f"seed {seed}: {rough.wishes} {rough.reasons}, without loss {calm.wishes}; {scenario}")
    odd = set(rough.wishes.values()) - {"loaded", "gone", "cached"}
    if odd:
        raise Violation(6, f"seed {seed}: loss alone makes requests {odd}: {rough.wishes} {rough.reasons}; {scenario}")


def by_transfer(outcome: Outcome) -> dict[str, Counter[str]]:
    """Which request of a transfer came first is a matter of time; how many of each outcome there are is not.

    A claim for which the cache has all but the last token meanwhile is as good as a load.
    """
    groups: dict[str, Counter[str]] = {}
    for name, result in outcome.wishes.items():
        groups.setdefault(name.split(".")[0], Counter())["loaded" if result == "cached" else result] += 1
    return groups
