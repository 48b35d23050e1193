"""The overlay in a real vLLM engine, on stand-ins for Tenstorrent's plugin and for `ttnn`.

The stand-ins do what `contract.py` records of the real ones.  vLLM's scheduler, HAWK's connector, Mooncake and the
prefill side are real.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.e2e.conftest import prompt
from tests.e2e.harness import REMOTE_DECODE, Engine, prefill_engine
from tests.e2e.test_banks import blocks_pages, expected, page_at
from tests.models.tiny import TinyLlama

pytestmark = pytest.mark.e2e

STAND_IN = Path(__file__).parent / "stand_in"
ANSWER = 7  # what the stand-in's model says at every step
BLOCK_SIZE = 64


def silicon_engine(
    model: Path, log: Path, peer: str, tt_plugin: dict[str, Any] | None = None, **options: Any
) -> Engine:
    transfer = {
        "kv_connector": "HawkConnector",
        "kv_role": "kv_consumer",
        "kv_load_failure_policy": "recompute",
        # Paired at once, so that the prefill side knows the layout before it packs.
        "kv_connector_extra_config": {"peers": [peer]},
    }
    given = {
        "model": str(model),
        "kv_transfer_config": transfer,
        "additional_config": {"tt_plugin": tt_plugin or {}},
        "block_size": BLOCK_SIZE,
        **options,
    }
    variables = {"HAWK_NPU": "silicon", "VLLM_PLUGINS": "hawk,hawk_npu", "PYTHONPATH": str(STAND_IN)}
    return Engine(given, log, variables)


@pytest.fixture(scope="module")
def model(model_cache: Path) -> Path:
    return TinyLlama().directory(model_cache)


@pytest.fixture(scope="module")
def prefill(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with prefill_engine(model, tmp_path_factory.mktemp("prefill") / "log") as engine:
        yield engine


@pytest.mark.parametrize("pool", ["per_layer", "cross_layer"])
def test_whole_blocks_lie_in_the_models_own_tensors(prefill: Engine, model: Path, tmp_path: Path, pool: str) -> None:
    peer = prefill.call("status")["address"]
    with silicon_engine(model, tmp_path / "log", peer, {"pool": pool}) as decode:
        geometry = decode.call("geometry")
        layout = geometry["layout"]
        # The model has 4 layers and 4 KV heads; the plugin shows vLLM one layer, and drives two chips.
        assert (layout["kind"], layout["layers"], layout["chips"], layout["heads"]) == (pool, 4, 2, 2)
        assert (layout["codec"], layout["rope_interleaved"], geometry["num_blocks"]) == ("bfp8", True, 24)
        for number, tokens in enumerate((65, 128, 150)):
            ids = prompt(tokens, seed=number)
            sent = prefill.call("prefill_only", prompt=ids, params=REMOTE_DECODE)
            decode.call("banks", path=str(tmp_path / "before.npy"))
            held = decode.call("load_only", prompt=ids, params=sent["params"], max_tokens=4)
            prefill.call("source", path=str(tmp_path / "source.npy"))
            decode.call("banks", path=str(tmp_path / "banks.npy"))
            source, banks = np.load(tmp_path / "source.npy"), np.load(tmp_path / "banks.npy")
            before = np.load(tmp_path / "before.npy")
            blocks = (tokens - 1) // BLOCK_SIZE  # all before the last
            report = decode.call("reports")["reports"][-1]
            assert (report["outcome"], report["blocks"]) == ("completed", blocks)
            pages = expected(source, sent["block_ids"], blocks * BLOCK_SIZE, held["block_ids"][:blocks], geometry)
            checked = 0
            for (chip, bank), by_address in pages.items():
                for address, content in by_address.items():
                    found = page_at(banks, geometry, chip, bank, address)
                    assert found[: len(content)].tobytes() == content
                    found[:] = page_at(before, geometry, chip, bank, address)
                    checked += 1
            assert checked == blocks * blocks_pages(layout)
            assert np.array_equal(banks, before)  # nothing else was written
            assert decode.call("finish", request=held["request"])["tokens"] == [ANSWER] * 4
        decode.wait_idle()
    prefill.wait_idle()


def test_a_load_begins_though_the_step_that_began_it_was_given_up(prefill: Engine, model: Path, tmp_path: Path) -> None:
    """Beside a request that decodes, a step that begins a load has no tokens, and TTScheduler throws it away."""
    peer = prefill.call("status")["address"]
    with silicon_engine(model, tmp_path / "log", peer) as decode:
        ids = prompt(150, seed=9)
        params = prefill.generate([ids], [REMOTE_DECODE], max_tokens=1)[0]["params"]
        own, loaded = decode.generate([prompt(40, seed=8), ids], [None, params], max_tokens=800)
        assert (own["tokens"], loaded["tokens"]) == ([[ANSWER] * 800], [[ANSWER] * 800])
        assert decode.call("scheduler_number", attribute="given_up_loads")["value"] == 1
        (report,) = decode.call("reports")["reports"]
        assert (report["outcome"], report["external_tokens"], report["blocks"]) == ("completed", 128, 2)
        decode.wait_idle()
    prefill.wait_idle()


def test_a_transfer_that_is_gone_is_computed_on_the_device(prefill: Engine, model: Path, tmp_path: Path) -> None:
    peer = prefill.call("status")["address"]
    with silicon_engine(model, tmp_path / "log", peer) as decode:
        ids = prompt(100, seed=3)
        params = prefill.generate([ids], [REMOTE_DECODE], max_tokens=1)[0]["params"]
        other = {**params, "hawk": {**params["hawk"], "transfer": "0" * 32}}
        (answer,) = decode.generate([ids], [other], max_tokens=3)
        assert answer["tokens"] == [[ANSWER] * 3]
        assert decode.call("reports")["reports"] == []  # nothing was loaded
        decode.wait_idle()
