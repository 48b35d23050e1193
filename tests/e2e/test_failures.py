"""When the other side is wrong, gone or comes back: the answer is right, or an error, and it comes in time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import prompt
from tests.e2e.harness import REMOTE_DECODE, Engine, prefill_engine
from tests.models.tiny import TinyLlama

pytestmark = pytest.mark.e2e

Start = Callable[..., tuple[Engine, Engine]]

QUICK: dict[str, Any] = {"hello_deadline_s": 2.0, "admission_deadline_s": 4.0}


def test_policy_recompute_outlives_its_prefill_side(tiny: Path, start_pair: Start, tmp_path: Path) -> None:
    """The prefill side dies between the two legs, comes back at the same port, and decode never restarts."""
    prefill, decode = start_pair(tiny, decode={"config": QUICK, "enable_prefix_caching": True})
    prompts = [prompt(n, seed=1) for n in (64, 130)]
    reference = [r["tokens"] for r in prefill.generate(prompts)]
    sent = prefill.generate(prompts, [REMOTE_DECODE] * 2, max_tokens=1)
    port = sent[0]["params"]["remote_port"]
    prefill.process.kill()
    prefill.process.wait(10)
    answers = decode.generate(prompts, [s["params"] for s in sent])
    assert [a["tokens"] for a in answers] == reference
    assert decode.call("reports")["reports"] == []

    again = prefill_engine(tiny, tmp_path / "again.log", {"side_channel_port": port}).start()
    try:
        again.wait_ready()
        sent = again.generate(prompts, [REMOTE_DECODE] * 2, max_tokens=1)
        answers = decode.generate(prompts, [s["params"] for s in sent])
        assert [a["tokens"] for a in answers] == reference
        assert [r["outcome"] for r in decode.call("reports")["reports"]] == ["completed"] * 2
        again.wait_idle()
        decode.wait_idle()
    finally:
        again.stop()


def test_policy_fail_gives_an_error_in_time(tiny: Path, start_pair: Start) -> None:
    prefill, decode = start_pair(
        tiny, prefill={"enable_prefix_caching": True}, decode={"config": QUICK, "policy": "fail"}
    )
    ids, other = prompt(100, seed=2), prompt(100, seed=3)
    sent = prefill.generate([ids], [REMOTE_DECODE], max_tokens=1)[0]
    reference = prefill.generate([ids, other])
    # Gone is no failure: one dict for two prompts, and both answers are right under policy fail too.
    answers = decode.generate([ids, other], [sent["params"]] * 2)
    assert [a["tokens"] for a in answers] == [r["tokens"] for r in reference]
    sent = prefill.generate([ids], [REMOTE_DECODE], max_tokens=1)[0]
    prefill.process.kill()
    prefill.process.wait(10)
    answer = decode.generate([ids, other], [sent["params"], None])
    assert answer[0]["finish"] == ["error"]
    assert answer[1]["tokens"] == reference[1]["tokens"]
    decode.wait_idle()


def test_another_model_is_refused_with_the_field(tiny: Path, start_pair: Start, model_cache: Path) -> None:
    """Same shape, other weights: nothing but the fingerprint tells them apart."""
    twin = TinyLlama(seed=1).directory(model_cache)
    prefill, decode = start_pair(
        tiny, decode={"config": QUICK, "model": twin, "kv_connector_module_path": "hawk_connector.connector"}
    )
    ids = prompt(90, seed=4)
    sent = prefill.generate([ids], [REMOTE_DECODE], max_tokens=1)[0]
    answer = decode.generate([ids], [sent["params"]])[0]
    # The decode side's own model answers, and its log names the field.
    assert answer["tokens"] == decode.generate([ids])[0]["tokens"]
    assert decode.call("reports")["reports"] == []
    log = decode.log.read_text(errors="replace")
    assert "model: prefill side has" in log


def test_another_dtype_is_refused_with_both_values(tiny: Path, start_pair: Start) -> None:
    prefill, decode = start_pair(tiny, decode={"config": QUICK, "dtype": "bfloat16"})
    ids = prompt(90, seed=5)
    sent = prefill.generate([ids], [REMOTE_DECODE], max_tokens=1)[0]
    answer = decode.generate([ids], [sent["params"]])[0]
    assert len(answer["tokens"][0]) == 16
    log = decode.log.read_text(errors="replace")
    assert "dtype: prefill side has float32, decode side has bfloat16" in log
