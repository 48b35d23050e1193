"""What vLLM's configuration says: whether HAWK can serve it, its KVShape, its model's fingerprint.  Imports vLLM."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec

from .errors import ConfigError, UnsupportedError
from .layout.kv_shape import KVShape
from .vllm_fingerprint import AdapterDigests, model_weights_digest

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_utils import KVCacheConfig
    from vllm.v1.request import Request

__all__ = ["ModelFacts", "check_role", "model_facts", "request_keys"]

_VOLATILE = frozenset({"_name_or_path", "name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache"})


@dataclass(frozen=True)
class ModelFacts:
    """``layer_names`` in the model's order; ``local_heads``: KV heads of one rank; ``block_size``: vLLM's tokens."""

    shape: KVShape
    fingerprint: str
    layer_names: tuple[str, ...]
    local_heads: int
    block_size: int


def check_role(role: str | None) -> None:
    """``kv_both`` and no role are refused with the two roles named."""
    if role not in ("kv_producer", "kv_consumer"):
        raise ConfigError(
            "kv_role",
            expected="'kv_producer' on the prefill side or 'kv_consumer' on the decode side",
            got=repr(role),
            fix="HAWK's two sides keep their caches in different orders: run one vLLM instance for each.",
        )


def model_facts(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig | None, model_id: str | None) -> ModelFacts:
    """Facts of the served model.  UnsupportedError says what HAWK cannot serve, and why."""
    model = vllm_config.model_config
    _check_model(vllm_config)
    if kv_cache_config is None:
        raise UnsupportedError("this vLLM", reason="it does not tell the connector its KV cache configuration")
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        kinds = ", ".join(sorted({type(g.kv_cache_spec).__name__ for g in groups})) or "none"
        raise UnsupportedError(
            "this model's KV cache",
            reason="hybrid models (state space, sliding window, draft layers) keep caches that are not plain K and V",
            expected="one group of full-attention layers",
            got=f"{len(groups)} groups ({kinds})",
        )
    names = tuple(sorted(groups[0].layer_names, key=extract_layer_index))
    spec = _full_attention_spec(groups[0].kv_cache_spec, names)
    shape = KVShape(
        layers=len(names),
        kv_heads=model.get_total_num_kv_heads(),
        head_dim=spec.head_size,
        dtype=str(model.dtype).removeprefix("torch."),
    )
    return ModelFacts(shape, model_id or _fingerprint(vllm_config), names, spec.num_kv_heads, spec.block_size)


def _check_model(vllm_config: VllmConfig) -> None:
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    if model.use_mla:
        raise UnsupportedError("multi-head latent attention (MLA)", reason="its cache holds latents, not K and V heads")
    if vllm_config.speculative_config is not None:
        raise UnsupportedError(
            "speculative decoding",
            reason="draft layers add KV groups that the other side does not have",
            fix="Start both sides without --speculative-config.",
        )
    if getattr(model, "enable_prompt_embeds", False):
        raise UnsupportedError(
            "prompt embeddings",
            reason="KV is bound to the prompt's tokens, and embeddings have none",
            fix="Start both sides without --enable-prompt-embeds.",
        )
    if parallel.pipeline_parallel_size > 1:
        raise UnsupportedError(
            "pipeline parallelism",
            reason="a parcel holds all layers, and a pipeline rank has only some",
            expected="--pipeline-parallel-size 1",
            got=str(parallel.pipeline_parallel_size),
        )
    if getattr(parallel, "decode_context_parallel_size", 1) > 1:
        raise UnsupportedError(
            "decode context parallelism",
            reason="it spreads a block's tokens over ranks",
            fix="Start without it.",
        )


def _full_attention_spec(spec: Any, names: tuple[str, ...]) -> FullAttentionSpec:
    # vLLM wraps layers of one kind but differing sizes; with equal sizes the first stands for all.
    inner = getattr(spec, "kv_cache_specs", None)
    if isinstance(inner, dict):
        kinds = set(map(repr, inner.values()))
        spec = next(iter(inner.values())) if len(kinds) == 1 else spec
    if not isinstance(spec, FullAttentionSpec) or isinstance(spec, MLAAttentionSpec):
        raise UnsupportedError(
            "this model's attention",
            reason="only full attention keeps every token's K and V",
            got=f"{type(spec).__name__} in {names[0]}",
        )
    if spec.sliding_window is not None or getattr(spec, "attention_chunk_size", None) is not None:
        raise UnsupportedError(
            "sliding-window or chunked attention",
            reason="blocks outside the window are dropped",
            got=names[0],
        )
    if getattr(spec, "head_size_v", None) not in (None, spec.head_size):
        raise UnsupportedError(
            "this model's V heads",
            reason="pools of K and V have one shape",
            expected=f"head size {spec.head_size}",
            got=str(spec.head_size_v),
        )
    quantised = getattr(spec, "kv_quant_mode", None)
    if quantised is not None and int(quantised) != 0:
        raise UnsupportedError(
            "a quantised KV cache",
            reason="its scales are not moved",
            fix="Start vLLM with --kv-cache-dtype auto; HAWK converts in flight.",
        )
    return spec


def _fingerprint(vllm_config: VllmConfig) -> str:
    """Model type, a hash of its config and one of its weights.

    Paths are left out: two machines rarely keep a model in one place.
    """
    model, load = vllm_config.model_config, vllm_config.load_config
    config = {k: v for k, v in model.hf_config.to_dict().items() if k not in _VOLATILE}
    # Tenstorrent's vLLM plugin puts TT before the name of each architecture: the same model, other code.
    config["architectures"] = [name.removeprefix("TT") for name in config.get("architectures") or ()]
    text = json.dumps(config, sort_keys=True, default=str)
    weights = model_weights_digest(model.model, model.revision, str(load.load_format), load.download_dir)
    return "/".join([str(config.get("model_type", "model")), hashlib.sha256(text.encode()).hexdigest()[:16], weights])


def request_keys(request: Request, adapters: AdapterDigests | None = None) -> list[tuple[str, str]]:
    """What keys a request's KV beside its tokens: LoRA, cache salt, multimodal inputs.

    ``adapters`` remembers digests of adapters; without it the adapter's files are sampled anew.
    """
    keys: list[tuple[str, str]] = []
    lora = request.lora_request
    if lora is not None:
        # Two hosts may give one name to two adapters.
        digest = (adapters or AdapterDigests()).of(lora.lora_int_id, lora.lora_path, lora.load_inplace)
        keys += [("lora", lora.lora_name), ("adapter", digest)]
    if request.cache_salt:
        keys.append(("salt", request.cache_salt))
    for feature in request.mm_features or ():
        position = feature.mm_position
        keys.append(("multimodal", f"{feature.identifier}@{position.offset}+{position.length}"))
    return keys
