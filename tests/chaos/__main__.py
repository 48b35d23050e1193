"""`make chaos FAULTS=100 SEED=1`: the chaos run by hand, with a table at its end; exit code 1 for a broken promise."""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from pathlib import Path

from tests.chaos.campaign import campaign
from tests.chaos.network import MISSING
from tests.chaos.report import table
from tests.models.tiny import TinyLlama


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--faults", type=int, default=100, metavar="N", help="how many faults (default 100)")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="what draws faults, prompts and moments")
    parser.add_argument("--models", type=Path, default=Path(".pytest_cache/d/models"), help="where the model is kept")
    parser.add_argument("--logs", type=Path, help="where the engines' logs go (default: a temporary directory)")
    options = parser.parse_args()
    if MISSING:
        print(f"the chaos run {MISSING}", file=sys.stderr)
        return 2
    logs = options.logs if options.logs is not None else Path(tempfile.mkdtemp(prefix="hawk-chaos-"))
    logs.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - began:6.1f} {text}", flush=True)

    model = TinyLlama().directory(options.models)
    verdicts = asyncio.run(campaign(model, logs, options.faults, options.seed, say))
    print(table(verdicts))
    broken = [f"{verdict.policy}: {text}" for verdict in verdicts for text in verdict.broken]
    print(f"seed {options.seed}, logs in {logs}")
    for text in broken:
        print(f"BROKEN {text}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
