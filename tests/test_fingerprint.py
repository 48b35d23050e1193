"""Digests of weights: what they tell apart, what they do not, and what is refused.  Files by safetensors and torch."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file

from hawk_connector.errors import ConfigError, LocalError, UnsupportedError
from hawk_connector.vllm_fingerprint import AdapterDigests, adapter_digest, model_weights_digest

Weights = dict[str, NDArray[np.float32]]
REVISION = "0123456789abcdef0123456789abcdef01234567"


def weights(layers: int = 2, parts: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")) -> Weights:
    random = np.random.default_rng(0)
    names = [f"model.layers.{n}.self_attn.{part}.weight" for n in range(layers) for part in parts]
    names += ["model.embed_tokens.weight", *(f"model.layers.{n}.mlp.up_proj.weight" for n in range(layers))]
    return {name: random.standard_normal((64, 48), dtype=np.float32) for name in names}


def changed(base: Weights, part: str) -> Weights:
    assert any(part in name for name in base)
    return {name: value + 1 if part in name else value for name, value in base.items()}


def digest(directory: Path, load_format: str = "auto") -> str:
    return model_weights_digest(str(directory), None, load_format)


@pytest.fixture
def save(tmp_path: Path) -> Callable[..., Path]:
    """Writes weights to a directory of its own, in ``shards`` files."""

    def save(name: str, tensors: Weights, shards: int = 1, prefix: str = "model") -> Path:
        directory = tmp_path / name
        directory.mkdir(exist_ok=True)
        names = sorted(tensors, key=lambda tensor: tensor[::-1])  # so that shards cut through layers
        for n in range(shards):
            part = {tensor: tensors[tensor] for tensor in names[n::shards]}
            save_file(part, directory / f"{prefix}-{n}.safetensors", metadata={"shard": str(n)})
        return directory

    return save


@pytest.mark.parametrize("part", ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "embed_tokens"])
def test_other_values_of_the_same_shape_are_other_weights(save: Callable[..., Path], part: str) -> None:
    base = weights()
    assert digest(save("other", changed(base, part))) != digest(save("base", base))


def test_names_types_and_shapes_count(save: Callable[..., Path]) -> None:
    base = {"a": np.zeros((4, 6), np.float32)}
    others = [{"b": base["a"]}, {"a": base["a"].reshape(6, 4)}, {"a": base["a"].view(np.int32)}]
    digests = [digest(save(f"m{n}", each)) for n, each in enumerate([base, *others])]
    assert len(set(digests)) == 4


def test_a_checkpoint_split_otherwise_is_the_same(save: Callable[..., Path]) -> None:
    base = weights()
    assert digest(save("three", base, shards=3)) == digest(save("one", base)) == digest(save("five", base, shards=5))
    assert digest(save("three other", changed(base, "v_proj"), shards=3)) != digest(save("one", base))


@pytest.mark.parametrize("part", ["k_proj", "v_proj", "qkv_proj", "query_key_value", "attn.Wqkv", "attention.wk"])
def test_of_very_many_tensors_every_k_and_v_is_sampled(save: Callable[..., Path], part: str) -> None:
    base = {f"layers.{n}.experts.{e}.up": np.zeros(2, np.float32) for n in range(40) for e in range(64)}
    base |= {f"layers.{n}.{part}.weight": np.zeros(2, np.float32) for n in range(40)}
    before = digest(save("base", base))
    for n in (0, 17, 39):
        assert digest(save("other", changed(base, f"layers.{n}.{part}"))) != before
    # Of the others a spread: a model trained further differs in it.
    assert digest(save("trained", changed(base, "experts"))) != before


def test_files_outside_the_index_and_a_second_copy_do_not_count(save: Callable[..., Path]) -> None:
    base = weights()
    directory = save("model", base)
    before = digest(directory)
    save("model", changed(base, "k_proj"), prefix="consolidated")
    assert digest(directory) == before
    assert digest(directory, "mistral") == digest(save("k", changed(base, "k_proj")))
    (directory / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": dict.fromkeys(base, "model-0.safetensors")})
    )
    save("model", changed(base, "v_proj"), prefix="left-over")
    assert digest(directory) == before


def test_torch_files_are_told_apart_by_their_bytes(tmp_path: Path) -> None:
    def model(name: str, seed: int, more: bytes = b"") -> Path:
        directory = tmp_path / name
        directory.mkdir()
        values = np.random.default_rng(seed).bytes(1 << 20)
        (directory / "pytorch_model.bin").write_bytes(b"same header" * 10000 + values + more)
        (directory / "training_args.bin").write_bytes(name.encode())
        return directory

    digests = [digest(model(*each)) for each in [("a", 0), ("b", 0), ("c", 1), ("d", 0, b"longer")]]
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3


def hub(cache: Path, repo: str, model: Path, revision: str = "main") -> None:
    """The hub's cache as its documentation lays it out: refs name commits, snapshots hold links to blobs."""
    root = cache / f"models--{repo.replace('/', '--')}"
    for folder in ("refs", "blobs", f"snapshots/{REVISION}"):
        (root / folder).mkdir(parents=True)
    (root / "refs" / revision).write_text(REVISION)
    for path in model.iterdir():
        (root / "blobs" / path.name).write_bytes(path.read_bytes())
        (root / "snapshots" / REVISION / path.name).symlink_to(root / "blobs" / path.name)


