"""Contestants run in turns, and what may be said of their times.

A machine that does other things too slows everything down for a while.  So contestants are run in rounds, each once a
round in an order of its own, and two of them are compared round by round: what slows a round slows both.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

__all__ = ["TOO_WIDE", "Ratio", "Spread", "compared", "rounds"]

# A ratio whose middle half is wider than this part of it is not told from its neighbours.
TOO_WIDE = 0.1
_LEAST_ROUNDS = 3


def rounds(names: Sequence[str], count: int, seed: int) -> Iterator[tuple[int, str]]:
    """(round, contestant) of ``count`` rounds; the order within each is drawn from ``seed``."""
    source = random.Random(seed)
    for number in range(count):
        order = list(names)
        source.shuffle(order)
        for name in order:
            yield number, name


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, the quartiles, and both ends of some measurements; units are theirs."""

    median: float
    low: float
    high: float
    least: float
    most: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """ValueError where there are none."""
        if not values:
            raise ValueError("nothing was measured")
        ordered = sorted(values)
        quartiles = [_quantile(ordered, q) for q in (0.25, 0.5, 0.75)]
        return cls(quartiles[1], quartiles[0], quartiles[2], ordered[0], ordered[-1], len(ordered))


@dataclass(frozen=True, slots=True)
class Ratio:
    """``value``: the median of a round's time of ``of`` divided by its time of ``to``; ``low``, ``high``: quartiles.

    ``refused`` says why there is no value: too few rounds, or the spread swallows it.
    """

    of: str
    to: str
    value: float | None
    low: float | None
    high: float | None
    refused: str = ""


def compared(of: str, times: Mapping[int, float], to: str, others: Mapping[int, float]) -> Ratio:
    """The ratio of two contestants' times, by round.

    It is refused where its quartiles are further apart than its distance from 1 **and** than TOO_WIDE of it: then it
    shows neither that one is faster nor that both are equally fast.
    """
    both = [times[number] / others[number] for number in times.keys() & others.keys()]
    if len(both) < _LEAST_ROUNDS:
        return Ratio(of, to, None, None, None, f"{len(both)} rounds of both, at least {_LEAST_ROUNDS} are needed")
    found = Spread.of(both)
    width = found.high - found.low
    if width > abs(found.median - 1) and width > TOO_WIDE * found.median:
        reason = f"the spread swallows it: half of the rounds lie between {found.low:.2f} and {found.high:.2f}"
        return Ratio(of, to, None, None, None, reason)
    return Ratio(of, to, found.median, found.low, found.high)


def _quantile(ordered: Sequence[float], share: float) -> float:
    """Linear between the two neighbours, as numpy and R (type 7) do by default."""
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)
