"""The findings as a table, and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .findings import Finding, Status

__all__ = ["as_json", "show", "summary"]

_STYLES = {Status.PASS: "green", Status.FAIL: "red", Status.NOT_APPLICABLE: "dim", Status.UNKNOWN: "yellow"}


def show(findings: Sequence[Finding], console: Console) -> None:
    """The table, then what is wrong in one sentence."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("side", "check", "status"):
        table.add_column(heading, no_wrap=True)
    table.add_column("found, and how to mend it", ratio=1)
    for finding in findings:
        style = "yellow" if finding.status is Status.FAIL and not finding.required else _STYLES[finding.status]
        told = Text(finding.found)
        if finding.mend:
            told.append(f"\n> {finding.mend}", style="bold")
        table.add_row(finding.side, finding.name, Text(finding.status.value, style=style), told)
    console.print(table)
    console.print(f"\n{summary(findings)}", markup=False, highlight=False)


def summary(findings: Sequence[Finding]) -> str:
    """What does not work, what could be better, and what could not be checked."""
    sick = [finding.name for finding in findings if finding.sick]
    weak = [finding.name for finding in findings if finding.status is Status.FAIL and not finding.required]
    dark = [finding.name for finding in findings if finding.status is Status.UNKNOWN]
    parts = [f"does not work: {', '.join(sick)}" if sick else "all that this configuration needs is there"]
    if weak:
        parts.append(f"could be better: {', '.join(weak)}")
    if dark:
        parts.append(f"could not check: {', '.join(dark)}")
    return "; ".join(parts)


def as_json(findings: Sequence[Finding]) -> str:
    """``{"healthy": ..., "checks": [{"name", "side", "status", "required", "found", "mend"}, ...]}``."""
    checks = [
        {
            "name": finding.name,
            "side": finding.side,
            "status": finding.status.value,
            "required": finding.required,
            "found": finding.found,
            "mend": finding.mend,
        }
        for finding in findings
    ]
    return json.dumps({"healthy": not any(finding.sick for finding in findings), "checks": checks}, indent=2)
