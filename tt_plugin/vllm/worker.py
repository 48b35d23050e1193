"""vLLM's worker and model runner for the simulated NPU.

vLLM's runner allocates the KV cache, zeroes and copies its blocks; here these act on the pools in the banks, and vLLM
is given handles.  Nothing else of the runner touches KV memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.logger import init_logger
from vllm.model_executor.models.utils import extract_layer_index
from vllm.platforms import current_platform
from vllm.utils.torch_utils import set_random_seed
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_worker import init_worker_distributed_environment
from vllm.v1.worker.utils import bind_kv_cache

from hawk_connector.errors import UnsupportedError
from hawk_connector.layout.kv_pool import KVPoolLayout

from ..config import NpuConfig
from ..device.banks import BankTable
from ..device.kv_pool import KVPools, largest_num_blocks
from ..device.layer_tiles import LayerTiles
from ..device.simulated import SimulatedDevice
from .handle import KVHandle

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
    from vllm.v1.worker.worker_base import CompilationTimes

__all__ = ["SimulatedNpuModelRunner", "SimulatedNpuWorker"]

logger = init_logger("vllm.tt_plugin")


def layout_of(npu: NpuConfig, specs: Mapping[str, KVCacheSpec]) -> KVPoolLayout:
    """The pool layout for vLLM's KV cache specs by layer name.

    UnsupportedError unless all layers are of one full-attention kind.
    """
    kinds = set(specs.values())
    if len(kinds) != 1:
        raise UnsupportedError(
            "a model whose layers have different KV caches",
            reason="the NPU's pools hold one group of equal layers",
            got=", ".join(sorted(type(kind).__name__ for kind in kinds)) or "no layer with a KV cache",
            fix="Serve this model on vLLM's own platform (unset HAWK_NPU).",
        )
    spec = kinds.pop()
    plain = type(spec) is FullAttentionSpec and spec.sliding_window is None
    if not plain or spec.head_size_v != spec.head_size:
        raise UnsupportedError(
            f"a KV cache of kind {type(spec).__name__}",
            reason="the NPU's pools hold full attention with equal K and V dims",
            fix="Serve this model on vLLM's own platform (unset HAWK_NPU).",
        )
    return npu.layout(
        layers=len(specs), kv_heads=spec.num_kv_heads, head_dim=spec.head_size, block_size=spec.block_size
    )


class SimulatedNpuModelRunner(CPUModelRunner):
    """vLLM's CPU model runner whose KV cache lies in a simulated device."""

    npu_pools: KVPools | None = None

    def initialize_kv_cache_tensors(
        self, kv_cache_config: KVCacheConfig, kernel_block_sizes: list[int], *_: Any, **__: Any
    ) -> dict[str, torch.Tensor]:
        """Allocates the pools on the device and binds a handle to each layer: layer name -> KVHandle."""
        groups = kv_cache_config.kv_cache_groups
        if len(groups) != 1 or self.shared_kv_cache_layers:
            raise UnsupportedError(
                f"a model with {len(groups)} groups of KV layers, {len(self.shared_kv_cache_layers)} of them shared",
                reason="the NPU's pools hold one group of equal layers, each with its own KV",
                fix="Serve this model on vLLM's own platform (unset HAWK_NPU).",
            )
        group = groups[0]
        spec = group.kv_cache_spec
        if list(kernel_block_sizes) != [spec.block_size]:
            raise UnsupportedError(
                f"blocks of {spec.block_size} tokens split for kernels into {kernel_block_sizes}",
                reason="a pool's block is vLLM's block",
            )
        names = sorted(group.layer_names, key=extract_layer_index)
        npu = NpuConfig.parse(self.vllm_config.additional_config)
        layout = layout_of(npu, dict.fromkeys(names, spec))
        self.close_npu()
        device = SimulatedDevice(layout.chips, BankTable.named(npu.device))
        pools = KVPools(device, layout, kv_cache_config.num_blocks)
        self.npu_pools = pools
        layers = self.compilation_config.static_forward_context
        handles: dict[str, torch.Tensor] = {
            name: KVHandle.make(LayerTiles(pools, index, spec.num_kv_heads, layers[name].impl.num_heads), npu.landing)
            for index, name in enumerate(names)
        }
        bind_kv_cache(handles, layers, self.kv_caches, kv_cache_groups=groups)
        logger.info(
            "KV pools on %d x %s (%d banks each): %s, %s, %d blocks of %d tokens, %.1f MiB.",
            layout.chips,
            npu.device,
            layout.banks,
            layout.kind,
            layout.codec,
            pools.num_blocks,
            layout.block_size,
            pools.nbytes / 2**20,
        )
        return handles

    def close_npu(self) -> None:
        """Gives the device's memory back."""
        if self.npu_pools is not None:
            self.npu_pools.device.close()
            self.npu_pools = None

    def _pools(self) -> KVPools:
        if self.npu_pools is None:
            raise RuntimeError("vLLM touched KV blocks before the KV cache was allocated")
        return self.npu_pools

    def _init_kv_zero_meta(self) -> None:
        # vLLM's own would note the addresses of the handles.
        pass

    def _zero_block_ids(self, block_ids: list[int]) -> None:
        self._pools().zero_blocks(block_ids)

    def _update_states(self, scheduler_output: SchedulerOutput) -> Any:
        # vLLM copies blocks of its caches here, after it has zeroed new ones: that acts on the handles only.
        result = super()._update_states(scheduler_output)
        copies = getattr(scheduler_output, "kv_cache_block_copies", None)
        if copies:
            self._pools().copy_blocks([copy.src_block_id for copy in copies], [copy.dst_block_id for copy in copies])
        return result


