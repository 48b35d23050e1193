"""The protocol under attack: hundreds of deployments in virtual time.  A failure prints the call that replays it."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.protocol.simulated_decode import EngineFaults
from tests.protocol.simulation import ROUGH, Outcome, Scenario, lossless, simulate

LOSS = Scenario(network=ROUGH, preemptions=0.1, patient=True, calm_s=400.0)
FAULTS = Scenario(engine=EngineFaults(fail=0.2, hang=0.1), pack_failures=0.15, preemptions=0.1, aborts=0.3)
CHAOS = Scenario(
    network=ROUGH,
    engine=EngineFaults(fail=0.15, hang=0.1),
    pack_failures=0.05,
    preemptions=0.15,
    aborts=0.3,
    restarts=0.4,
    layouts=True,
)
RESTARTS = Scenario(network=ROUGH, restarts=1.0, preemptions=0.1)
GROUP = 25


def by_transfer(outcome: Outcome) -> dict[str, Counter[str]]:
    """Which request of a transfer came first is a matter of time; how many of each outcome there are is not."""
    groups: dict[str, Counter[str]] = {}
    for name, result in outcome.wishes.items():
        groups.setdefault(name.split(".")[0], Counter())[result] += 1
    return groups


@pytest.mark.slow
@pytest.mark.parametrize("group", range(4))
def test_loss_repetition_and_delay_change_nothing_but_time(group: int) -> None:
    for seed in range(group * GROUP, (group + 1) * GROUP):
        rough, calm = simulate(seed, LOSS), simulate(seed, lossless(LOSS))
        assert by_transfer(rough) == by_transfer(calm), f"seed {seed}: {rough.reasons} against {calm.reasons}"
        assert set(rough.wishes.values()) <= {"loaded", "gone"}, f"seed {seed}: {rough}"


@pytest.mark.slow
@pytest.mark.parametrize("group", range(4))
@pytest.mark.parametrize("scenario", [FAULTS, CHAOS, RESTARTS], ids=["faults", "chaos", "restarts"])
def test_no_fault_breaks_an_invariant(scenario: Scenario, group: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(group * GROUP, (group + 1) * GROUP):
        seen.update(simulate(seed, scenario).wishes.values())
    assert seen["loaded"] > 0 and seen["gone"] > 0, f"the scenario shows nothing: {seen}"


def test_a_seed_replays_its_run_exactly() -> None:
    assert simulate(7, CHAOS) == simulate(7, CHAOS)
