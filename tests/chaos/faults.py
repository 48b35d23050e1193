"""What is done to the two sides, drawn from a seed: the kind, whom it hits, for how long, and in which phase."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    KILL_PREFILL = "kill -9 prefill"
    KILL_DECODE = "kill -9 decode"
    STOP_PREFILL = "SIGSTOP prefill"
    STOP_DECODE = "SIGSTOP decode"
    CUT = "network cut"
    UNPLUG_PREFILL = "unplug prefill"
    UNPLUG_DECODE = "unplug decode"
    DISK_FULL = "log disk full"
    CLIENT_GONE = "client gone"
    PRESSURE = "preemption"


class Phase(Enum):
    """Where a transfer is, as both sides' counts and the clients show it."""

    PREFILLING = "prefilling"
    QUEUED = "queued for buffer"
    PACKING = "packing"
    OFFERED = "offered"
    BETWEEN = "between the legs"
    ADMISSION = "admission"
    READING = "reading"
    QUARANTINE = "quarantine"
    DECODING = "decoding"


# Of a hundred faults.  Those that cost a start of an engine are few.
WEIGHTS = {
    Kind.KILL_PREFILL: 5,
    Kind.KILL_DECODE: 5,
    Kind.STOP_PREFILL: 12,
    Kind.STOP_DECODE: 12,
    Kind.CUT: 7,
    Kind.UNPLUG_PREFILL: 5,
    Kind.UNPLUG_DECODE: 5,
    Kind.DISK_FULL: 8,
    Kind.CLIENT_GONE: 31,
    Kind.PRESSURE: 10,
}
# Aimed at more often where less time is spent.
PHASES = {
    Phase.PREFILLING: 3,
    Phase.QUEUED: 2,
    Phase.PACKING: 2,
    Phase.OFFERED: 2,
    Phase.BETWEEN: 2,
    Phase.ADMISSION: 2,
    Phase.READING: 6,
    Phase.QUARANTINE: 2,
    Phase.DECODING: 3,
}

# What a fault keeps busy until it is undone; two faults never share one.
_OCCUPIES = {
    Kind.KILL_PREFILL: ("prefill",),
    Kind.STOP_PREFILL: ("prefill",),
    Kind.KILL_DECODE: ("decode",),
    Kind.STOP_DECODE: ("decode",),
    Kind.CUT: ("network",),
    Kind.UNPLUG_PREFILL: ("network",),
    Kind.UNPLUG_DECODE: ("network",),
    Kind.DISK_FULL: ("disk",),
}


@dataclass(frozen=True, slots=True)
class Fault:
    """``pause_s``: after the fault before; ``delay_s``: after its phase was seen; ``lasts_s``: until it is undone.

    ``alone``: the others are undone first, and KV moves again; else it may come on top of another.
    """

    number: int
    kind: Kind
    phase: Phase
    pause_s: float
    delay_s: float
    lasts_s: float
    alone: bool

    @property
    def occupies(self) -> tuple[str, ...]:
        return _OCCUPIES.get(self.kind, ())


def draw(count: int, seed: int, past_every_deadline_s: float) -> Iterator[Fault]:
    """``count`` faults; every kind comes about as often as its weight says, whatever the seed.

    A stop or a cut is either a hiccup or outlives every deadline.
    """
    rng = random.Random(f"faults/{seed}")
    kinds = _kinds(count, rng)
    for number, kind in enumerate(kinds):
        (phase,) = rng.choices(list(PHASES), list(PHASES.values()))
        hiccup = rng.random() < 0.5
        lasts_s = rng.uniform(0.2, 2.0) if hiccup else past_every_deadline_s * rng.uniform(1.0, 1.2)
        if kind is Kind.DISK_FULL:
            lasts_s = rng.uniform(2.0, 10.0)
        pause_s, delay_s = rng.uniform(0.1, 0.8), rng.choice((0.0, rng.uniform(0.0, 0.05)))
        yield Fault(number, kind, phase, pause_s, delay_s, lasts_s, alone=rng.random() < 0.4)


def _kinds(count: int, rng: random.Random) -> list[Kind]:
    """Each kind once for every share of ``count`` that it has, the rest by chance."""
    whole = sum(WEIGHTS.values())
    kinds = [kind for kind, weight in WEIGHTS.items() for _ in range(count * weight // whole)]
    # The kinds that a short run would leave out come first.
    missing = [kind for kind in WEIGHTS if kind not in kinds]
    rng.shuffle(missing)
    kinds += missing[: count - len(kinds)]
    kinds += rng.choices(list(WEIGHTS), list(WEIGHTS.values()), k=count - len(kinds))
    rng.shuffle(kinds)
    return kinds
