"""KV shapes by name or from a model's config.json, for commands that need no weights.

No torch, no transformers: a config.json is read as what it is.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hawk_connector.errors import ConfigError, UnsupportedError
from hawk_connector.layout.kv_shape import KVShape

__all__ = ["NAMED_MODELS", "ModelKV", "model_kv", "nearest"]

_MOST = 1 << 16  # KVShape's own limit


@dataclass(frozen=True, slots=True)
class ModelKV:
    """A model's KV shape. ``source``: where its figures come from."""

    name: str
    shape: KVShape
    source: str


def _named(name: str, layers: int, kv_heads: int, head_dim: int, hub_name: str) -> ModelKV:
    return ModelKV(name, KVShape(layers, kv_heads, head_dim, "bfloat16"), f"config.json of {hub_name}")


NAMED_MODELS: tuple[ModelKV, ...] = (
    _named("llama-3.1-70b", 80, 8, 128, "meta-llama/Llama-3.1-70B"),
    _named("llama-3.1-8b", 32, 8, 128, "meta-llama/Llama-3.1-8B"),
    _named("qwen3-8b", 36, 8, 128, "Qwen/Qwen3-8B"),
    _named("smollm2-135m", 30, 3, 64, "HuggingFaceTB/SmolLM2-135M"),
)


def model_kv(reference: str) -> ModelKV:
    """The KV shape of ``reference``: a name, a config.json, or a directory that holds one.

    Raises ConfigError for what is neither, naming the nearest name, and UnsupportedError for a cache that is not
    plain K and V of one shape in every layer.
    """
    for known in NAMED_MODELS:
        if known.name == reference.lower():
            return known
    path = Path(reference)
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        names = [known.name for known in NAMED_MODELS]
        raise ConfigError(
            f"model {reference!r} is no model known by name, and no config.json is there",
            fix=f"{nearest(reference.lower(), names)} Or give the path of a config.json.",
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path} as JSON: {error}", fix="Give the config.json of a model.") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{path} is no model's config.json", expected="a JSON object", got=type(config).__name__)
    name = path.parent.name if path.name == "config.json" else path.stem
    return ModelKV(name or path.resolve().parent.name, _shape(config, path), str(path))


def nearest(given: str, known: list[str]) -> str:
    """A sentence for an error: the nearest of the ``known`` names, or all of them."""
    near = difflib.get_close_matches(given, known, n=1, cutoff=0.4)
    return f"Did you mean {near[0]!r}? Known: {', '.join(known)}." if near else f"Known: {', '.join(known)}."


def _shape(config: Mapping[str, Any], path: Path) -> KVShape:
    # Multimodal models keep the language model's figures one level down.
    text = config.get("text_config")
    figures = {**config, **text} if isinstance(text, dict) else config
    _refuse_other_caches(figures, path)
    layers = _count(figures, "num_hidden_layers", path)
    heads = _count(figures, "num_attention_heads", path)
    kv_heads = _count(figures, "num_key_value_heads", path, default=heads)
    if figures.get("head_dim") is None:
        hidden = _count(figures, "hidden_size", path)
        if hidden % heads:
            raise ConfigError(
                f"{path}: no head_dim, and hidden_size {hidden} is no multiple of {heads} heads",
                fix="Add head_dim to it.",
            )
        head_dim = hidden // heads
    else:
        head_dim = _count(figures, "head_dim", path)
    dtype = figures.get("dtype") or figures.get("torch_dtype") or "bfloat16"
    return KVShape(layers, kv_heads, head_dim, str(dtype))


def _count(figures: Mapping[str, Any], key: str, path: Path, default: int | None = None) -> int:
    value = figures.get(key)
    if value is None and default is not None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _MOST:
        raise ConfigError(
            f"{path}: {key}",
            expected=f"a whole number from 1 to {_MOST}",
            got="nothing" if value is None else repr(value),
            fix="Give the config.json of a decoder-only transformer.",
        )
    return value


def _refuse_other_caches(figures: Mapping[str, Any], path: Path) -> None:
    if figures.get("kv_lora_rank"):
        raise UnsupportedError(f"{path}: multi-head latent attention", reason="its cache has no K and V per head")
    types = figures.get("layer_types")
    others = sorted({str(t) for t in types} - {"full_attention"}) if isinstance(types, list) else []
    if others:
        raise UnsupportedError(
            f"{path}: layers of type {', '.join(others)}", reason="every layer must cache all tokens' K and V"
        )
