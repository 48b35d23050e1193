"""The decode side of `hawk bench transfer`: the product's workers over a device's pools, in a process of their own."""

from __future__ import annotations

import time
from dataclasses import dataclass

from hawk_connector.config import HawkConfig
from hawk_connector.decode.cache_landing import CacheLanding
from hawk_connector.decode.landing import Landing
from hawk_connector.decode.metadata import DecodeStep, LoadRequest
from hawk_connector.decode.worker import DecodeWorker
from hawk_connector.errors import LocalError
from hawk_connector.layout.kv_shape import KVShape
from hawk_connector.plan.facts import DecodeFacts, Mode
from hawk_connector.prefill.kv_source import cache_source
from hawk_connector.prefill.metadata import RankHandshake
from hawk_connector.protocol.ticket import RankAddress, Ticket
from hawk_connector.transport.engine import TransferEngine
from hawk_connector.transport.side_channel import SideChannelClient, SideChannelServer

from .cache import CacheShape, SyntheticCache
from .carriers import Protocol, engines
from .device import BenchPools, PoolRequest, bench_device
from .expected import ExpectedPages, Landed
from .face_rows import face_row_reads
from .prefill_process import MODEL

__all__ = ["DecodeProcess", "DecodeSpec", "DecoderSpec", "LoadResult"]

# How often the end of a load is looked for; when it was is taken from the worker's report.
_LOOK_S = 0.0005
_WAIT_S = 120.0


@dataclass(frozen=True)
class DecoderSpec:
    """One decode worker: its mode, which of the process' pools it lands in, and the prefill workers it pairs with."""

    name: str
    mode: Mode
    pools: str
    peers: tuple[str, ...]


@dataclass(frozen=True)
class DecodeSpec:
    """``ranks``: the prefill workers by name."""

    shape: CacheShape
    seed: int
    protocol: Protocol
    ranks: dict[str, RankHandshake]
    pools: dict[str, PoolRequest]
    decoders: tuple[DecoderSpec, ...]


@dataclass(frozen=True)
class LoadResult:
    """``seconds``: from the step that begins the load to its report.  The rest is the worker's own report."""

    seconds: float
    segments: int
    wire_bytes: int
    parcels: int
    pull_s: float
    land_s: float


class DecodeProcess:
    """Does what vLLM's steps do, and looks at what has landed."""

    def __init__(self, spec: DecodeSpec) -> None:
        self._spec = spec
        make = bench_device()
        self._pools: dict[str, BenchPools] = {name: make(request) for name, request in spec.pools.items()}
        self._expected = ExpectedPages(spec.shape, spec.seed)
        self._cache: SyntheticCache | None = None
        self._specs = {each.name: each for each in spec.decoders}
        self._workers = {each.name: self._worker(each) for each in spec.decoders}
        self._raw: TransferEngine | None = None

    def _worker(self, each: DecoderSpec) -> DecodeWorker:
        spec, shape = self._spec, self._spec.shape
        peers = [spec.ranks[name].address for name in each.peers]
        settings = {"mode": each.mode, "protocol": spec.protocol, "peers": peers}
        config = HawkConfig.parse(settings, "kv_consumer")
        landing = self._direct() if each.mode == "direct" else self._pools[each.pools].landing(each.mode)
        model = KVShape(shape.layers, shape.kv_heads, shape.head_dim, str(shape.torch_dtype).removeprefix("torch."))
        worker = DecodeWorker(
            config,
            DecodeFacts(model, MODEL, landing.layout, each.mode),
            landing,
            SideChannelServer("127.0.0.1", 0),
            SideChannelClient(),
            engines(config),
            wall_clock=time.perf_counter,  # so that its report says when the load ended by the clock used here
        )
        worker.start()
        return worker

    def _direct(self) -> Landing:
        """A cache like the prefill side's, of other values."""
        shape = self._spec.shape
        self._cache = SyntheticCache(shape, self._spec.seed + 1)
        return CacheLanding(cache_source(self._cache.sources(), shape.block_size).memory)

    def ready(self) -> None:
        """Answers once the workers are there."""

    def load(self, decoder: str, rank: str, request: str, ticket: tuple[str, str, str], landed: Landed) -> LoadResult:
        """A load, from the step that begins it to its end.  ``ticket``: (transfer, claim, digest)."""
        worker, handshake = self._workers[decoder], self._spec.ranks[rank]
        transfer, claim, digest = ticket
        wanted = Ticket(transfer, claim, digest, landed.tokens, (RankAddress(handshake.address, handshake.epoch),))
        step = DecodeStep(loads=[LoadRequest(request, wanted, 0, landed.block_ids)])
        begun = time.perf_counter()
        worker.step(step)
        ended = worker.take_ended()
        while not ended:
            if time.perf_counter() > begun + _WAIT_S:
                raise LocalError(f"{request} by {decoder} did not end within {_WAIT_S:g} s")
            time.sleep(_LOOK_S)
            ended = worker.take_ended()
        (report,) = [r for r in worker.log.recent() if r.request_id == request]
        if not ended[0].ok or report.landed_at is None:
            raise LocalError(f"{request} by {decoder} failed: {report.reason}")
        return LoadResult(
            report.landed_at - begun,
            report.segments,
            report.wire_bytes,
            report.parcels,
            report.pull_s or 0.0,
            report.land_s or 0.0,
        )

    def verify(self, decoder: str, landed: Landed, samples: int, seed: int) -> int:
        """Pages (in mode direct, blocks of a layer's K or V) compared; LocalError where one is wrong."""
        if self._specs[decoder].mode == "direct":
            assert self._cache is not None
            return self._expected.check_cache(self._cache.sources(), landed, samples, seed)
        return self._expected.check(self._pools[self._specs[decoder].pools], landed, samples, seed)

    def read_face_rows(self, pools: str, session: str, address: int, landed: Landed) -> LoadResult:
        """Reads every face row of the pages straight out of the cache at ``address``; planning is not counted."""
        target = self._pools[pools]
        if self._raw is None:
            self._raw = engines(HawkConfig.parse({"protocol": self._spec.protocol}, "kv_consumer"))()
            for start, length in target.regions():
                self._raw.register(start, length)
        segments = face_row_reads(self._spec.shape, address, target, landed)
        begun = time.perf_counter()
        self._raw.read(session, segments)
        seconds = time.perf_counter() - begun
        return LoadResult(seconds, segments.count, segments.nbytes, 0, seconds, 0.0)

    def verify_pools(self, pools: str, landed: Landed, samples: int, seed: int) -> int:
        """The same for what no worker has moved."""
        return self._expected.check(self._pools[pools], landed, samples, seed)
