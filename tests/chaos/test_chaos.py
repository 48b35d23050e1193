"""Ten faults on real processes under load; `make chaos FAULTS=100 SEED=n` is the same, longer."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from tests.chaos.campaign import POLICIES, campaign
from tests.chaos.deployment import PAST_EVERY_DEADLINE_S
from tests.chaos.faults import WEIGHTS, Kind, draw
from tests.chaos.load import Outcome
from tests.chaos.network import MISSING
from tests.chaos.report import table
from tests.models.tiny import TinyLlama

FAULTS = 10


@pytest.mark.e2e
@pytest.mark.skipif(bool(MISSING), reason=MISSING)
def test_ten_faults_under_load(model_cache: Path, tmp_path: Path) -> None:
    said: list[str] = []
    verdicts = asyncio.run(campaign(TinyLlama().directory(model_cache), tmp_path, FAULTS, 1, said.append))
    report = "\n".join([*said, table(verdicts)])
    assert [text for verdict in verdicts for text in verdict.broken] == [], report
    assert [verdict.policy for verdict in verdicts] == list(POLICIES)
    assert [hit.fault.kind for verdict in verdicts for hit in verdict.hits] == [f.kind for f in faults(FAULTS, 1)]
    for verdict in verdicts:
        # Not everything was computed by decode alone, and nobody's answers were left unjudged.
        assert verdict.transfers["completed"] > 0, report
        assert verdict.tally.outcomes[Outcome.RIGHT] > 0, report


def faults(count: int, seed: int):  # type: ignore[no-untyped-def]
    return list(draw(count, seed, PAST_EVERY_DEADLINE_S))


def test_faults_are_drawn_from_the_seed_alone() -> None:
    assert faults(40, 7) == faults(40, 7)
    assert faults(40, 7) != faults(40, 8)


def test_every_kind_has_its_share() -> None:
    """A hundred faults: exactly the weights.  Ten: no kind twice while another is missing."""
    assert Counter(f.kind for f in faults(100, 3)) == WEIGHTS
    assert sum(WEIGHTS.values()) == 100
    assert {f.kind for f in faults(13, 3)} == set(Kind)


def test_stops_and_cuts_are_hiccups_or_outlive_every_deadline() -> None:
    lasting = [f.lasts_s for f in faults(400, 5) if f.occupies and f.kind is not Kind.DISK_FULL]
    long = [s for s in lasting if s >= PAST_EVERY_DEADLINE_S]
    assert all(s <= 2.0 for s in lasting if s not in long)
    assert len(lasting) / 3 < len(long) < len(lasting) * 2 / 3
