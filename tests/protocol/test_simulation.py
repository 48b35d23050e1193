"""The protocol under attack: a thousand deployments in virtual time.

A broken rule is named, with the seed that replays it.
"""

from __future__ import annotations

from collections import Counter

import pytest

from tests.protocol.run_simulation import report, run
from tests.protocol.simulation import simulate
from tests.protocol.simulation_scenarios import CHAOS, LOSS, NAMED, play, rule_6_loss_changes_nothing_but_time

GROUP = 100

# What a run of some hundred seeds must have had: faults, and the phases in which requests were hit by any of them.
FAULTS = {
    "aborted on decode",
    "aborted on prefill",
    "byte arrives late",
    "byte changes on the way",
    "circuit open",
    "decode clock leaps",
    "decode drained and restarted",
    "decode killed and restarted",
    "decode stopped and continued",
    "joins late",
    "late byte meets a dropped engine",
    "malformed message",
    "message held back",
    "message lost",
    "message repeated",
    "pack fails",
    "parameters tampered with",
    "preempted on decode",
    "preempted on prefill",
    "prefill clock leaps",
    "prefill cut off",
    "prefill drained and restarted",
    "prefill killed and restarted",
    "prefill stopped and continued",
    "read fails: fails",
    "read fails: hangs",
    "read fails: other digest",
    "read fails: the peer is gone",
    "read fails: the peer is stopped",
    "read fails: was told to stop",
}
PHASES = {
    "before admission",
    "claimed, waits for blocks",
    "computing",
    "queued for buffer",
    "queued to be packed",
    "packing",
    "offered",
    "claimed",
    "awaits an offer",
    "reading",
    "read, verdict awaited",
    "partly accepted",
    "quarantined",
    "decoding",
}


@pytest.mark.slow
@pytest.mark.parametrize("group", range(10))
def test_no_fault_breaks_an_invariant(group: int) -> None:
    tally = run(range(group * GROUP, (group + 1) * GROUP))
    assert tally.broken == [], report(tally, 0.0)
    assert tally.outcomes["loaded"] > GROUP and tally.outcomes["gone"] > GROUP, "the scenarios show nothing"
    assert min(tally.checks[rule] for rule in range(1, 11)) >= GROUP, tally.checks


@pytest.mark.slow
@pytest.mark.parametrize("group", range(4))
def test_loss_repetition_and_delay_change_nothing_but_time(group: int) -> None:
    for seed in range(group * 15, (group + 1) * 15):
        rule_6_loss_changes_nothing_but_time(seed, LOSS, simulate(seed, LOSS))


@pytest.mark.slow
def test_the_seeds_cover_every_fault_in_every_phase() -> None:
    tally = run(range(2000, 2300))
    faults = {fault for fault, _ in tally.covered}
    phases = {phase for _, phase in tally.covered}
    assert FAULTS - faults == set() and PHASES - phases == set(), report(tally, 0.0)
    assert set(tally.scenarios) == {*NAMED, "mixed"}


def test_a_seed_replays_its_run_exactly() -> None:
    first: list[str] = []
    again: list[str] = []
    assert simulate(7, CHAOS, first.append) == simulate(7, CHAOS, again.append)
    assert first == again and len(first) > 100


def test_each_seed_stands_for_one_deployment() -> None:
    assert Counter(play(seed)[0] for seed in (1, 1)) == {"loss": 2}
