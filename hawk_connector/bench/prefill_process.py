"""The prefill side of `hawk bench transfer`: the product's workers over one cache, in a process of their own."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hawk_connector.config import HawkConfig
from hawk_connector.errors import LocalError
from hawk_connector.layout.kv_shape import KVShape
from hawk_connector.metrics import TransferReport
from hawk_connector.plan.pairing import PrefillFacts
from hawk_connector.prefill.metadata import BeginTransfer, PrefillStep, RankHandshake, RequestProgress
from hawk_connector.prefill.worker import PrefillWorker
from hawk_connector.transport.engine import TransferEngine
from hawk_connector.transport.side_channel import SideChannelServer

from .cache import CacheShape, SyntheticCache
from .carriers import Protocol, engines

__all__ = ["MODEL", "PrefillProcess", "PrefillSpec", "WorkerSpec"]

MODEL = "hawk bench"
_WAIT_S = 120.0
_LOOK_S = 0.001


@dataclass(frozen=True)
class WorkerSpec:
    """One prefill worker.  All of a process' have the same cache."""

    name: str
    send_buffer_bytes: int
    parcel_tokens: int
    pack_threads: int


@dataclass(frozen=True)
class PrefillSpec:
    shape: CacheShape
    seed: int
    protocol: Protocol
    workers: tuple[WorkerSpec, ...]


class PrefillProcess:
    """Does what vLLM's steps do, without their compute: the cache is filled once."""

    def __init__(self, spec: PrefillSpec) -> None:
        self._spec = spec
        self._cache = SyntheticCache(spec.shape, spec.seed)
        self._workers = {each.name: self._worker(each) for each in spec.workers}
        self._raw: TransferEngine | None = None

    def _worker(self, each: WorkerSpec) -> PrefillWorker:
        shape = self._spec.shape
        settings: dict[str, Any] = {
            "protocol": self._spec.protocol,
            "send_buffer_bytes": each.send_buffer_bytes,
            "parcel_tokens": each.parcel_tokens,
            "pack_threads": each.pack_threads,
        }
        config = HawkConfig.parse(settings, "kv_producer")
        model = KVShape(shape.layers, shape.kv_heads, shape.head_dim, str(shape.torch_dtype).removeprefix("torch."))
        facts = PrefillFacts(model, MODEL, 1, 0, shape.block_size, each.send_buffer_bytes)
        worker = PrefillWorker(config, facts, SideChannelServer("127.0.0.1", 0), engines(config))
        worker.register(self._cache.sources(), shape.block_size)
        return worker

    def handshakes(self) -> dict[str, RankHandshake]:
        return {name: worker.handshake for name, worker in self._workers.items()}

    def wait_paired(self, worker: str, count: int) -> None:
        """Until ``count`` decode sides are paired with the worker."""
        seen = 0

        def paired() -> bool:
            nonlocal seen
            payload = self._workers[worker].log.take() or {}
            for gauges in payload.get("gauges", {}).values():
                seen = gauges.get("peers", {}).get("paired", seen)
            return seen >= count

        _wait(paired, f"{count} decode sides pair with {worker}")

    def offer(
        self, worker: str, request: str, transfer: str, digest: str, tokens: int, table: Sequence[int], packed: bool
    ) -> None:
        """A request's whole prefill, its tokens in the blocks ``table``.  ``packed``: returns when it is packed."""
        steps = (
            PrefillStep(begun=[BeginTransfer(request, transfer, digest, tokens)]),
            PrefillStep(progress=[RequestProgress(request, tokens, tuple(table))]),
            PrefillStep(finished=[request]),
        )
        for step in steps:
            self._workers[worker].before_step(step)
            self._workers[worker].after_step(step)
        if packed:
            self._wait_released(worker, request)

    def collect(self, worker: str, request: str, released: bool) -> TransferReport:
        """The report of a transfer that has ended.  ``released``: vLLM has its blocks back already."""
        if not released:
            self._wait_released(worker, request)
        found: list[TransferReport] = []

        def ended() -> bool:
            found.extend(r for r in self._workers[worker].log.recent() if r.request_id == request)
            return bool(found)

        _wait(ended, f"the end of {request}")
        return found[0]

    def raw_cache(self) -> tuple[str, int]:
        """(session, address) of an engine that lets the cache itself be read."""
        if self._raw is None:
            self._raw = engines(HawkConfig.parse({"protocol": self._spec.protocol}, "kv_producer"))()
            self._raw.register(self._cache.address, self._spec.shape.nbytes)
        return self._raw.session, self._cache.address

    def _wait_released(self, worker: str, request: str) -> None:
        _wait(lambda: bool(self._workers[worker].take_finished({request})), f"{request} is packed")


def _wait(happened: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + _WAIT_S
    while not happened():
        if time.monotonic() > deadline:
            raise LocalError(f"waiting for this took more than {_WAIT_S:g} s: {what}")
        time.sleep(_LOOK_S)