class SimulatedNpuWorker(CPUWorker):
    """vLLM's CPU worker with the NPU's model runner."""

    model_runner: SimulatedNpuModelRunner

    def init_device(self) -> None:
        """Sets up the process group and the model runner.

        vLLM's own names its runner class inside; apart from that it warns of libraries that are not preloaded and
        pins threads, neither of which the NPU's worker needs.
        """
        self.device = torch.device("cpu")
        init_worker_distributed_environment(
            self.vllm_config,
            self.rank,
            self.distributed_init_method,
            self.local_rank,
            current_platform.dist_backend,
        )
        set_random_seed(self.model_config.seed)
        self.model_runner = SimulatedNpuModelRunner(self.vllm_config, self.device)

    def determine_available_memory(self) -> int:
        """Bytes for the KV cache, in vLLM's terms.

        What the user grants (--kv-cache-memory-bytes) is DRAM of the NPU; vLLM turns the answer into blocks by its
        own size of a block, so the blocks that fit the pools are given in that size.
        """
        granted = super().determine_available_memory()
        specs = self.get_kv_cache_spec()
        npu = NpuConfig.parse(self.vllm_config.additional_config)
        layout = layout_of(npu, specs)
        block_bytes = layout.chips * layout.block_bytes
        most = largest_num_blocks(BankTable.named(npu.device), layout)
        blocks = min(granted // block_bytes, most)
        logger.info(
            "%.1f MiB of the NPU's DRAM hold %d blocks of %d tokens (%d bytes each, all chips; %d would fit). "
            "vLLM reports them below in the bytes that they would take on the host.",
            granted / 2**20,
            blocks,
            layout.block_size,
            block_bytes,
            most,
        )
        return int(blocks * sum(spec.page_size_bytes for spec in specs.values()))

    def compile_or_warm_up_model(self) -> CompilationTimes:
        """Compiles the kernels (seconds in a fresh installation, nothing later) before the first request."""
        for handle in self.model_runner.kv_caches[:1]:
            handle.tiles.warm_up()
        return super().compile_or_warm_up_model()

    def shutdown(self) -> None:
        """Stops the worker and gives the device's memory back."""
        super().shutdown()
        runner = getattr(self, "model_runner", None)
        if runner is not None:
            runner.close_npu()
