"""Processor time of servers that have nothing to do."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

__all__ = ["cpu_seconds", "idle_shares"]


def cpu_seconds(group: int, proc: Path = Path("/proc")) -> float:
    """Processor time, user and system, that the living processes of process group ``group`` have used (proc(5))."""
    ticks = 0
    for stat in proc.glob("[0-9]*/stat"):
        try:
            text = stat.read_text()
        except OSError:
            continue  # it has ended
        # The name in parentheses may hold anything; after it come state, ppid, pgrp, .., utime and stime (14, 15).
        fields = text[text.rindex(")") + 2 :].split()
        if int(fields[2]) == group:
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def idle_shares(
    groups: Mapping[str, int], seconds: float, pause: Callable[[float], object] = time.sleep
) -> dict[str, float]:
    """Share of one core, for each name, that its process group uses over ``seconds``."""
    before = {name: cpu_seconds(group) for name, group in groups.items()}
    began = time.monotonic()
    pause(seconds)
    spent = time.monotonic() - began
    return {name: (cpu_seconds(group) - before[name]) / spent for name, group in groups.items()}