def test_a_hub_id_is_the_snapshot_in_the_local_cache(save: Callable[..., Path], tmp_path: Path) -> None:
    directory, cache = save("local", weights()), str(tmp_path / "cache")
    hub(tmp_path / "cache", "some/model", directory)
    hub(tmp_path / "cache", "some/tagged", directory, "v2")
    expected = digest(directory)
    assert model_weights_digest("some/model", None, "auto", cache) == expected
    assert model_weights_digest("some/model", REVISION, "auto", cache) == expected
    assert model_weights_digest("some/tagged", "v2", "auto", cache) == expected
    with pytest.raises(UnsupportedError, match="nothing in the hub's cache for 'some/tagged'"):
        model_weights_digest("some/tagged", None, "auto", cache)


def test_weights_that_cannot_be_seen_are_refused(save: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    seen = str(save("seen", weights()))
    cases = [
        (str(tmp_path / "empty"), "auto", "none in "),
        (str(tmp_path / "model.gguf"), "auto", "nothing in the hub's cache"),
        ("some/absent", "auto", "nothing in the hub's cache"),
        ("s3://bucket/model", "runai_streamer", "nothing in the hub's cache"),
        *((seen, each, f"load format '{each}'") for each in ("dummy", "gguf", "tensorizer", "modelexpress", "mine")),
    ]
    for model, load_format, words in cases:
        with pytest.raises(UnsupportedError) as caught:
            model_weights_digest(model, None, load_format, str(tmp_path / "cache"))
        assert words in str(caught.value)
        assert "Set model_id to the same value on both sides" in str(caught.value)


@pytest.mark.parametrize(
    "content", [b"", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", b"\2" + bytes(7) + b"[]"]
)
def test_a_broken_file_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match=r"model\.safetensors is not a safetensors file"):
        digest(tmp_path)


# --- adapters


def adapter(directory: Path, value: float, rank: int = 8, base: str = "/models/base") -> Path:
    directory.mkdir()
    config = {"r": rank, "lora_alpha": 16, "base_model_name_or_path": base}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    save_file({"layers.0.q_proj.lora_A.weight": np.full((8, 64), value, np.float32)}, directory / "a.safetensors")
    return directory


def test_adapters_are_their_weights_and_configuration(tmp_path: Path) -> None:
    first = adapter_digest(adapter(tmp_path / "first", 1.0))
    assert first == adapter_digest(adapter(tmp_path / "copy", 1.0, base="/elsewhere/base"))
    assert len({first, *(adapter_digest(adapter(tmp_path / f"{v}{r}", v, r)) for v, r in [(2.0, 8), (1.0, 4)])}) == 3
    (tmp_path / "empty").mkdir()
    assert adapter_digest(tmp_path / "empty") is None


def test_an_adapter_is_read_once_for_each_time_it_is_loaded(tmp_path: Path) -> None:
    directory, other = adapter(tmp_path / "default", 1.0), adapter(tmp_path / "other", 2.0)
    before, after = adapter_digest(directory), adapter_digest(other)
    digests = AdapterDigests()
    assert digests.of(1, str(directory)) == before
    (other / "a.safetensors").rename(directory / "a.safetensors")
    assert digests.of(1, str(directory)) == before  # vLLM still serves what it loaded
    assert digests.of(2, str(directory)) == after
    assert digests.of(1, str(directory), reload=True) == after


def test_an_adapter_that_cannot_be_seen_is_its_path_until_it_can(tmp_path: Path) -> None:
    cached: dict[str, Path] = {}
    digests = AdapterDigests(snapshot=lambda repo, revision: cached.get(repo))
    assert digests.of(1, "some/adapter") == "some/adapter"
    cached["some/adapter"] = adapter(tmp_path / "snapshot", 1.0)
    assert digests.of(1, "some/adapter") == adapter_digest(cached["some/adapter"]) != "some/adapter"
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "adapter_model.safetensors").write_bytes(b"half")
    assert digests.of(2, str(broken)) == str(broken)
    with pytest.raises(LocalError):
        adapter_digest(broken)
