"""Decode speed of the simulated NPU beside vLLM's stock CPU backend, on this machine, one thread each.

    python benchmarks/decode_speed.py [--model DIR] [--context 512] [--tokens 64] [--rounds 3]

Each vLLM instance lives in a process of its own.  The two of a pair are measured in turns, round by round, so that
other load on the machine meets both; a figure is the median time of a decode step.  Exit code 1 where the NPU decodes
at less than half of the stock backend's tokens per second.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO

POOLS = ("fp32", "bf16", "bfp8")
BOUND = 0.5
ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


@dataclass(frozen=True)
class Case:
    """One run: ``tokens`` decode steps that are centred on ``context`` tokens."""

    model: str
    context: int
    tokens: int


class Instance:
    """A vLLM instance in a child process that measures one round for each line it is sent."""

    def __init__(self, case: Case, pool: str | None) -> None:
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the child)
        arguments = [json.dumps(vars(case)), pool or "stock"]
        environment = {**os.environ, **ONE_THREAD, "HAWK_NPU": "simulated" if pool else ""}
        self._child = subprocess.Popen(
            [sys.executable, __file__, "--measure", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=environment,
            text=True,
        )

    def measure(self) -> list[float]:
        """Seconds of each decode step of one round."""
        assert self._child.stdin and self._child.stdout
        self._child.stdin.write("round\n")
        self._child.stdin.flush()
        for line in self._child.stdout:
            if line.startswith("steps "):
                steps: list[float] = json.loads(line.removeprefix("steps "))
                return steps
        self._log.seek(0)
        sys.exit(f"a vLLM instance ended early; its log:\n{self._log.read().decode()[-4000:]}")

    def close(self) -> None:
        assert self._child.stdin
        self._child.stdin.close()
        self._child.wait(timeout=60)


def measure_in_child(case: Case, pool: str) -> None:
    """The child: one vLLM in this process, a round for each line of stdin."""
    from vllm import LLM, SamplingParams

    npu = {} if pool == "stock" else {"additional_config": {"tt_plugin": {"kv_dtype": pool}}}
    llm = LLM(
        model=case.model,
        dtype="float32",
        max_model_len=case.context + case.tokens,
        enforce_eager=True,
        max_num_seqs=1,
        kv_cache_memory_bytes=256 << 20,
        distributed_executor_backend="uni",
        enable_prefix_caching=False,
        **npu,
    )
    engine = llm.llm_engine
    source = random.Random(0)
    params = SamplingParams(max_tokens=case.tokens + 1, temperature=0, ignore_eos=True)
    for number, _ in enumerate(sys.stdin):
        prompt = [source.randrange(100, 1000) for _ in range(case.context - case.tokens // 2)]
        engine.add_request(str(number), {"prompt_token_ids": prompt}, params)
        steps: list[float] = []
        generated = 0
        while engine.has_unfinished_requests():
            start = time.perf_counter()
            outputs = engine.step()
            seconds = time.perf_counter() - start
            if generated:
                steps.append(seconds)
            generated += len(outputs)
        print("steps", json.dumps(steps), flush=True)
    sys.stdout.flush()
    os._exit(0)  # vLLM's own shutdown takes seconds and prints tracebacks of no interest here


def compare(case: Case, rounds: int) -> bool:
    """Prints a line for each pool; whether all are within the bound."""
    print(
        f"decode at {case.context} tokens of context, one thread each, fp32 weights, "
        f"medians of {rounds} x {case.tokens} steps"
    )
    print(f"{'pool':6} {'stock tok/s':>12} {'NPU tok/s':>12} {'ratio':>8}")
    held = True
    stock = Instance(case, None)
    stock.measure()
    for pool in POOLS:
        npu = Instance(case, pool)
        npu.measure()  # the first round meets cold caches
        times: dict[Instance, list[float]] = {stock: [], npu: []}
        for _ in range(rounds):
            for instance, seconds in times.items():
                seconds += instance.measure()
        npu.close()
        ours, theirs = (1 / statistics.median(times[instance]) for instance in (npu, stock))
        held = held and ours >= BOUND * theirs
        print(f"{pool:6} {theirs:12.1f} {ours:12.1f} {ours / theirs:8.2f}", flush=True)
    stock.close()
    return held


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="model directory; default: SmolLM2-135M-Instruct, converted if need be")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        measure_in_child(Case(**json.loads(arguments.measure[0])), arguments.measure[1])
        return
    if arguments.tokens < 1 or arguments.context <= arguments.tokens // 2 or arguments.rounds < 1:
        parser.error("rounds and tokens must be positive and context more than half of tokens")
    # This file may be run from anywhere; the package is beside it.
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from hawk_connector.cli.models import DEFAULT_MODEL, model_reference

    model = model_reference(arguments.model or DEFAULT_MODEL, print)
    if not compare(Case(model, arguments.context, arguments.tokens), arguments.rounds):
        sys.exit(f"below the bound: the NPU must decode at {BOUND} or more of the stock backend's speed")


if __name__ == "__main__":
    main()
