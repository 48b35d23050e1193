"""Token buckets against a plain simulation of the same drops."""

from __future__ import annotations

from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from hawk_connector.rate import RateBook, TokenBucket


@given(st.integers(1, 20), st.integers(1, 20), st.lists(st.integers(0, 40), max_size=60))
def test_what_passes_is_what_exact_arithmetic_lets_pass(per_s: int, burst: int, eighths: list[int]) -> None:
    """Times are multiples of 1/8 s, so that floats are exact too."""
    bucket = TokenBucket.full(float(per_s), float(burst), 0.0)
    level, now = Fraction(burst), Fraction(0)
    for step in eighths:
        now += Fraction(step, 8)
        level = min(Fraction(burst), level + Fraction(step, 8) * per_s)
        expected = level >= 1
        if expected:
            level -= 1
        assert bucket.take(float(now)) == expected


def test_a_clock_that_goes_back_gives_nothing() -> None:
    bucket = TokenBucket.full(1.0, 1.0, 100.0)
    assert bucket.take(100.0)
    assert not bucket.take(50.0)
    assert not bucket.take(50.5)
    assert bucket.take(51.0)


def test_each_name_has_its_own_and_refusals_are_told_once() -> None:
    now = [0.0]
    book = RateBook(1.0, 2.0, 8, lambda: now[0])
    assert [book.allows("a") for _ in range(5)] == [True, True, False, False, False]
    assert book.allows("b")
    assert (book.unsaid("a"), book.unsaid("a"), book.unsaid("b"), book.unsaid("never seen")) == (3, 0, 0, 0)
    now[0] = 1.0
    assert [book.allows("a") for _ in range(2)] == [True, False]


def test_names_are_bounded_and_the_one_least_recently_seen_goes() -> None:
    book = RateBook(1.0, 1.0, 2, lambda: 0.0)
    assert book.allows("a")
    assert book.allows("b")
    assert not book.allows("a")
    assert book.allows("c")  # b goes
    assert len(book) == 2
    assert not book.allows("a")
    assert book.allows("b")
