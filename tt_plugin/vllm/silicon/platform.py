"""Tenstorrent's silicon as vLLM's platform: Tenstorrent's own, with HAWK's worker and scheduler.

What HAWK's decode side cannot do there is refused here, before a device is opened.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_tt_plugin.platform import TTPlatform

from hawk_connector.errors import UnsupportedError

from ...config import SiliconConfig

if TYPE_CHECKING:
    from vllm.config import VllmConfig

__all__ = ["SiliconPlatform"]

WORKER = "tt_plugin.vllm.silicon.worker.SiliconWorker"
SCHEDULER = "tt_plugin.vllm.silicon.scheduler.SiliconScheduler"
_PLAIN_SCHEDULER = "TTScheduler"


class SiliconPlatform(TTPlatform):
    """TTPlatform whose instances can be HAWK's decode side; without a KV connector it is TTPlatform alone."""

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        """Sets worker and scheduler, and refuses what a decode side on silicon cannot serve.

        Raises ConfigError for keys of ``tt_plugin`` that do not exist, UnsupportedError for what cannot be served.
        """
        transfer = vllm_config.kv_transfer_config
        if transfer is None:
            super().check_and_update_config(vllm_config)
            return
        SiliconConfig.parse(vllm_config.additional_config)
        # tt_transformers' prefill begins at token 0 or at a whole block: chunked attention takes no other start.
        if not transfer.kv_connector_extra_config.setdefault("load_whole_blocks", True):
            raise UnsupportedError(
                "load_whole_blocks false on Tenstorrent's silicon",
                reason="a prompt is continued at a whole block only",
                fix="Leave load_whole_blocks out of kv_connector_extra_config.",
            )
        if transfer.kv_role != "kv_consumer":
            raise UnsupportedError(
                f"kv_role {transfer.kv_role} on Tenstorrent's silicon",
                reason="HAWK prefills on GPUs and decodes on NPUs",
                expected="kv_consumer",
                fix="Run the prefill side on a GPU (or vLLM's CPU backend).",
            )
        parallel = vllm_config.parallel_config
        if parallel.worker_cls == "auto":
            parallel.worker_cls = WORKER
        super().check_and_update_config(vllm_config)
        scheduler = vllm_config.scheduler_config
        chosen = _qualified_name(scheduler.scheduler_cls)
        if not chosen.endswith(f".{_PLAIN_SCHEDULER}"):
            raise UnsupportedError(
                f"{chosen} with a KV connector",
                reason="lanes of one engine have no connector of their own",
                fix="Leave --data-parallel-size at 1 and run one instance for each group of chips.",
            )
        scheduler.scheduler_cls = SCHEDULER
        _check_model(vllm_config)


def _check_model(vllm_config: VllmConfig) -> None:
    """A loaded prompt is computed on from its middle, as after a hit in the prefix cache: the model must be able to."""
    from vllm.model_executor.model_loader.utils import get_model_architecture

    model_class, _ = get_model_architecture(vllm_config.model_config)
    capabilities = getattr(model_class, "model_capabilities", None) or {}
    if not capabilities.get("supports_prefix_caching", False):
        raise UnsupportedError(
            f"{model_class.__name__} as a decode side",
            reason="its prefill begins at token 0 only, and a loaded prompt is continued after its last whole block",
            expected="model_capabilities['supports_prefix_caching']",
            fix="Serve a model of tt_transformers that declares it.",
        )


def _qualified_name(scheduler: object) -> str:
    return scheduler if isinstance(scheduler, str) else f"{type(scheduler).__module__}.{scheduler}"
