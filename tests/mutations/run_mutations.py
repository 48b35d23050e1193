"""Every mutant against the simulation: `python -m tests.mutations.run_mutations`; exit status 1 where one survives."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.mutations.mutant import Caught, Mutant, Stale, hunt
from tests.mutations.mutants import MUTANTS

SEEDS = range(1500)


def verdict(mutant: Mutant) -> tuple[Mutant, Caught | str]:
    try:
        with tempfile.TemporaryDirectory(prefix="hawk-mutant-") as folder:
            return mutant, hunt(mutant, Path(folder), SEEDS)
    except Stale as stale:
        return mutant, str(stale)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutations.run_mutations", description=__doc__)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--only", default="", help="those whose name contains this")
    options = parser.parse_args()
    chosen = [mutant for mutant in MUTANTS if options.only in mutant.name]
    began, survived = time.monotonic(), 0
    print(f"{'mutant':52} {'breaks':8} caught")
    with ThreadPoolExecutor(options.processes) as pool:
        for mutant, found in pool.map(verdict, chosen):
            rules = "/".join(map(str, mutant.rules))
            if isinstance(found, str):
                said, ok = f"STALE {found}", False
            elif found.rule is None:
                said, ok = f"SURVIVES {found.seeds} seeds", False
            else:
                ok = found.rule in mutant.rules
                said = f"by rule {found.rule} at seed {found.seed}, after {found.seeds} seeds"
                said += "" if ok else f": ANOTHER RULE: {found.what}"
            survived += not ok
            print(f"{mutant.name:52} {rules:8} {said}", flush=True)
    print(f"{len(chosen)} mutants, {survived} not caught by their rule, {time.monotonic() - began:.0f} s")
    return int(survived > 0)


if __name__ == "__main__":
    sys.exit(main())
