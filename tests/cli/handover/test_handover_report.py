"""What is printed, and what the command refuses before it starts anything."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from hawk_connector.bench.rounds import Ratio
from hawk_connector.cli.handover.report import handover_table
from hawk_connector.cli.main import app

FIGURES: dict[str, Any] = {"p90_ms": 97.04, "min_ms": 81.0, "max_ms": 1234.5, "n": 12, "itl_ms": 57.0, "rest_ms": 29.0}


def printed(rows: list[dict[str, Any]], ratios: list[tuple[dict[str, Any], Ratio]]) -> list[str]:
    text = io.StringIO()
    handover_table(rows, ratios, ["a note [of] it"], Console(file=text, width=160))
    return text.getvalue().splitlines()


def test_a_line_has_the_figures_and_each_servers_idle_share() -> None:
    idle = {"prefill": 0.0123, "decode": 0.955}
    row = {"system": "hawk", "concurrency": 4, "p50_ms": 86.04, **FIGURES, "idle_cpu": idle, "parts": {}}
    (line,) = [line for line in printed([row], []) if "hawk" in line.split()]
    assert " ".join(line.split()) == "4 hawk 86.0 97.0 81.0 1,234.5 12 57.0 29.0 1.2 + 95.5"


def test_parts_are_shown_of_those_that_have_them() -> None:
    common = {"concurrency": 1, "p50_ms": 1.0, **FIGURES, "idle_cpu": {}}
    rows = [
        {"system": "direct", **common, "parts": {"pull": 9.25, "until_landed": 30.0}},
        {"system": "hawk", **common, "parts": {"pack": 4.0, "pull": 8.0}},
        {"system": "nixl", **common, "parts": {}},
    ]
    lines = printed(rows, [])
    below = [line.split() for line in lines[next(i for i, line in enumerate(lines) if "parts" in line) :]]
    assert ["at", "once", "system", "pull", "until", "landed", "pack"] in below
    assert ["1", "direct", "9.2", "30.0"] in below and ["1", "hawk", "8.0", "4.0"] in below
    assert not any("nixl" in words for words in below)


def test_a_ratio_is_said_or_the_reason_why_not() -> None:
    said = Ratio("direct", "nixl-slowed", 0.914, 0.88, 0.95)
    refused = Ratio("direct", "nixl-slowed", None, None, None, "the spread swallows it")
    lines = printed([], [({"concurrency": 1}, said), ({"concurrency": 4}, refused)])
    assert "1 at once: direct / nixl-slowed = 0.91 (quartiles 0.88-0.95)" in lines
    assert "4 at once: direct / nixl-slowed = not said, the spread swallows it" in lines
    assert lines[-1] == "a note [of] it"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--systems", "direkt"], "Did you mean direct?"),
        (["--concurrency", "1,0"], "numbers of 1 to 64"),
        (["--systems", "direct", "--model", "./no-such-directory"], "is no directory"),
    ],
)
def test_what_cannot_be_is_refused_before_a_server_starts(options: list[str], said: str) -> None:
    result = CliRunner().invoke(app, ["bench", "handover", *options])
    assert result.exit_code == 2
    assert said in result.output
