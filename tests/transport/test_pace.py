"""How long reads are slept through, by numbers worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from hawk_connector.plan.segments import Segments
from hawk_connector.transport.pace import Pace

MIB = 1024 * 1024


def read(count: int, nbytes: int) -> Segments:
    """``count`` segments of ``nbytes`` each."""
    zeros = np.zeros(count, dtype=np.int64)
    return Segments(zeros, zeros, np.full(count, nbytes, dtype=np.int64))


def test_nothing_is_known_at_first() -> None:
    assert Pace().sleep_s(read(1, 10**9)) == 0.0


def test_four_fifths_of_what_the_last_one_took() -> None:
    pace = Pace()
    pace.took(read(1, 16 * MIB - 16384), 0.1)  # counts as 16 MiB
    assert pace.sleep_s(read(1, 16 * MIB - 16384)) == pytest.approx(0.08)
    assert pace.sleep_s(read(1, 32 * MIB - 16384)) == pytest.approx(0.16)
    # 1024 segments of 16 KiB cost as much as 32 MiB.
    assert pace.sleep_s(read(1024, 16384)) == pytest.approx(0.16)


def test_short_and_very_long_ones() -> None:
    pace = Pace()
    pace.took(read(1, 16 * MIB - 16384), 0.1)
    assert pace.sleep_s(read(1, 16384)) == 0.0
    assert pace.sleep_s(read(1, 16 * 1024 * MIB)) == 0.5


def test_one_stalled_read_changes_little() -> None:
    pace = Pace()
    pace.took(read(1, 16 * MIB - 16384), 0.1)
    pace.took(read(1, 16 * MIB - 16384), 20.0)
    assert pace.sleep_s(read(1, 16 * MIB - 16384)) == pytest.approx(0.12)


@pytest.mark.parametrize("truly_s", [0.01, 0.1, 0.4])
def test_it_settles_where_the_sleep_ends_before_the_read(truly_s: float) -> None:
    """The reader sees the later of the sleep's end and the read's; whatever was believed before."""
    for believed_s in (0.02, 0.5):
        pace, segments = Pace(), read(1, 16 * MIB)
        pace.took(segments, believed_s)
        for _ in range(60):
            pace.took(segments, max(truly_s, pace.sleep_s(segments)))
        assert 0.7 * truly_s < pace.sleep_s(segments) < truly_s
