"""A model class for vLLM's registry to inspect; nothing makes one."""

from __future__ import annotations

from typing import ClassVar

from vllm.model_executor.models.llama import LlamaForCausalLM


class TTLlamaForCausalLM(LlamaForCausalLM):
    model_capabilities: ClassVar[dict[str, bool]] = {"supports_prefix_caching": True}
