"""What HAWK refuses when vLLM starts it, what it reads from vLLM's configuration, and how vLLM finds it.

The configurations are vLLM's own, made by ``EngineArgs`` and ``KVCacheSpec`` as a server makes them.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.models.tiny import TinyLlama

pytestmark = pytest.mark.vllm

MODEL = TinyLlama()
PRODUCER = {"kv_connector": "HawkConnector", "kv_role": "kv_producer"}
CONSUMER = {"kv_connector": "HawkConnector", "kv_role": "kv_consumer"}
# Out of order, and of more than one digit: vLLM does not promise an order.
LAYERS = ["model.layers.10.self_attn.attn", "model.layers.2.self_attn.attn", "model.layers.0.self_attn.attn"]

MakeConfig = Callable[..., Any]


@pytest.fixture(scope="module")
def make_config(model_cache: Path) -> MakeConfig:
    """vLLM's configuration of a server of the tiny model with more options."""
    from vllm.engine.arg_utils import EngineArgs

    directory = MODEL.directory(model_cache)

    def make(**options: Any) -> Any:
        base = {"model": str(directory), "dtype": "float32", "max_model_len": 256, "enforce_eager": True}
        uni = {"distributed_executor_backend": "uni", "kv_transfer_config": PRODUCER}
        return EngineArgs(**{**base, **uni, **options}).create_engine_config()

    return make


def spec(kind: str = "FullAttentionSpec", **fields: Any) -> Any:
    """One of vLLM's KV cache specs."""
    import torch
    from vllm.v1 import kv_cache_interface

    base = {"block_size": 16, "num_kv_heads": 4, "head_size": 64, "dtype": torch.float32}
    return getattr(kv_cache_interface, kind)(**{**base, **fields})


def mamba() -> Any:
    import torch
    from vllm.v1.kv_cache_interface import MambaSpec

    return MambaSpec(block_size=16, shapes=((4, 4),), dtypes=(torch.float32,))


def caches(*specs: Any, names: list[str] | None = None) -> Any:
    """vLLM's KVCacheConfig with a group for each of ``specs``."""
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

    groups = [KVCacheGroupSpec(list(names or LAYERS), each) for each in specs]
    return KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups)


