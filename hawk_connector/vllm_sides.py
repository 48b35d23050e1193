"""The four sides in vLLM's terms: each turns vLLM's objects into plain values for its room.  Imports vLLM."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.v1.request import RequestStatus

from .config import DecodeConfig, HawkConfig, PrefillConfig
from .decode.cache_landing import CacheLanding
from .decode.landing import Landing, landing_provider
from .decode.metadata import DecodeFeedback, DecodeHandshake, DecodeStep
from .decode.scheduler import DecodeScheduler
from .decode.worker import DecodeWorker
from .errors import UnsupportedError
from .metrics import Payload
from .plan.pairing import DecodeFacts, PrefillFacts
from .prefill.kv_source import CacheSource, read_cache
from .prefill.metadata import PrefillStep, RankHandshake
from .prefill.scheduler import PrefillScheduler
from .prefill.worker import PrefillWorker
from .protocol.digest import token_digest
from .transport.carrier import configured_factory
from .transport.curve import CurveKeys, load_curve_keys
from .transport.side_channel import SideChannelClient, SideChannelServer
from .vllm_facts import ModelFacts, request_keys
from .vllm_fingerprint import AdapterDigests

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    from .transform.reference import LayerSource

_log = logging.getLogger(__name__)

__all__ = ["DecodeSchedulerSide", "DecodeWorkerSide", "PrefillSchedulerSide", "PrefillWorkerSide"]


def _keys(config: HawkConfig) -> CurveKeys | None:
    return load_curve_keys(config.curve_key_file, config.curve_known_keys_file)


def _server(config: HawkConfig, port: int) -> SideChannelServer:
    return SideChannelServer(
        config.side_channel_host,
        port,
        keys=_keys(config),
        max_connections=config.max_connections,
        max_messages_per_s=config.max_messages_per_s,
    )


def _digest(request: Request, adapters: AdapterDigests) -> str:
    return token_digest(request.prompt_token_ids or (), request_keys(request, adapters))


def _read_cache(
    kv_caches: Mapping[str, Any], facts: ModelFacts, context: Mapping[str, Any]
) -> tuple[list[LayerSource], CacheSource | None]:
    """What vLLM has registered; ``context``: its attention layers by name.  UnsupportedError: see ``read_cache``."""
    backends = {name: context[name].attn_backend.get_name() for name in facts.layer_names}
    return read_cache(kv_caches, facts.layer_names, backends, facts.local_heads, facts.shape.head_dim, facts.block_size)


class PrefillSchedulerSide:
    def __init__(self, engine_id: str) -> None:
        self._scheduler = PrefillScheduler(engine_id)
        self._adapters = AdapterDigests()

    def set_handshakes(self, values: Mapping[int, RankHandshake]) -> None:
        self._scheduler.set_ranks(values)

    def new_request(self, request: Request) -> None:
        pass

    def matched_tokens(self, request: Request, computed: int) -> tuple[int, bool]:
        return 0, False

    def allocated(self, request: Request, block_ids: list[int], external: int) -> None:
        if request.prompt_token_ids is None:
            return  # prompt embeddings are refused at start; nothing binds such KV
        self._scheduler.allocated(
            request.request_id,
            request.kv_transfer_params,
            _digest(request, self._adapters),
            request.num_prompt_tokens,
            block_ids,
        )

    def build_step(self, output: SchedulerOutput) -> PrefillStep:
        scheduled = output.num_scheduled_tokens
        new = [
            (r.req_id, r.block_ids[0], r.num_computed_tokens + scheduled[r.req_id]) for r in output.scheduled_new_reqs
        ]
        cached = output.scheduled_cached_reqs
        rows = zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True)
        resumed = [
            (
                req,
                ids[0] if ids is not None else None,
                req in cached.resumed_req_ids,
                computed + scheduled[req],
            )
            for req, ids, computed in rows
        ]
        return self._scheduler.build_step(new, resumed, output.preempted_req_ids or ())

    def step_ended(self, sent: set[str], received: set[str], feedback: DecodeFeedback | None) -> None:
        self._scheduler.released(sent)

    def request_finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        ended_well = request.status in (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)
        return self._scheduler.finished(request.request_id, ended_well)

    @property
    def holds_blocks(self) -> bool:
        return self._scheduler.holds_blocks

    def reset_cache(self) -> bool:
        self._scheduler.reset()
        return True

    def take_stats(self) -> Payload | None:
        return None

    def close(self) -> None:
        pass


class PrefillWorkerSide:
    def __init__(self, config: PrefillConfig, facts: ModelFacts, vllm_config: VllmConfig) -> None:
        self._facts = facts
        self._context = vllm_config.compilation_config.static_forward_context
        rank = get_tensor_model_parallel_rank()
        # Each rank listens for itself, at the configured port plus its rank.
        port = config.side_channel_port + rank if config.side_channel_port else 0
        prefill = PrefillFacts(
            shape=facts.shape,
            model=facts.fingerprint,
            ranks=vllm_config.parallel_config.tensor_parallel_size,
            rank=rank,
            block_size=facts.block_size,
            send_buffer_bytes=config.send_buffer_bytes,
        )
        server = _server(config, port)
        self._worker = PrefillWorker(config, prefill, server, configured_factory(config, 1024))

    def register(self, kv_caches: Mapping[str, Any]) -> None:
        facts = self._facts
        layers, cache = _read_cache(kv_caches, facts, self._context)
        if not layers and cache is not None:
            _log.warning(
                "%s keeps its cache in an order of its own: only decode sides in mode direct, with the same kernels, "
                "can be served. For others start this side with --dtype float32 (and, on a CPU, a model whose head "
                "size is a multiple of 32).",
                cache.memory.layout.backend,
            )
        self._worker.register(layers, facts.block_size, cache)

    @property
    def handshake(self) -> RankHandshake:
        return self._worker.handshake

    def before_step(self, step: PrefillStep) -> None:
        self._worker.before_step(step)

    def start_loads(self, step: PrefillStep) -> None:
        pass

    def after_step(self, step: PrefillStep) -> None:
        self._worker.after_step(step)

    def take_finished(self, finished: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return self._worker.take_finished(finished), None

    def take_failed_blocks(self) -> set[int]:
        return set()

    def take_feedback(self) -> DecodeFeedback | None:
        return None

    def take_stats(self) -> Payload | None:
        return self._worker.log.take()

    def close(self) -> None:
        self._worker.close()


class DecodeSchedulerSide:
    def __init__(self, config: DecodeConfig, block_size: int, recompute: bool) -> None:
        self._scheduler = DecodeScheduler(
            config, block_size, SideChannelClient(keys=_keys(config)), recompute=recompute
        )
        self._adapters = AdapterDigests()

    def set_handshakes(self, values: Mapping[int, DecodeHandshake]) -> None:
        self._scheduler.set_worker(values[0])

    def new_request(self, request: Request) -> None:
        if request.prompt_token_ids is not None:
            self._scheduler.new_request(
                request.request_id,
                request.kv_transfer_params,
                _digest(request, self._adapters),
                request.num_prompt_tokens,
            )

    def matched_tokens(self, request: Request, computed: int) -> tuple[int | None, bool]:
        return self._scheduler.matched_tokens(request.request_id, request.num_prompt_tokens, computed)

    def allocated(self, request: Request, block_ids: list[int], external: int) -> None:
        self._scheduler.allocated(request.request_id, request.num_prompt_tokens, external, block_ids)

    def build_step(self, output: SchedulerOutput) -> DecodeStep:
        return self._scheduler.build_step()

    def step_ended(self, sent: set[str], received: set[str], feedback: DecodeFeedback | None) -> None:
        if feedback is not None:
            self._scheduler.worker_says(feedback)
        self._scheduler.loaded(received)

    def request_finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        self._scheduler.finished(request.request_id)
        return False, None

    @property
    def holds_blocks(self) -> bool:
        return False

    def reset_cache(self) -> bool:
        return self._scheduler.reset()

    def take_stats(self) -> Payload | None:
        return self._scheduler.log.take()

    def close(self) -> None:
        self._scheduler.close()


class DecodeWorkerSide:
    def __init__(self, config: DecodeConfig, facts: ModelFacts, vllm_config: VllmConfig) -> None:
        ranks = vllm_config.parallel_config.tensor_parallel_size
        if ranks > 1:
            raise UnsupportedError(
                "tensor parallelism on the decode side",
                reason="one worker drives all chips of an NPU mesh",
                expected="--tensor-parallel-size 1",
                got=str(ranks),
            )
        self._config = config
        self._facts = facts
        self._context = vllm_config.compilation_config.static_forward_context
        self._cache: CacheSource | None = None  # keeps the memory that mode direct lands in
        self._recompute = vllm_config.kv_transfer_config.kv_load_failure_policy == "recompute"
        self._failed_blocks: set[int] = set()
        self._worker: DecodeWorker | None = None

    def register(self, kv_caches: Mapping[str, Any]) -> None:
        config, facts = self._config, self._facts
        landing = self._landing(kv_caches)
        self._worker = DecodeWorker(
            config,
            DecodeFacts(shape=facts.shape, model=facts.fingerprint, layout=landing.layout, mode=config.mode),
            landing,
            _server(config, config.side_channel_port),
            SideChannelClient(keys=_keys(config)),
            configured_factory(config, config.max_segments_per_batch),
            recompute=self._recompute,
        )
        self._worker.start()

    def _landing(self, kv_caches: Mapping[str, Any]) -> Landing:
        if self._config.mode != "direct":
            return landing_provider(self._config.landing)(kv_caches, self._config.mode)
        _, self._cache = _read_cache(kv_caches, self._facts, self._context)
        if self._cache is None:
            raise UnsupportedError(
                "mode direct",
                reason="this vLLM's layers are not kept alike",
                fix="Set mode to hawk or host, or choose another attention backend.",
            )
        kind = self._cache.blocks[0].device.type
        if kind != "cpu" and self._config.protocol != "rdma":
            raise UnsupportedError(
                f"mode direct into a cache in {kind} memory over {self._config.protocol}",
                reason="only an RDMA device writes there",
                fix="Set protocol to rdma on both sides.",
            )
        return CacheLanding(self._cache.memory)

    @property
    def handshake(self) -> DecodeHandshake:
        assert self._worker is not None
        return self._worker.handshake

    def before_step(self, step: DecodeStep) -> None:
        pass

    def start_loads(self, step: DecodeStep) -> None:
        assert self._worker is not None
        self._worker.step(step)

    def after_step(self, step: DecodeStep) -> None:
        pass

    def take_finished(self, finished: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Failed blocks are kept for ``take_failed_blocks``, which vLLM calls right after, in the same step."""
        assert self._worker is not None
        ended = self._worker.take_ended()
        for load in ended:
            if not load.ok:
                self._failed_blocks.update(load.block_ids)
        return None, {load.request for load in ended} or None

    def take_failed_blocks(self) -> set[int]:
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def take_feedback(self) -> DecodeFeedback | None:
        return self._worker.take_feedback() if self._worker is not None else None

    def take_stats(self) -> Payload | None:
        assert self._worker is not None
        return self._worker.log.take()

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()
