"""Rounds, spreads, and which ratios may be shown."""

from __future__ import annotations

import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hawk_connector.bench.rounds import Spread, compared, rounds


def test_every_contestant_runs_once_a_round_in_an_order_of_its_own() -> None:
    names = ["a", "b", "c", "d"]
    played = list(rounds(names, 20, seed=3))
    orders = [tuple(name for number, name in played if number == each) for each in range(20)]
    assert [number for number, _ in played] == [number for number in range(20) for _ in names]
    assert all(sorted(order) == names for order in orders)
    assert len(set(orders)) > 10  # of 24
    assert played == list(rounds(names, 20, seed=3)) != list(rounds(names, 20, seed=4))


@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=40))
def test_spreads_are_numpys(values: list[float]) -> None:
    found = Spread.of(values)
    low, median, high = np.percentile(values, [25, 50, 75])
    assert (found.low, found.median, found.high) == pytest.approx((low, median, high))
    assert found.median == pytest.approx(statistics.median(values))
    assert (found.least, found.most, found.count) == (min(values), max(values), len(values))


def test_nothing_has_no_spread() -> None:
    with pytest.raises(ValueError, match="nothing was measured"):
        Spread.of([])


def times(*values: float) -> dict[int, float]:
    return dict(enumerate(values))


def test_a_ratio_is_of_rounds_and_not_of_medians() -> None:
    # The machine got ten times slower half-way: each contestant's own spread is huge, the rounds agree.
    ratio = compared("a", times(2, 20, 2, 20, 2), "b", times(1, 10, 1, 10, 1))
    assert (ratio.value, ratio.low, ratio.high, ratio.refused) == (2, 2, 2, "")


@pytest.mark.parametrize(
    ("values", "value"),
    [
        # Quartiles of five rounds are the second and the fourth.
        ((0.5, 0.97, 1.0, 1.06, 9.0), 1.0),  # as fast: 0.09 apart, within a tenth of 1
        ((0.5, 0.94, 1.0, 1.06, 9.0), None),  # 0.12 apart, and nothing but that is known of it
        ((0.9, 1.25, 1.5, 1.7, 2.0), 1.5),  # 0.45 apart, 0.5 from 1: certainly slower
        ((0.9, 1.15, 1.5, 1.7, 2.0), None),  # 0.55 apart
        ((0.3, 0.45, 0.5, 0.9, 1.0), 0.5),  # 0.45 apart, 0.5 from 1
        ((0.3, 0.35, 0.5, 0.9, 1.0), None),
        ((20.0, 25.0, 30.0, 45.0, 99.0), 30.0),
    ],
)
def test_a_ratio_that_the_spread_swallows_is_refused(values: tuple[float, ...], value: float | None) -> None:
    ratio = compared("a", times(*values), "b", times(1, 1, 1, 1, 1))
    assert ratio.value == value
    assert (ratio.low, ratio.high) == ((None, None) if value is None else (values[1], values[3]))
    assert ("the spread swallows it" in ratio.refused) == (value is None)


def test_two_rounds_are_too_few() -> None:
    ratio = compared("a", {0: 1.0, 1: 1.0, 5: 1.0}, "b", {0: 1.0, 1: 1.0, 2: 1.0})
    assert ratio.value is None
    assert ratio.refused == "2 rounds of both, at least 3 are needed"
