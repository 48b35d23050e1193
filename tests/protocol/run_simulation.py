"""Simulated seeds from the command line: `python -m tests.protocol.run_simulation 0..20000`, or one with its trace.

The exit status is 1 where a rule was broken.  A broken seed is printed with its rule and replays alone.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import hawk_connector
from tests.protocol.simulation_scenarios import play
from tests.protocol.world import Violation

_CHUNK = 50


@dataclass
class Tally:
    """What some seeds showed together."""

    seeds: int = 0
    steps: int = 0
    broken: list[tuple[int, int, str]] = field(default_factory=list)  # seed, rule, what
    scenarios: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    covered: Counter[tuple[str, str]] = field(default_factory=Counter)
    checks: Counter[int] = field(default_factory=Counter)

    def add(self, other: Tally) -> None:
        self.seeds += other.seeds
        self.steps += other.steps
        self.broken += other.broken
        self.scenarios.update(other.scenarios)
        self.outcomes.update(other.outcomes)
        self.covered.update(other.covered)
        self.checks.update(other.checks)


def run(seeds: range, stop_at: int = 10) -> Tally:
    """Plays the seeds one after another; no more of them once ``stop_at`` are broken."""
    tally = Tally()
    for seed in seeds:
        if len(tally.broken) >= stop_at:
            break
        tally.seeds += 1
        try:
            name, outcome = play(seed)
        except Violation as violation:
            tally.broken.append((seed, violation.rule, str(violation)))
            continue
        tally.scenarios[name] += 1
        tally.steps += outcome.steps
        tally.outcomes.update(outcome.wishes.values())
        tally.covered.update(outcome.covered)
        tally.checks.update(outcome.checks)
    return tally


def run_all(seeds: range, processes: int, seconds: float) -> Tally:
    """The same over several processes, the first seeds first; those that are left after ``seconds`` are left out."""
    total, began = Tally(), time.monotonic()
    chunks = [seeds[i : i + _CHUNK] for i in range(0, len(seeds), _CHUNK)]
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        for tally in pool.imap(run, chunks):
            total.add(tally)
            if time.monotonic() - began > seconds:
                break
    return total


def report(tally: Tally, seconds: float) -> str:
    lines = [
        f"{tally.seeds} seeds, {tally.steps} events in {seconds:.0f} s; broken: {len(tally.broken)}",
        f"scenarios: {_counts(tally.scenarios)}",
        f"requests:  {_counts(tally.outcomes)}",
        "checks of each rule: " + ", ".join(f"{rule}: {n}" for rule, n in sorted(tally.checks.items())),
        "faults, and the phases of the requests that they hit:",
    ]
    for fault in sorted({fault for fault, _ in tally.covered}):
        phases = Counter({phase or "-": n for (name, phase), n in tally.covered.items() if name == fault})
        lines.append(f"  {fault:34} {_counts(phases)}")
    for seed, rule, what in sorted(tally.broken)[:10]:
        lines.append(f"seed {seed} breaks rule {rule}: {what}")
    return "\n".join(lines)


def _counts(counter: Counter[str]) -> str:
    return ", ".join(f"{name} {n}" for name, n in counter.most_common())


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.protocol.run_simulation", description=__doc__)
    parser.add_argument("seeds", help="one seed, which prints its events, or a range such as 0..20000 (end excluded)")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=86400.0, help="leave out the seeds that are left then")
    parser.add_argument("--first", action="store_true", help="stop at the first broken seed and print it as JSON")
    options = parser.parse_args()
    start, dots, end = options.seeds.partition("..")
    if not dots:
        return _one(int(start))
    seeds = range(int(start), int(end))
    if options.first:
        tally = run(seeds, stop_at=1)
        seed, rule, what = tally.broken[0] if tally.broken else (None, None, "")
        package = str(Path(hawk_connector.__file__).parent)
        said = {"package": package, "seeds": tally.seeds, "seed": seed, "rule": rule, "what": what[:400]}
        print(json.dumps(said))
        return int(seed is not None)
    began = time.monotonic()
    tally = run_all(seeds, options.processes, options.seconds)
    print(report(tally, time.monotonic() - began))
    if tally.seeds < len(seeds):
        print(f"not run: {seeds.start + tally.seeds}..{seeds.stop}")
    return int(bool(tally.broken))


def _one(seed: int) -> int:
    try:
        name, outcome = play(seed, print)
    except Violation as violation:
        print(f"broken: {violation}")
        return 1
    print(f"{name}: {outcome.wishes}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
