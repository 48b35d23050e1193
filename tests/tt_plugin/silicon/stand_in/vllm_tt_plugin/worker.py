"""The worker's contract: it shows vLLM one layer, drives all chips, and gives results from `sample_tokens`."""

from __future__ import annotations

from typing import Any

import ttnn
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.worker.worker_base import CompilationTimes, WorkerBase

from vllm_tt_plugin.model_runner import TTModelRunner

BLOCKS = 24
CHIPS = 2


class TTWorker(WorkerBase):
    def __init__(
        self,
        vllm_config: Any,
        local_rank: int,
        rank: int,
        distributed_init_method: str,
        is_driver_worker: bool = True,
    ) -> None:
        super().__init__(vllm_config, local_rank, rank, distributed_init_method, is_driver_worker)
        self.mesh_device: Any = None

    def init_device(self) -> None:
        self.mesh_device = ttnn.Mesh(CHIPS)
        self.device = self.mesh_device
        self.model_runner: Any = TTModelRunner(self.mesh_device)

    def load_model(self) -> None:
        pass

    def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    def get_kv_cache_spec(self) -> dict[str, Any]:
        config = self.model_config
        return {
            "foo": FullAttentionSpec(
                block_size=self.cache_config.block_size,
                num_kv_heads=config.get_num_kv_heads(self.parallel_config),
                head_size=config.get_head_size(),
                dtype=config.dtype,
            )
        }

    def get_supported_kv_cache_layouts(self) -> list[str]:
        return ["LBHNC"]

    def determine_available_memory(self) -> int:
        self.cache_config.num_gpu_blocks_override = BLOCKS
        (spec,) = self.get_kv_cache_spec().values()
        return int(spec.page_size_bytes * BLOCKS)

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec
        heads = spec.num_kv_heads // min(CHIPS, spec.num_kv_heads)
        layers = self.model_config.get_num_layers_by_block_type(self.parallel_config, "attention")
        shape = (kv_cache_config.num_blocks, heads, spec.block_size, spec.head_size)
        runner = self.model_runner
        runner.kv_caches = runner.model.allocate_kv_cache(shape, spec.dtype, layers)

    def compile_or_warm_up_model(self) -> CompilationTimes:
        return CompilationTimes(language_model=0.0, encoder=0.0)

    def execute_model(self, scheduler_output: Any) -> ModelRunnerOutput | None:
        answer: ModelRunnerOutput | None = self.model_runner.execute_model(scheduler_output)
        return answer

    def sample_tokens(self, grammar_output: Any) -> ModelRunnerOutput | None:
        return self.model_runner.unsampled.popleft() if self.model_runner.unsampled else None

    def check_health(self) -> None:
        pass
