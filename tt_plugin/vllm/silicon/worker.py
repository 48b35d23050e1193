"""vLLM's worker on Tenstorrent's silicon: that of Tenstorrent's plugin, with a KV connector.

It holds a TTWorker and passes on what vLLM asks of it.  Added are the connector's registration and its calls around
each step, the model's real layers in vLLM's view of the cache, and zeroing of blocks.  One worker drives all chips.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole
from vllm.logger import init_logger
from vllm.v1.worker.worker_base import WorkerBase
from vllm_tt_plugin.worker import TTWorker

from ...config import SiliconConfig
from .layers import every_layer
from .page_tables import CrossLayerModel
from .pools import LayerHandle, live_pools
from .transfers import StepTransfers

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata
    from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
    from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput
    from vllm.v1.worker.worker_base import CompilationTimes

    from ...device.interface import Pools

__all__ = ["SiliconWorker"]

logger = init_logger("vllm.tt_plugin")


class SiliconWorker(WorkerBase):
    """Passes vLLM's calls on to ``inner`` and makes the connector's between them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """vLLM's arguments of a worker."""
        super().__init__(*args, **kwargs)
        self.inner = TTWorker(*args, **kwargs)
        self._connector: KVConnectorBase_V1 | None = None
        self._transfers: StepTransfers | None = None
        self._pools: Pools | None = None

    def __getattr__(self, name: str) -> Any:
        # Reached only for names that neither this class nor vLLM's base has: calls by name of newer executors.
        if name == "inner":  # before __init__ has set it, or after a failure in it
            raise AttributeError(name)
        return getattr(self.inner, name)

    # --- start

    def init_device(self) -> None:
        self.inner.init_device()
        self.device = self.inner.device
        self.model_runner = self.inner.model_runner

    def load_model(self, **kwargs: Any) -> None:
        self.inner.load_model(**kwargs)
        if self.vllm_config.kv_transfer_config is None:
            return
        if SiliconConfig.parse(self.vllm_config.additional_config).pool == "cross_layer":
            runner = self.inner.model_runner
            runner.model = CrossLayerModel(runner.model, self._layers)

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        """A spec for each attention layer of the model, heads of all chips."""
        return every_layer(self.inner.get_kv_cache_spec(), self._layers)

    def determine_available_memory(self) -> int:
        """Bytes, in vLLM's terms, that make it plan as many blocks as Tenstorrent's plugin has chosen.

        The plugin answers for the layers that it shows, and vLLM divides by those that it has been told of.
        """
        shown = len(self.inner.get_kv_cache_spec())
        budget: int = self.inner.determine_available_memory()
        return budget // shown * self._layers

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        """Has the model allocate its caches, then registers them with the connector, which begins to serve."""
        self.inner.initialize_from_config(kv_cache_config)
        if self.vllm_config.kv_transfer_config is None:
            return
        names = [name for group in kv_cache_config.kv_cache_groups for name in group.layer_names]
        runner = self.inner.model_runner
        config = SiliconConfig.parse(self.vllm_config.additional_config)
        pools = live_pools(
            self.inner.mesh_device,
            runner.kv_caches,
            layers=self._layers,
            config=config,
            model=runner.model,
        )
        connector = KVConnectorFactory.create_connector(self.vllm_config, KVConnectorRole.WORKER, kv_cache_config)
        assert isinstance(connector, KVConnectorBase_V1)
        connector.register_kv_caches({name: LayerHandle(pools, config.landing) for name in names})
        self._pools, self._connector, self._transfers = pools, connector, StepTransfers(connector)
        layout = pools.layout
        logger.info(
            "KV pools on %d chips of %d banks: %s, %s, %d blocks of %d tokens, K in %s RoPE order.",
            layout.chips,
            layout.banks,
            layout.kind,
            layout.codec,
            pools.num_blocks,
            layout.block_size,
            "interleaved" if layout.rope_interleaved else "half-split",
        )

    def compile_or_warm_up_model(self) -> CompilationTimes:
        return self.inner.compile_or_warm_up_model()

    def get_kv_connector_handshake_metadata(self) -> dict[tuple[int, int], KVConnectorHandshakeMetadata] | None:
        """What the scheduler's connector needs of this worker, by (pipeline rank, tensor-parallel rank)."""
        metadata = self._connector.get_handshake_metadata() if self._connector is not None else None
        return None if metadata is None else {(0, 0): metadata}

    # --- steps

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | AsyncModelRunnerOutput | None:
        if self._pools is not None:
            zeroed = getattr(scheduler_output, "new_block_ids_to_zero", None)
            if zeroed:
                # Before the loads of this step: a block may be both new and about to be loaded.
                self._pools.zero_blocks(zeroed)
        if self._transfers is None:
            return self.inner.execute_model(scheduler_output)
        return self._transfers.execute(scheduler_output, self.inner.execute_model)

    def sample_tokens(self, grammar_output: GrammarOutput) -> ModelRunnerOutput | AsyncModelRunnerOutput:
        result = self.inner.sample_tokens(grammar_output)
        if self._transfers is not None:
            # None is passed on: vLLM then raises what execute_model failed with.
            result = self._transfers.sampled(result)
        return result

    # --- passed on as they are; vLLM's base has its own of these, so __getattr__ does not see them

    def check_health(self) -> None:
        self.inner.check_health()

    def get_supported_kv_cache_layouts(self) -> list[str]:
        return list(self.inner.get_supported_kv_cache_layouts())

    def set_kv_cache_layout(self, kv_cache_layout: str) -> None:
        self.inner.set_kv_cache_layout(kv_cache_layout)

    def synchronize_device(self) -> None:
        self.inner.synchronize_device()

    def supports_draft_weight_updates(self) -> bool:
        return bool(self.inner.supports_draft_weight_updates())

    def apply_model(self, fn: Any) -> Any:
        return self.inner.apply_model(fn)

    def get_model_inspection(self) -> str:
        return str(self.inner.get_model_inspection())

    def release_late_interaction_query_cache(self, query_keys: list[str]) -> None:
        self.inner.release_late_interaction_query_cache(query_keys)

    def add_lora(self, lora_request: Any) -> bool:
        return bool(self.inner.add_lora(lora_request))

    def remove_lora(self, lora_id: int) -> bool:
        return bool(self.inner.remove_lora(lora_id))

    def pin_lora(self, lora_id: int) -> bool:
        return bool(self.inner.pin_lora(lora_id))

    def list_loras(self) -> set[int]:
        return set(self.inner.list_loras())

    def get_model(self) -> Any:
        return self.inner.get_model()

    def get_cache_block_size_bytes(self) -> int:
        return int(self.inner.get_cache_block_size_bytes())

    def reset_mm_cache(self) -> None:
        self.inner.reset_mm_cache()

    def shutdown(self) -> None:
        """Ends the connector, then the worker, whose own end closes the chips.

        A read that the connector could not end may still write its memory; the log says so then.
        """
        if self._connector is not None:
            self._connector.shutdown()
            self._connector = self._transfers = None
        self.inner.shutdown()

    @property
    def _layers(self) -> int:
        """Attention layers of the model, from its own configuration."""
        return int(self.model_config.get_num_layers_by_block_type(self.parallel_config, "attention"))
