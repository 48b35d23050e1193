"""The platform's contract: it sets scheduler and (where "auto") worker, and marks the model's architecture."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.platforms.cpu import CpuPlatform

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class TTPlatform(CpuPlatform):
    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        from vllm.model_executor.models.registry import ModelRegistry

        super().check_and_update_config(vllm_config)
        ModelRegistry.register_model("TTLlamaForCausalLM", "vllm_tt_plugin.models:TTLlamaForCausalLM")
        names: list[Any] = vllm_config.model_config.hf_config.architectures
        names[:] = [name if name.startswith("TT") else "TT" + name for name in names]
        if vllm_config.parallel_config.worker_cls == "auto":
            vllm_config.parallel_config.worker_cls = "vllm_tt_plugin.worker.TTWorker"
        vllm_config.scheduler_config.scheduler_cls = "vllm_tt_plugin.scheduler.TTScheduler"
