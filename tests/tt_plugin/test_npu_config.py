"""The NPU's configuration and the platform plugin's gate."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from hawk_connector.errors import ConfigError, UnsupportedError
from tt_plugin.config import NpuConfig
from tt_plugin.vllm.plugin import RefusedNpu, register


def test_defaults() -> None:
    config = NpuConfig.parse({})
    layout = config.layout(layers=30, kv_heads=3, head_dim=64, block_size=64)
    assert (layout.kind, layout.codec, layout.banks, layout.chips) == ("cross_layer", "bfp8", 8, 1)
    assert (layout.alignment, layout.rope_interleaved, layout.pages_per_unit) == (64, True, 30 * 3 * 2 * 2)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"chip": 2}, r"tt_plugin\.chip is not a key: .*Did you mean chips\?"),
        ({"chips": "two"}, r"tt_plugin\.chips: Expected `int`, got `str`: got 'two'"),
        ({"chips": 0}, r"tt_plugin\.chips: .*>= 1"),
        ({"pool": "layered"}, r"tt_plugin\.pool: .*'layered'"),
        ({"kv_dtype": "fp8"}, r"tt_plugin\.kv_dtype: .*'fp8'"),
        ({"device": "blackhole"}, "blackhole-p150, blackhole-p100, wormhole-n150; got 'blackhole'"),
        ([1], "is not a table"),
        ({"landing": {"path": "windows"}}, r"tt_plugin\.landing\.path: .*'windows'"),
        ({"landing": {"bounce": 1}}, r"tt_plugin\.landing: .*unknown field `bounce`"),
        ({"landing": {"bounce_wait_s": 0}}, r"tt_plugin\.landing\.bounce_wait_s: .*> 0"),
    ],
)
def test_what_is_wrong_is_named(given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        NpuConfig.parse({"tt_plugin": given})


@pytest.mark.parametrize("name", ["bf16", "bfloat16"])
def test_short_and_long_names_of_a_dtype_are_one(name: str) -> None:
    assert NpuConfig.parse({"tt_plugin": {"kv_dtype": name}}).codec == "bfloat16"


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"head_dim": 80}, "head_dim 80 is not supported: .*32x32"),
        ({"block_size": 48}, "Set --block-size to a multiple of 32"),
        ({"kv_heads": 3}, "3 KV heads on 2 chips is not supported"),
    ],
)
def test_models_that_do_not_fit_are_refused(model: dict[str, int], message: str) -> None:
    config = NpuConfig.parse({"tt_plugin": {"chips": 2}})
    with pytest.raises(UnsupportedError, match=message):
        config.layout(**{"layers": 2, "kv_heads": 4, "head_dim": 64, "block_size": 64, **model})


def test_the_platform_is_offered_only_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HAWK_NPU", raising=False)
    assert register() is None
    monkeypatch.setenv("HAWK_NPU", "")
    assert register() is None
    monkeypatch.setenv("HAWK_NPU", "simulated")
    assert register() == "tt_plugin.vllm.platform.SimulatedNpuPlatform"


@pytest.mark.parametrize(
    ("value", "hint"), [("simulate", "Set it to 'simulated'"), ("silicon", "no vllm_tt_plugin and no ttnn")]
)
def test_an_unknown_npu_stops_vllm(monkeypatch: pytest.MonkeyPatch, value: str, hint: str) -> None:
    monkeypatch.setenv("HAWK_NPU", value)
    assert register() == "tt_plugin.vllm.plugin.RefusedNpu"
    with pytest.raises(ConfigError, match=hint):
        RefusedNpu()


def test_a_device_process_needs_neither_torch_nor_vllm() -> None:
    code = (
        "import sys; import tt_plugin.landing, tt_plugin.config, tt_plugin.device.layer_tiles; "
        "print([m for m in ('torch', 'vllm') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
