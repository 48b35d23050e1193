"""HawkConnector: the face that vLLM sees.  It translates vLLM's objects and delegates; it holds no logic.

vLLM makes one instance for its scheduler and one in each worker, and a prefill instance and a decode instance load the
same class: four sides, of which each HawkConnector has exactly one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .vllm_version import check_version

# Before the imports below, which an older vLLM may not have: the user gets the reason and not an ImportError.
check_version()

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from .config import HawkConfig, PrefillConfig
from .vllm_facts import check_role, model_facts
from .vllm_sides import DecodeSchedulerSide, DecodeWorkerSide, PrefillSchedulerSide, PrefillWorkerSide
from .vllm_stats import HawkPromMetrics, HawkStats

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

__all__ = ["HawkConnector"]


@dataclass
class _StepMetadata(KVConnectorMetadata):
    """A PrefillStep or a DecodeStep on its way to the workers."""

    step: Any

    def following(self, earlier: _StepMetadata) -> _StepMetadata:
        """Both in one, for a platform whose scheduler gave the earlier step up: no worker has seen it."""
        return _StepMetadata(self.step.following(earlier.step))


@dataclass
class _Handshake(KVConnectorHandshakeMetadata):
    """A RankHandshake or a DecodeHandshake on its way to the scheduler."""

    value: Any


@dataclass
class _WorkerMetadata(KVConnectorWorkerMetadata):
    """A DecodeFeedback on its way to the scheduler."""

    feedback: Any

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Both in one; the decode side has one worker, so vLLM calls this only for steps that it joins."""
        assert isinstance(other, _WorkerMetadata)
        return _WorkerMetadata(other.feedback.following(self.feedback))


class HawkConnector(KVConnectorBase_V1, SupportsHMA):
    """KV connector between GPU prefill and NPU decode.  Configured by ``kv_connector_extra_config``."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        check_role(transfer.kv_role)
        config = HawkConfig.parse(dict(transfer.kv_connector_extra_config), transfer.kv_role)
        facts = model_facts(vllm_config, kv_cache_config, config.model_id)
        self._scheduler: PrefillSchedulerSide | DecodeSchedulerSide | None = None
        self._worker: PrefillWorkerSide | DecodeWorkerSide | None = None
        if role == KVConnectorRole.SCHEDULER:
            if isinstance(config, PrefillConfig):
                self._scheduler = PrefillSchedulerSide(transfer.engine_id)
            else:
                recompute = transfer.kv_load_failure_policy == "recompute"
                self._scheduler = DecodeSchedulerSide(config, facts.block_size, recompute)
        elif isinstance(config, PrefillConfig):
            self._worker = PrefillWorkerSide(config, facts, vllm_config)
        else:
            self._worker = DecodeWorkerSide(config, facts, vllm_config)

    # --- worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._on_worker.register(kv_caches)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return _Handshake(self._on_worker.handshake)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        assert isinstance(kv_connector_metadata, _StepMetadata)
        self._on_worker.before_step(kv_connector_metadata.step)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        self._on_worker.start_loads(self._step)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: a request decodes only after its whole load has landed."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing to save here: parcels are packed from whole blocks, after the step that completed them."""

    def wait_for_save(self) -> None:
        self._on_worker.after_step(self._step)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return self._on_worker.take_finished(finished_req_ids)

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._on_worker.take_failed_blocks()

    def get_kv_connector_stats(self) -> HawkStats | None:
        side = self._worker if self._worker is not None else self._on_scheduler
        payload = side.take_stats()
        return HawkStats(data=payload) if payload is not None else None

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        feedback = self._on_worker.take_feedback()
        return _WorkerMetadata(feedback) if feedback is not None else None

    # --- scheduler

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        values = {rank: m.value for rank, m in metadata.items() if isinstance(m, _Handshake)}
        self._on_scheduler.set_handshakes(values)

    def on_new_request(self, request: Request) -> None:
        self._on_scheduler.new_request(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._on_scheduler.matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        self._on_scheduler.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        return _StepMetadata(self._on_scheduler.build_step(scheduler_output))

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        meta = connector_output.kv_connector_worker_meta
        self._on_scheduler.step_ended(
            set(connector_output.finished_sending or ()),
            set(connector_output.finished_recving or ()),
            meta.feedback if isinstance(meta, _WorkerMetadata) else None,
        )

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self._on_scheduler.request_finished(request)

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._on_scheduler.request_finished(request)

    def has_pending_push_work(self) -> bool:
        return self._on_scheduler.holds_blocks

    def reset_cache(self) -> bool | None:
        """vLLM resets its caches, for new weights say: KV of before is neither offered nor taken any more."""
        return self._scheduler.reset_cache() if self._scheduler is not None else None

    # --- both

    def shutdown(self) -> None:
        for side in (self._scheduler, self._worker):
            if side is not None:
                side.close()

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """No preference: any fused layout can be read."""
        return None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> HawkStats | None:
        return HawkStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> HawkPromMetrics:
        return HawkPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @property
    def _on_scheduler(self) -> PrefillSchedulerSide | DecodeSchedulerSide:
        assert self._scheduler is not None, "vLLM called a scheduler's method on a worker's connector"
        return self._scheduler

    @property
    def _on_worker(self) -> PrefillWorkerSide | DecodeWorkerSide:
        assert self._worker is not None, "vLLM called a worker's method on a scheduler's connector"
        return self._worker

    @property
    def _step(self) -> Any:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, _StepMetadata)
        return metadata.step
