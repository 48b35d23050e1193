"""vLLM on the simulated NPU against vLLM's stock CPU backend: same tokens, whatever the device looks like."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import ENVIRONMENT, Engine
from tests.models.tiny import TinyLlama

pytestmark = pytest.mark.vllm

MODEL = TinyLlama(kv_heads=4, heads=8, layers=3)
COMMON = [3 + (7 * i) % 300 for i in range(130)]  # more than two blocks of 64 that several prompts begin with
PROMPTS: list[list[int]] = [
    [5],
    [3 + i % 250 for i in range(64)],
    [9 + (5 * i) % 300 for i in range(65)],
    COMMON,
    [*COMMON, 17, 18, 19],
    [*COMMON[:70], *range(20, 50)],
    [4 + (11 * i) % 310 for i in range(300)],
]
OPTIONS: dict[str, Any] = {
    "enable_prefix_caching": True,
    "max_num_batched_tokens": 96,  # prompts come in chunks, beside the decodes of others
    "max_num_seqs": 4,
}
TOKENS = 12


@pytest.fixture(scope="module")
def model(model_cache: Path) -> Path:
    return MODEL.directory(model_cache)


def answers(engine: Engine) -> list[list[int]]:
    return [output["tokens"][0] for output in engine.generate(PROMPTS, max_tokens=TOKENS)]


@pytest.fixture(scope="module")
def stock(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    log = tmp_path_factory.mktemp("stock") / "log"
    with Engine({"model": str(model), **OPTIONS}, log, {"HAWK_NPU": ""}) as engine:
        return answers(engine)


@pytest.mark.parametrize(
    ("npu", "block_size"),
    [
        ({"chips": 1, "device": "blackhole-p150", "pool": "cross_layer"}, 64),
        ({"chips": 2, "device": "blackhole-p100", "pool": "per_layer"}, 32),
        ({"chips": 4, "device": "wormhole-n150", "pool": "cross_layer", "rope_interleaved": False}, 64),
        ({"chips": 8, "device": "blackhole-p100", "pool": "cross_layer"}, 16),
    ],
)
def test_the_simulated_npu_generates_what_stock_vllm_does(
    model: Path, stock: list[list[int]], tmp_path: Path, npu: dict[str, Any], block_size: int
) -> None:
    options = {
        "model": str(model),
        "block_size": block_size,
        "additional_config": {"tt_plugin": {"kv_dtype": "fp32", **npu}},
        **OPTIONS,
    }
    with Engine(options, tmp_path / "log", {"HAWK_NPU": "simulated", "VLLM_LOGGING_LEVEL": "INFO"}) as engine:
        first = answers(engine)
        again = engine.generate(PROMPTS, max_tokens=TOKENS)
        log = engine.tail(1000)
    assert f"KV pools on {npu['chips']} x {npu['device']}" in log
    assert first == stock
    assert [output["tokens"][0] for output in again] == stock
    # All but the last block of each prompt came out of the prefix cache, so tiles written long ago were read.
    assert [output["cached"] for output in again] == [(len(p) - 1) // block_size * block_size for p in PROMPTS]


def test_a_bf16_model_runs_on_rounded_pools(model: Path, tmp_path: Path) -> None:
    options = {
        "model": str(model),
        "dtype": "bfloat16",
        "additional_config": {"tt_plugin": {"kv_dtype": "bfp8"}},
        **OPTIONS,
    }
    with Engine(options, tmp_path / "log", {"HAWK_NPU": "simulated"}) as engine:
        first, again = answers(engine), answers(engine)
    assert [len(tokens) for tokens in first] == [TOKENS] * len(PROMPTS)
    # The first run of a prompt and the one whose prefix is cached read the same rounded KV.
    assert first == again


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "tensor parallel": ({"tensor_parallel_size": 2}, "--tensor-parallel-size 2 is not supported: one worker"),
    "quantised cache": ({"kv_cache_dtype": "fp8"}, "--kv-cache-dtype fp8 is not supported"),
    "other connector": (
        {"kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}},
        "KV connector ExampleConnector is not supported: vLLM holds only handles",
    ),
    "block size": ({"block_size": 48}, "block size 48 is not supported"),
    "unknown key": ({"additional_config": {"tt_plugin": {"chisp": 2}}}, "Did you mean chips?"),
    "chips": ({"additional_config": {"tt_plugin": {"chips": 3}}}, "4 KV heads on 3 chips is not supported"),
}

CHILD = """
import json, sys
from vllm.engine.arg_utils import EngineArgs
for name, options in json.loads(sys.argv[1]).items():
    try:
        config = EngineArgs(**options).create_engine_config()
        print(json.dumps([name, f"accepted: block size {config.cache_config.block_size}"]))
    except Exception as error:
        print(json.dumps([name, f"{type(error).__name__}: {error}"]))
"""


@pytest.fixture(scope="module")
def verdicts(model: Path) -> dict[str, str]:
    """What vLLM's configuration says to each of the refused options, and to none of them."""
    base = {"model": str(model), "dtype": "float32", "enforce_eager": True, "distributed_executor_backend": "uni"}
    cases = {name: {**base, **options} for name, (options, _) in REFUSED.items()}
    environment = {**os.environ, **ENVIRONMENT, "HAWK_NPU": "simulated"}
    done = subprocess.run(
        [sys.executable, "-c", CHILD, json.dumps({"nothing": base, **cases})],
        env=environment,
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(line) for line in done.stdout.splitlines() if line.startswith("["))


@pytest.mark.parametrize("name", list(REFUSED))
def test_what_the_npu_cannot_serve_is_refused_at_start(verdicts: dict[str, str], name: str) -> None:
    assert REFUSED[name][1] in verdicts[name]


def test_the_default_block_size(verdicts: dict[str, str]) -> None:
    assert verdicts["nothing"] == "accepted: block size 64"


def test_vllm_does_not_start_on_another_device_than_was_asked_for(model: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from vllm.platforms import current_platform; print(current_platform.device_type)"],
        env={**os.environ, **ENVIRONMENT, "HAWK_NPU": "simulatd"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode != 0
    assert "HAWK_NPU names no NPU: expected 'simulated' or 'silicon', got 'simulatd'" in done.stderr
