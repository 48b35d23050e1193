"""The models that `hawk` makes, and what a `model:` entry means."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from hawk_connector.cli.models import PackagedModel, cache_directory, ensure_model, model_reference
from hawk_connector.errors import ConfigError, LocalError
from tests.models.tiny import TinyLlama


def unheard(text: str) -> None:
    raise AssertionError(f"unexpected message: {text}")


def test_a_model_directory_is_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert model_reference("m", unheard) == str(tmp_path / "m")


def test_a_hub_name_is_left_to_vllm() -> None:
    assert model_reference("meta-llama/Llama-3.1-8B", unheard) == "meta-llama/Llama-3.1-8B"


@pytest.mark.parametrize("name", ["./m", "/no/such/directory", "~/no-such-model", "a/b/c", "unknown"])
def test_what_is_neither_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="smollm2-135m-instruct"):
        model_reference(name, unheard)


def test_a_directory_that_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"without a config\.json"):
        model_reference(str(tmp_path), unheard)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"XDG_CACHE_HOME": "/c"}, Path("/c/hawk")),
        ({"XDG_CACHE_HOME": "relative"}, Path.home() / ".cache/hawk"),
        ({}, Path.home() / ".cache/hawk"),
    ],
)
def test_the_cache_follows_xdg(environ: dict[str, str], expected: Path) -> None:
    assert cache_directory(environ) == expected


def test_a_missing_package_is_named() -> None:
    absent = PackagedModel(name="m", module="no_such_module", gguf_file="m.gguf", requirement="no-such==1")
    with pytest.raises(ConfigError, match=r"no-such==1, which is not installed"):
        absent.gguf_path()


@pytest.mark.vllm
def test_a_broken_gguf_leaves_nothing_and_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "broken_model_package"
    package.mkdir()
    (package / "m.gguf").write_bytes(b"not a GGUF")
    monkeypatch.syspath_prepend(str(tmp_path))
    broken = PackagedModel(name="m", module=package.name, gguf_file="m.gguf", requirement="m==1")
    said: list[str] = []
    with pytest.raises(LocalError, match=r"converting m\.gguf failed"):
        ensure_model(broken, said.append, cache=tmp_path / "cache")
    assert list((tmp_path / "cache" / "models").iterdir()) == []
    assert said[0].startswith("converting m from m.gguf")


@pytest.mark.vllm
def test_smollm2_is_the_published_model() -> None:
    """Shapes as in SmolLM2-135M-Instruct's model card and config, and text as a language model writes it."""
    directory = Path(model_reference("smollm2-135m-instruct", lambda text: None))
    config = json.loads((directory / "config.json").read_text())
    published = {
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "hidden_size": 576,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
    }
    assert {key: config[key] for key in published} == published
    assert config["architectures"] == ["LlamaForCausalLM"]

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory)
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], tokenize=False, add_generation_prompt=True
    )
    assert chat.endswith("<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n")
    model = AutoModelForCausalLM.from_pretrained(directory)
    assert sum(weight.numel() for weight in model.parameters()) == 134_515_008
    with torch.inference_mode():
        ids = tokenizer(chat, return_tensors="pt").input_ids
        answer = model.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :]
    assert "Paris" in tokenizer.decode(answer)


@pytest.mark.vllm
def test_the_tiny_model_is_the_same_each_time(tmp_path: Path) -> None:
    tiny = TinyLlama(kv_heads=2, layers=2)
    written: Sequence[Path] = [tiny.directory(tmp_path / name) for name in ("a", "b")]
    first, second = ((path / "model.safetensors").read_bytes() for path in written)
    assert first == second
    config = json.loads((written[0] / "config.json").read_text())
    assert (config["num_key_value_heads"], config["num_hidden_layers"], config["vocab_size"]) == (2, 2, 384)