def start(config: Any, kv_caches: Any, role: str = "SCHEDULER") -> Any:
    """What vLLM does to make a connector."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    return KVConnectorFactory.create_connector(config, KVConnectorRole[role], kv_caches)


def refusal(config: Any, kv_caches: Any, role: str = "SCHEDULER") -> str:
    from hawk_connector.errors import LocalError

    with pytest.raises(LocalError) as caught:
        start(config, kv_caches, role)
    return str(caught.value)


# --- refusals: (options of the server, words of the refusal)

REFUSED_OPTIONS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "kv_both": (
        {"kv_transfer_config": {**PRODUCER, "kv_role": "kv_both"}},
        ["'kv_producer' on the prefill side", "'kv_consumer' on the decode side", "got 'kv_both'", "one vLLM instance"],
    ),
    "speculative decoding": (
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
        ["speculative decoding is not supported", "draft layers", "--speculative-config"],
    ),
    "prompt embeddings": (
        {"enable_prompt_embeds": True},
        ["prompt embeddings is not supported", "embeddings have none", "--enable-prompt-embeds"],
    ),
    "pipeline parallel": (
        {"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"},
        ["pipeline parallelism is not supported", "expected --pipeline-parallel-size 1", "got 2"],
    ),
    "weights that are not in files": (
        {"load_format": "dummy"},
        ["a fingerprint of this model's weights is not supported", "got load format 'dummy'", "Set model_id"],
    ),
    "unknown key": (
        {"kv_transfer_config": {**PRODUCER, "kv_connector_extra_config": {"send_bufer_bytes": 1 << 20}}},
        ["'send_bufer_bytes'", "Did you mean 'send_buffer_bytes'?"],
    ),
    "key of the other side": (
        {"kv_transfer_config": {**PRODUCER, "kv_connector_extra_config": {"peers": []}}},
        ["'peers' belongs to the other side (kv_consumer)"],
    ),
    "ill-typed key": (
        {"kv_transfer_config": {**CONSUMER, "kv_connector_extra_config": {"read_threads": "two"}}},
        ["'read_threads'", "expected integer >= 1 and <= 64", "got 'two'"],
    ),
    "open to the network without keys": (
        {"kv_transfer_config": {**PRODUCER, "kv_connector_extra_config": {"side_channel_host": "192.0.2.7"}}},
        ["'192.0.2.7' is not loopback", "curve_key_file"],
    ),
}


@pytest.mark.parametrize("name", list(REFUSED_OPTIONS))
def test_options_that_are_refused(make_config: MakeConfig, name: str) -> None:
    options, words = REFUSED_OPTIONS[name]
    text = refusal(make_config(**options), caches(spec()))
    assert [word for word in words if word not in text] == [], text


def test_decode_tensor_parallelism_is_refused_by_the_worker(make_config: MakeConfig) -> None:
    config = make_config(
        kv_transfer_config=CONSUMER, tensor_parallel_size=2, distributed_executor_backend="mp", block_size=16
    )
    text = refusal(config, caches(spec(num_kv_heads=2)), "WORKER")
    assert "tensor parallelism on the decode side is not supported: one worker drives all chips" in text
    assert "expected --tensor-parallel-size 1, got 2" in text


def test_no_role_is_refused(make_config: MakeConfig) -> None:
    from hawk_connector.errors import ConfigError
    from hawk_connector.vllm_facts import check_role

    # vLLM refuses it itself today, before any connector is asked.
    with pytest.raises(ValueError, match="kv_role"):
        make_config(kv_transfer_config={"kv_connector": "HawkConnector"})
    with pytest.raises(ConfigError, match=r"'kv_producer' .* or 'kv_consumer' .*got None"):
        check_role(None)


def test_versions() -> None:
    from hawk_connector.errors import UnsupportedError
    from hawk_connector.vllm_version import check_version

    for version in ("0.23.0", "0.9.2", "0.23.1+cpu", "0.23.0rc1"):
        with pytest.raises(UnsupportedError) as caught:
            check_version(version)
        assert f"expected vLLM 0.24 to 0.33, got vLLM {version}" in str(caught.value)
        assert "Upgrade vLLM" in str(caught.value)
    for version in ("0.24.0", "0.32.0+cpu", "0.33.4", "1.0.0"):
        check_version(version)
    check_version()


def test_mla_is_refused(make_config: MakeConfig) -> None:
    config = make_config()
    text = refusal(config, caches(spec("MLAAttentionSpec", num_kv_heads=1, head_size=80)))
    assert "this model's attention is not supported: only full attention" in text
    assert "got MLAAttentionSpec" in text


def test_mla_is_refused_before_its_cache_is_looked_at(make_config: MakeConfig) -> None:
    from hawk_connector.errors import UnsupportedError
    from hawk_connector.vllm_facts import model_facts

    class MlaModel:  # stands in for vLLM's ModelConfig of a DeepSeek, which takes a minute to make
        use_mla = True

    class MlaConfig:
        model_config = MlaModel()
        parallel_config = make_config().parallel_config
        speculative_config = None

    with pytest.raises(UnsupportedError, match="its cache holds latents, not K and V heads"):
        model_facts(MlaConfig(), caches(spec()), None)  # type: ignore[arg-type]


def test_hybrid_models_are_refused(make_config: MakeConfig) -> None:
    config = make_config()
    for other, name in ((spec("SlidingWindowSpec", sliding_window=64), "SlidingWindowSpec"), (mamba(), "MambaSpec")):
        text = refusal(config, caches(spec(), other))
        assert "this model's KV cache is not supported: hybrid models" in text
        assert f"expected one group of full-attention layers, got 2 groups (FullAttentionSpec, {name})" in text
    assert "got 0 groups (none)" in refusal(config, caches())


def refused_specs() -> list[tuple[Any, list[str]]]:
    import torch
    from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs, get_kv_quant_mode

    mixed = UniformTypeKVCacheSpecs(
        block_size=16, kv_cache_specs={LAYERS[0]: spec(), LAYERS[1]: spec(head_size=128), LAYERS[2]: spec()}
    )
    fp8 = spec(dtype=torch.uint8, kv_quant_mode=get_kv_quant_mode("fp8"))
    return [
        (spec("SlidingWindowSpec", sliding_window=64), ["only full attention", "got SlidingWindowSpec in"]),
        (spec("ChunkedLocalAttentionSpec", attention_chunk_size=64), ["only full attention", "ChunkedLocal"]),
        (mamba(), ["only full attention", "got MambaSpec"]),
        # Where vLLM's hybrid manager is off, windows hide in a full-attention spec.
        (spec(sliding_window=64), ["sliding-window or chunked attention", "outside the window are dropped"]),
        (spec(attention_chunk_size=64), ["sliding-window or chunked attention"]),
        (spec(head_size_v=32), ["this model's V heads", "expected head size 64, got 32"]),
        (fp8, ["a quantised KV cache is not supported: its scales are not moved", "--kv-cache-dtype auto"]),
        (mixed, ["this model's attention", "got UniformTypeKVCacheSpecs"]),
    ]


def test_caches_that_are_refused(make_config: MakeConfig) -> None:
    config = make_config()
    for refused, words in refused_specs():
        text = refusal(config, caches(refused))
        assert [word for word in words if word not in text] == [], text
    from hawk_connector.errors import UnsupportedError
    from hawk_connector.vllm_facts import model_facts

    with pytest.raises(UnsupportedError, match="does not tell the connector its KV cache configuration"):
        model_facts(config, None, None)


# --- what is read from a model that is served


def test_facts_of_a_model(make_config: MakeConfig) -> None:
    from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs

    from hawk_connector.layout.kv_shape import KVShape
    from hawk_connector.vllm_facts import model_facts

    # Of two ranks: the shape is the whole model's, the local heads are one rank's.
    config = make_config(tensor_parallel_size=2, distributed_executor_backend="mp")
    local = spec(num_kv_heads=MODEL.kv_heads // 2)
    wrapped = UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs=dict.fromkeys(LAYERS, local))
    for each in (local, wrapped):
        facts = model_facts(config, caches(each), None)
        assert facts.shape == KVShape(3, MODEL.kv_heads, MODEL.head_dim, "float32")
        assert (facts.local_heads, facts.block_size) == (2, 16)
        assert facts.layer_names == (LAYERS[2], LAYERS[1], LAYERS[0])
    bfloat16 = model_facts(make_config(dtype="bfloat16"), caches(spec()), None)
    assert bfloat16.shape.dtype == "bfloat16"
    assert bfloat16.fingerprint == facts.fingerprint


def test_fingerprints_tell_weights_apart_and_paths_not(
    make_config: MakeConfig, model_cache: Path, tmp_path: Path
) -> None:
    from hawk_connector.vllm_facts import model_facts

    copy = tmp_path / "elsewhere"
    shutil.copytree(MODEL.directory(model_cache), copy)
    others = (dataclasses.replace(MODEL, seed=1), dataclasses.replace(MODEL, layers=3))
    paths = [copy, *(other.directory(model_cache) for other in others)]

    def fingerprint(model_id: str | None = None, **options: Any) -> str:
        return model_facts(make_config(**options), caches(spec()), model_id).fingerprint

    own, same, other_weights, other_shape = fingerprint(), *(fingerprint(model=str(path)) for path in paths)
    assert own == same
    assert len({own, other_weights, other_shape}) == 3
    assert fingerprint(model_id="my-model") == fingerprint(model_id="my-model", model=str(paths[1])) == "my-model"


def test_a_model_in_torch_files_and_one_in_the_hub_cache(
    make_config: MakeConfig, model_cache: Path, tmp_path: Path
) -> None:
    import torch
    from safetensors.torch import load_file

    from hawk_connector.vllm_facts import model_facts

    def fingerprint(**options: Any) -> str:
        return model_facts(make_config(**options), caches(spec()), None).fingerprint

    source = MODEL.directory(model_cache)
    state = load_file(source / "model.safetensors")
    fingerprints = []
    for name in ("first", "second", "other"):
        shutil.copytree(source, tmp_path / name, ignore=shutil.ignore_patterns("*.safetensors"))
        if name == "other":
            state = {key: value + 1 if ".v_proj." in key else value for key, value in state.items()}
        torch.save(state, tmp_path / name / "pytorch_model.bin")
        fingerprints.append(fingerprint(model=str(tmp_path / name)))
    assert fingerprints[0] == fingerprints[1] != fingerprints[2]

    config = make_config()
    snapshot = tmp_path / "cache" / "models--some--tiny" / "snapshots" / ("0" * 40)
    shutil.copytree(source, snapshot)
    # What vLLM's configuration holds for a hub id; to make it so would ask the hub.
    config.model_config.model, config.model_config.revision = "some/tiny", "0" * 40
    config.load_config.download_dir = str(tmp_path / "cache")
    assert model_facts(config, caches(spec()), None).fingerprint == fingerprint()


def test_what_keys_a_requests_kv(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
    from vllm.v1.request import Request

    from hawk_connector.vllm_facts import request_keys

    def request(**fields: Any) -> Request:
        return Request("r", [5, 6, 7], SamplingParams(max_tokens=1), None, **fields)

    image = MultiModalFeatureSpec(
        data=None, modality="image", identifier="hash-of-an-image", mm_position=PlaceholderRange(offset=1, length=2)
    )
    assert request_keys(request()) == []
    nowhere = request(lora_request=LoRARequest("style", 1, "/nowhere"))
    assert request_keys(nowhere) == [("lora", "style"), ("adapter", "/nowhere")]
    adapters: list[Any] = []
    for number in (1, 2):
        path = tmp_path / str(number)
        path.mkdir()
        save_file({"lora_A.weight": torch.full((4, 4), float(number))}, path / "adapter_model.safetensors")
        adapters.append(request_keys(request(lora_request=LoRARequest("default", 1, str(path)))))
    assert [keys[0] for keys in adapters] == [("lora", "default")] * 2
    assert adapters[0] != adapters[1]
    assert request_keys(request(cache_salt="tenant")) == [("salt", "tenant")]
    assert request_keys(request(mm_features=[image])) == [("multimodal", "hash-of-an-image@1+2")]


# --- how vLLM finds the connector


def test_vllm_finds_the_connector_by_name_and_by_module(make_config: MakeConfig) -> None:
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.plugins import load_general_plugins

    from hawk_connector.connector import HawkConnector

    load_general_plugins()
    assert KVConnectorFactory.get_connector_class_by_name("HawkConnector") is HawkConnector
    by_module = KVTransferConfig(**PRODUCER, kv_connector_module_path="hawk_connector.connector")
    assert KVConnectorFactory.get_connector_class(by_module) is HawkConnector
    connector = start(make_config(), caches(spec()))
    assert type(connector) is HawkConnector
    connector.shutdown()


def test_registering_again_is_no_error() -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    from hawk_connector.connector import HawkConnector
    from hawk_connector.plugin import register

    register()
    register()
    assert KVConnectorFactory.get_connector_class_by_name("HawkConnector") is HawkConnector


def test_the_connector_is_whole() -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1, supports_hma

    from hawk_connector.connector import HawkConnector

    assert supports_hma(HawkConnector)
    assert issubclass(HawkConnector, KVConnectorBase_V1)
    assert KVConnectorBase_V1.__abstractmethods__ > set()
    assert HawkConnector.__abstractmethods__ == frozenset()
    # A misspelt override would be a method that vLLM never calls.
    public = {name for name in vars(HawkConnector) if not name.startswith("_")}
    known = {name for base in HawkConnector.__mro__[1:] for name in vars(base)}
    assert public - known == set()
