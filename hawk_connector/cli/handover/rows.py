"""What was measured, as rows and ratios."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hawk_connector.bench.rounds import Ratio, Spread, compared
from hawk_connector.cli.demo_sides import Movement

from .client import Sample
from .options import System

__all__ = ["Measured", "p90", "ratios", "row"]

_MS = 1000.0


@dataclass
class Measured:
    """Of one system at one concurrency: samples by wave, HAWK's own reports by request, and who was up beside it."""

    system: System
    concurrency: int
    beside: tuple[str, ...]
    waves: dict[int, list[Sample]] = field(default_factory=dict)
    movements: dict[str, Movement] = field(default_factory=dict)
    equal: int = 0
    ties: int = 0

    @property
    def samples(self) -> list[Sample]:
        return [sample for wave in self.waves.values() for sample in wave]

    def by_wave(self) -> dict[int, float]:
        """Median hand-over of each wave, in seconds."""
        return {number: statistics.median(s.handover_s for s in wave) for number, wave in self.waves.items()}


def row(found: Measured, idle: Mapping[str, float]) -> dict[str, Any]:
    """``idle``: share of a core of each of the system's servers.  Times in ms; ValueError where nothing was measured.

    ``itl_ms``: the decode server's own step at that context, which every hand-over holds once; ``rest_ms``: the
    hand-over without it, medians of both.
    """
    handovers = [sample.handover_s * _MS for sample in found.samples]
    spread = Spread.of(handovers)
    step = statistics.median(step for sample in found.samples for step in sample.steps_s) * _MS
    return {
        "system": found.system.name,
        "concurrency": found.concurrency,
        "p50_ms": spread.median,
        "p90_ms": p90(handovers),
        "min_ms": spread.least,
        "max_ms": spread.most,
        "n": spread.count,
        "itl_ms": step,
        "rest_ms": spread.median - step,
        "prefill_ms": statistics.median(sample.prefill_s for sample in found.samples) * _MS,
        "parts": _parts(found),
        "idle_cpu": dict(idle),
        "equal": found.equal,
        "ties": found.ties,
        "beside": list(found.beside),
        "note": found.system.note,
        "handover_ms": handovers,
    }


def p90(values: Sequence[float]) -> float:
    """Linear between the two nearest, as for the median of an even number."""
    return statistics.quantiles(values, n=10, method="inclusive")[-1] if len(values) > 1 else values[0]


def ratios(all_found: Sequence[Measured]) -> list[tuple[dict[str, Any], Ratio]]:
    """Each HAWK pair to each NIXL pair that was up together with it, wave by wave."""
    made = []
    for ours in all_found:
        for theirs in all_found:
            together = theirs.system.name in ours.beside and theirs.concurrency == ours.concurrency
            if ours.system.connector == "hawk" and theirs.system.connector == "nixl" and together:
                ratio = compared(ours.system.name, ours.by_wave(), theirs.system.name, theirs.by_wave())
                made.append(({"concurrency": ours.concurrency}, ratio))
    return made


def _parts(found: Measured) -> dict[str, float]:
    """Medians in ms, of HAWK's own reports; both sides and the client are on one machine, so on one clock.

    ``pack``, ``pull`` (without its end, ``land``): work.  ``until_landed``: from the prefill side's answer to the end
    of decode's load; ``from_landed``: from there to the first token, with decode's own step in it.
    """
    if found.system.connector is None:
        return {}
    values: dict[str, list[float]] = {}
    for sample in found.samples:
        moved = found.movements.get(sample.id)
        if moved is None or moved.prefill is None or moved.decode is None:
            continue
        ours, theirs = moved.prefill, moved.decode
        seconds = {
            "pack": ours.pack_s,
            "pull": None if theirs.pull_s is None else theirs.pull_s - (theirs.land_s or 0.0),
            "land": theirs.land_s,
            "wait": theirs.wait_s,
            "until_landed": None if theirs.landed_at is None else theirs.landed_at - sample.answered_at,
            "from_landed": None if theirs.landed_at is None else sample.first_at - theirs.landed_at,
        }
        for name, value in seconds.items():
            if value is not None:
                values.setdefault(name, []).append(value * _MS)
    return {name: statistics.median(each) for name, each in values.items()}
