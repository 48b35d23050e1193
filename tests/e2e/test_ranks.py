"""Tensor parallelism on the prefill side, with vLLM's own ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.conftest import prompt
from tests.e2e.harness import REMOTE_DECODE, Engine

pytestmark = pytest.mark.e2e

Start = Callable[..., tuple[Engine, Engine]]


def test_two_ranks_feed_four_chips(tiny: Path, start_pair: Start) -> None:
    prefill, decode = start_pair(
        tiny,
        prefill={"tensor_parallel_size": 2, "distributed_executor_backend": "mp"},
        decode={"npu": {"chips": 4}},
    )
    prompts = [prompt(n, seed=1) for n in (1, 64, 150)]
    reference = prefill.generate(prompts)
    sent = prefill.generate(prompts, [REMOTE_DECODE] * 3, max_tokens=1)
    assert all(len(s["params"]["hawk"]["ranks"]) == 2 for s in sent)
    answers = decode.generate(prompts, [s["params"] for s in sent])
    assert [a["tokens"] for a in answers] == [r["tokens"] for r in reference]
    reports = decode.call("reports")["reports"]
    assert [r["outcome"] for r in reports] == ["completed"] * 3
    # Each chip holds one head; 4 chips x 8 banks got bytes.
    assert len({(chip, bank) for chip, bank, _ in reports[-1]["bank_fill"]}) == 32
    decode.wait_idle()
