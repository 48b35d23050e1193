"""The simulated NPU as vLLM's platform.

It stays a CPU platform to vLLM (the model's arithmetic runs on the host); what differs is where the KV cache lives.
What the NPU cannot serve is refused here, before anything is loaded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from hawk_connector.errors import UnsupportedError

from ..config import CONFIG_KEY, DEFAULT_BLOCK_SIZE, NpuConfig

if TYPE_CHECKING:
    from vllm.config import VllmConfig

__all__ = ["SimulatedNpuPlatform"]

logger = init_logger("vllm.tt_plugin")

_BACKEND = "tt_plugin.vllm.attention.TileAttentionBackend"
_WORKER = "tt_plugin.vllm.worker.SimulatedNpuWorker"

# Connectors that know that the registered caches are handles.  Any other would move the handles' own bytes.
_CONNECTORS = ("HawkConnector",)


class SimulatedNpuPlatform(CpuPlatform):
    """vLLM's CPU platform with the KV cache in a simulated Tenstorrent device."""

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        """Refuses what the NPU cannot serve and sets the worker and the default block size."""
        npu = NpuConfig.parse(_additional(vllm_config))
        _refuse_features(vllm_config)
        parallel = vllm_config.parallel_config
        if parallel.worker_cls == "auto":
            parallel.worker_cls = _WORKER
        super().check_and_update_config(vllm_config)
        cache = vllm_config.cache_config
        if not cache.user_specified_block_size:
            cache.block_size = DEFAULT_BLOCK_SIZE
            logger.info(
                "The simulated NPU uses blocks of %d tokens; --block-size sets another size.",
                DEFAULT_BLOCK_SIZE,
            )
        if vllm_config.model_config is not None:
            _check_model(vllm_config, npu)

    @classmethod
    def get_attn_backend_cls(
        cls, selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None
    ) -> str:
        """The tile attention backend; UnsupportedError for kinds of attention that it does not have."""
        kinds = {
            "use_mla": "MLA",
            "use_sparse": "sparse attention",
            "has_sink": "attention sinks",
            "has_sliding_window": "sliding-window attention",
            "use_mm_prefix": "attention over multimodal prefixes",
            "use_non_causal": "non-causal attention",
        }
        for field, kind in kinds.items():
            if getattr(attn_selector_config, field, False):
                raise _unsupported(kind, "the NPU's pools hold one group of full, causal attention layers")
        if attn_selector_config.attn_type not in (None, "decoder"):
            raise _unsupported(f"{attn_selector_config.attn_type} attention", "the NPU serves decoder-only models")
        register_backend(AttentionBackendEnum.CUSTOM, _BACKEND)
        return _BACKEND


def _additional(vllm_config: VllmConfig) -> dict[str, Any]:
    given = vllm_config.additional_config
    return given if isinstance(given, dict) else {}


def _unsupported(what: str, reason: str, fix: str | None = None) -> UnsupportedError:
    return UnsupportedError(what, reason=reason, fix=fix or "Serve this model on vLLM's own platform (unset HAWK_NPU).")


def _refuse_features(vllm_config: VllmConfig) -> None:
    parallel = vllm_config.parallel_config
    for field, flag in (
        ("tensor_parallel_size", "--tensor-parallel-size"),
        ("pipeline_parallel_size", "--pipeline-parallel-size"),
        ("decode_context_parallel_size", "--decode-context-parallel-size"),
        ("prefill_context_parallel_size", "--prefill-context-parallel-size"),
    ):
        size = getattr(parallel, field, 1)
        if size > 1:
            raise _unsupported(
                f"{flag} {size}",
                "one worker drives all chips of the NPU",
                f"Leave {flag} at 1; {CONFIG_KEY}.chips shares KV heads out over chips.",
            )
    if vllm_config.speculative_config is not None:
        raise _unsupported(
            "speculative decoding", "drafts' KV has no pool on the NPU", "Leave out --speculative-config."
        )
    dtype = vllm_config.cache_config.cache_dtype
    if dtype != "auto":
        raise _unsupported(
            f"--kv-cache-dtype {dtype}",
            "the pools have their own element type",
            f"Leave --kv-cache-dtype out and set {CONFIG_KEY}.kv_dtype.",
        )
    transfer = vllm_config.kv_transfer_config
    if transfer is not None and transfer.kv_connector not in (None, *_CONNECTORS):
        raise _unsupported(
            f"KV connector {transfer.kv_connector}",
            "vLLM holds only handles of the NPU's pools, and that connector would move the handles' bytes",
            f"Use {' or '.join(_CONNECTORS)}.",
        )
    if vllm_config.use_v2_model_runner:
        raise _unsupported(
            "vLLM's model runner V2", "the NPU's worker has a V1 runner", "Set VLLM_USE_V2_MODEL_RUNNER=0."
        )


def _check_model(vllm_config: VllmConfig, npu: NpuConfig) -> None:
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    if model.use_mla:
        raise _unsupported("MLA", "the NPU's pools hold K and V of each head")
    if model.is_hybrid or model.is_attention_free or model.has_inner_state:
        raise _unsupported("a model with recurrent state", "the NPU's pools hold attention layers only")
    if model.is_encoder_decoder:
        raise _unsupported("an encoder-decoder model", "the NPU serves decoder-only models")
    if npu.rope_interleaved and _partial_rotary(model.hf_text_config):
        raise _unsupported(
            "a model with partial rotary embedding",
            "only K rotated in all its dims is stored in interleaved order",
            f"Set {CONFIG_KEY}.rope_interleaved to false.",
        )
    npu.layout(
        layers=model.get_num_layers(parallel),
        kv_heads=model.get_total_num_kv_heads(),
        head_dim=model.get_head_size(),
        block_size=vllm_config.cache_config.block_size,
    )


def _partial_rotary(hf_config: Any) -> bool:
    parameters = getattr(hf_config, "rope_parameters", None)
    nested = parameters.get("partial_rotary_factor") if isinstance(parameters, dict) else None
    factor = nested or getattr(hf_config, "partial_rotary_factor", None) or getattr(hf_config, "rotary_pct", None)
    return factor is not None and float(factor) != 1.0
