"""The prefill worker: the thin loop around ``protocol.prefill`` on one rank.

Three threads meet here under one short lock.  vLLM's step thread says what was computed; the packer packs; the channel
loop speaks with decode sides.  Nothing that may wait is done under the lock, so a step never blocks on a peer.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial

import msgspec
import torch

from ..config import PrefillConfig
from ..errors import LocalError, ProtocolError, UnsupportedError
from ..layout.kv_pool import KVPoolLayout
from ..metrics import Outcome, TransferLog, TransferReport
from ..monitor import SideMonitor
from ..plan.pairing import HostPairing, Pairing, PrefillFacts
from ..plan.parcel_digest import parcel_digest
from ..plan.raw_plan import RawPlan
from ..protocol.epochs import IdSource, random_id
from ..protocol.lease import Clock
from ..protocol.messages import (
    DRAIN_REFUSED,
    Abort,
    Done,
    Drain,
    Draining,
    ForeignHello,
    Hello,
    Message,
    Pull,
    Renew,
    StatusQuery,
    decode_message,
    encode,
    foreign_hello,
)
from ..protocol.prefill import PrefillProtocol
from ..protocol.prefill_actions import Ended, Hash, Pack, PrefillLimits, ReleaseBlocks, Send, Settle
from ..protocol.prefill_view import prefill_snapshot
from ..protocol.snapshot import TransferSnapshot
from ..protocol.transfer import Transfer
from ..transform.packing import ParcelPacker, parcel_packer
from ..transform.reference import LayerSource
from ..transport.engine import EngineFactory, TransferEngine
from ..transport.local import local_session
from ..transport.loop import ChannelLoop
from ..transport.side_channel import SideChannelClient, SideChannelServer
from .exposure import Exposure
from .kv_source import CacheSource, cache_source
from .measures import peer_detail, peer_states, prefill_gauges, prefill_pairings
from .metadata import PrefillStep, RankHandshake
from .ordering import StepOrder, step_order
from .packer import Packer
from .raw_copy import copy_blocks
from .send_buffer import SendBuffer

__all__ = ["PrefillWorker"]

_log = logging.getLogger(__name__)

_FROM_DECODE = (Hello, Pull, Renew, Done, Abort, StatusQuery, Drain)
_TURN_S = 0.25
_OUTCOMES: Mapping[str, Outcome] = {"expired": "expired", "aborted": "aborted", "failed": "failed"}


@dataclass(slots=True)
class _Sending:
    """What the driver knows of a transfer beyond the protocol: vLLM's request and blocks."""

    request: str
    tokens: int
    block_ids: tuple[int, ...] = ()
    pack_s: float = 0.0
    wire_bytes: int = 0
    prefilled_at: float | None = None


class PrefillWorker:
    """One prefill rank, from ``register`` to ``close``."""

    def __init__(
        self,
        config: PrefillConfig,
        facts: PrefillFacts,
        server: SideChannelServer,
        make_engine: EngineFactory,
        *,
        clock: Clock = time.monotonic,
        wall_clock: Clock = time.time,
        new_id: IdSource = random_id,
        packers: Callable[[torch.device, int], ParcelPacker] = parcel_packer,
    ) -> None:
        """``facts``: this rank's; ``server``: its side channel, already listening; ``packers``: who packs, by the
        cache's device and the number of threads."""
        self._config = config
        self._facts = facts
        self._server = server
        self._clock = clock
        self._packers = packers
        self._wall_clock = wall_clock
        self._epoch = new_id()
        self._engine: TransferEngine = make_engine()
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._sending: dict[str, _Sending] = {}
        self._transfer_of: dict[str, str] = {}
        self._finished_seen: set[str] = set()
        self._released: set[str] = set()
        self._outbox: deque[tuple[str, bytes]] = deque()
        self.log = TransferLog(f"prefill/{facts.rank}", history=config.status_history)
        self._monitor: SideMonitor[Transfer] = SideMonitor(
            "prefill", self._epoch, self.log, self._snapshot, stall_s=config.stall_report_s, clock=clock, logger=_log
        )
        self._layers: list[LayerSource] = []
        self._cache: CacheSource | None = None
        self._exposure: Exposure | None = None
        self._device = torch.device("cpu")
        self._block_ratio = 1
        self._order: StepOrder | None = None
        self._packing: ParcelPacker | None = None
        self._prepared: set[KVPoolLayout] = set()
        self._steps_before: dict[int, object] = {}  # of a job that waits for the packer: the steps to wait for
        self._protocol: PrefillProtocol | None = None
        self._packer: Packer | None = None
        self._loop = ChannelLoop("hawk-prefill", [server], self._on_message, self._on_turn)

    @property
    def handshake(self) -> RankHandshake:
        """Where decode sides reach this rank."""
        address = self._server.address
        host = self._config.peer_host
        return RankHandshake(f"{f'[{host}]' if ':' in host else host}:{address.port}", self._epoch)

    def register(self, layers: list[LayerSource], block_size: int, cache: CacheSource | None = None) -> None:
        """Starts serving: ``layers`` are vLLM's caches, ``block_size`` vLLM's tokens per block.

        ``cache``: the same as whole blocks, by default worked out from ``layers``; these may be none where only their
        kernels can read its blocks.
        """
        self._cache = cache if cache is not None else _whole_blocks(layers, block_size)
        device = self._device = layers[0].k.device if layers or cache is None else cache.blocks[0].device
        # Over TCP the bytes leave through host memory; an RDMA engine reads them where the cache is.
        buffer_device = device if self._config.protocol == "rdma" else torch.device("cpu")
        self._buffer = SendBuffer(self._facts.send_buffer_bytes, buffer_device)
        self._engine.register(self._buffer.address, self._buffer.nbytes)
        self._layers = layers
        # vLLM may split its blocks for the attention kernel; ids are then in units of the larger ones.
        self._block_ratio = block_size // layers[0].k.shape[2] if layers else 1
        if self._cache is not None:
            self._facts = msgspec.structs.replace(self._facts, cache=self._cache.memory.layout)
        self._exposure = Exposure(self._config, self._facts, self._cache, self._engine)
        self._order = step_order(device)
        config = self._config
        self._packing = self._packers(device, config.pack_threads)
        limits = PrefillLimits(
            parcel_tokens=config.parcel_tokens,
            parcel_bytes=config.parcel_bytes,
            lease_s=config.lease_s,
            buffer_wait_s=config.buffer_wait_s,
            verdict_keep_s=config.verdict_keep_s,
            max_transfers=config.max_transfers,
            max_peers=config.max_peers,
            max_transfers_per_peer=config.max_transfers_per_peer,
            peer_buffer_share=config.peer_buffer_share,
            digests=config.parcel_digest,
        )
        self._protocol = PrefillProtocol(
            self._facts,
            limits,
            self._epoch,
            self._engine.session,
            self._buffer.address,
            self._clock,
            _process_session(),
        )
        self._packer = Packer(self._pack, self._settle, self._packed, self._hash, self._hashed)
        self._loop.start()
        _log.info(
            "prefill rank %d of %d: side channel %s, engine %s, send buffer %.0f MiB",
            self._facts.rank,
            self._facts.ranks,
            self.handshake.address,
            self._engine.session,
            self._buffer.nbytes / 2**20,
        )

    # --- vLLM's step thread

    def before_step(self, step: PrefillStep) -> None:
        """Blocks of preempted requests are about to be written again, the cache was reset, or new requests begin.

        That they begin is known before they are computed, so that ranks that lag behind the first know it too when
        its answer is there.
        """
        preempted, step.preempted = step.preempted, []
        reset, step.reset = step.reset, False
        begun, step.begun = step.begun, []
        if not (preempted or reset or begun) or self._protocol is None or self._order is None:
            return
        with self._lock:
            if reset:
                self._protocol.reset()
            for request in preempted:
                if request in self._transfer_of:
                    self._protocol.preempted(self._transfer_of[request])
            for each in begun:
                self._sending[each.transfer] = _Sending(each.request, each.tokens)
                self._transfer_of[each.request] = each.transfer
                self._protocol.begin(each.transfer, each.digest, each.tokens)
            self._dispatch()
        if preempted or reset:
            self._order.blocks_reused()

    def after_step(self, step: PrefillStep) -> None:
        """The step's work is done (CPU) or queued (GPU)."""
        self.before_step(step)
        if self._protocol is None or self._order is None:
            return
        if step.progress:
            self._order.step_ended()
        with self._lock:
            for progress in step.progress:
                transfer = self._transfer_of.get(progress.request)
                if transfer is not None:
                    sending = self._sending[transfer]
                    sending.block_ids = progress.block_ids
                    if progress.tokens >= sending.tokens:
                        sending.prefilled_at = self._wall_clock()
                    self._protocol.computed(transfer, progress.tokens, progress.block_ids)
            for request in step.finished:
                self._ended_for_vllm(request, abandoned=False)
            for request in step.abandoned:
                self._ended_for_vllm(request, abandoned=True)
            self._dispatch()

    def take_finished(self, finished_requests: set[str]) -> set[str] | None:
        """Requests whose blocks vLLM may have back: finished (now or earlier) and packed."""
        with self._lock:
            self._finished_seen |= finished_requests & self._transfer_of.keys()
            done = self._released & self._finished_seen
            self._released -= done
            self._finished_seen -= done
            for request in done:
                self._transfer_of.pop(request, None)
        return done or None

    def close(self) -> None:
        """Stops serving, after ``shutdown_drain_s`` at most for what is owed.  Peers find out by their deadlines."""
        self._wait_for_the_owed()
        self._loop.close()
        if self._packer is not None:
            self._packer.close(timeout_s=5.0)
        self._engine.close()

    def _wait_for_the_owed(self) -> None:
        """Offers nothing new, and waits for decode sides to take what is offered."""
        if self._protocol is None or not self._config.shutdown_drain_s:
            return
        with self._lock:
            self._protocol.drain()
            deadline = self._clock() + self._config.shutdown_drain_s
            # vLLM takes no more blocks back, so these are not waited for.
            while self._protocol.owed and self._clock() < deadline:
                self._changed.wait(min(_TURN_S, max(0.0, deadline - self._clock())))

    # --- the packer's thread

    def _pack(self, job: Pack) -> None:
        with self._lock:
            after = self._steps_before.pop(job.job, None)
            sending = self._sending.get(job.transfer)
        if sending is None:
            return  # ended meanwhile; the protocol discards the result
        block_ids = sending.block_ids
        table = torch.tensor(block_ids, dtype=torch.int64)
        if self._block_ratio > 1:
            table = (table[:, None] * self._block_ratio + torch.arange(self._block_ratio)).reshape(-1)
        region = self._buffer.region(job.region, job.plan.nbytes)

        def work() -> None:
            plan = job.plan
            if isinstance(plan, RawPlan):
                assert self._cache is not None  # else there is no such pairing
                copy_blocks(self._cache.blocks, table, plan, job.first_block, region)
            else:
                assert self._packing is not None
                self._packing.pack(self._layers, table, plan, job.first_block, job.tokens, region)

        assert self._order is not None
        start = self._clock()
        self._order.pack(work, after)
        sending.pack_s += self._clock() - start
        sending.wire_bytes += job.plan.nbytes

    def _settle(self, job: Settle) -> None:
        """Waits for the steps before it, in order with the packs."""
        assert self._order is not None
        with self._lock:
            after = self._steps_before.pop(job.job, None)
        self._order.pack(lambda: None, after)

    def _packed(self, job: int, ok: bool) -> None:
        assert self._protocol is not None
        with self._lock:
            self._protocol.packed(job, ok)
            self._dispatch()

    def _hash(self, job: Hash) -> str:
        region = self._buffer.region(job.region, job.plan.nbytes)
        return parcel_digest(
            job.plan,
            job.skip_blocks,
            lambda offset, length: memoryview(region[offset : offset + length].cpu().numpy()),
        )

    def _hashed(self, job: int, digest: str | None) -> None:
        assert self._protocol is not None
        with self._lock:
            self._protocol.hashed(job, digest)
            self._dispatch()

    # --- the channel loop's thread

    def _on_message(self, channel: SideChannelServer | SideChannelClient, peer: str, payload: bytes) -> None:
        assert self._protocol is not None
        try:
            message: Message | ForeignHello = decode_message(payload, _FROM_DECODE)
        except ProtocolError:
            foreign = foreign_hello(payload)
            if foreign is None:
                raise
            message = foreign
        bases = self._exposure.ask(message) if isinstance(message, Hello) and self._exposure is not None else None
        with self._lock:
            if bases is not None:
                self._protocol.expose(bases)
            if isinstance(message, Drain):
                self._outbox.append((peer, encode(self._drain(self._server.may_command(peer)))))
            elif isinstance(message, StatusQuery):
                if self._monitor.may_ask(peer):
                    self._outbox.append((peer, self._status()))
                else:
                    self._server.counts.rate += 1
            elif isinstance(message, (Hello, ForeignHello, Pull, Renew, Done, Abort)):
                self._protocol.receive(peer, message)
                self._dispatch()
                if isinstance(message, Hello):
                    self._prepare()

    def _on_turn(self) -> float:
        assert self._protocol is not None
        with self._lock:
            self._protocol.tick()
            self._dispatch()
        while self._outbox:  # before anything that nobody waits for
            peer, payload = self._outbox.popleft()
            self._server.send(peer, payload)
        with self._lock:
            self._measure()
            protocol = self._protocol
            changes = self._monitor.peer_changes(peer_states(protocol), lambda epoch: peer_detail(protocol, epoch))
            stalls = self._monitor.watch(self._protocol.live)
        self._monitor.say(stalls)
        self._monitor.say_peers(changes)
        return _TURN_S

    # --- under the lock

    def _prepare(self) -> None:
        """Has the packer compile what new pairings need, before the first parcel waits for it."""
        assert self._protocol is not None and self._packer is not None
        packing, layers = self._packing, self._layers
        for pairing in self._protocol.peers().values():
            if isinstance(pairing, Pairing) and not isinstance(pairing, HostPairing) and packing is not None:
                layout = pairing.layout
                # What more peers than may be paired ask for is compiled when it is packed.
                if layers and layout not in self._prepared and len(self._prepared) < self._config.max_peers:
                    self._prepared.add(layout)
                    self._packer.submit(partial(packing.prepare, layers, layout))

    def _ended_for_vllm(self, request: str, abandoned: bool) -> None:
        assert self._protocol is not None
        transfer = self._transfer_of.get(request)
        if transfer is None:
            return
        held = self._protocol.abandoned(transfer) if abandoned else self._protocol.finished(transfer)
        if not held:
            self._released.add(request)
            self._sending.pop(transfer, None)

    def _dispatch(self) -> None:
        """Hands the protocol's actions to whoever carries them out."""
        assert self._protocol is not None and self._packer is not None and self._order is not None
        actions = deque(self._protocol.take_actions())
        while actions:
            action = actions.popleft()
            if isinstance(action, Send):
                self._outbox.append((action.identity, encode(action.message)))
            elif isinstance(action, Settle) and self._device.type == "cpu":
                self._protocol.packed(action.job, True)  # a step that has ended on a CPU has written
                actions.extend(self._protocol.take_actions())
            elif isinstance(action, (Pack, Settle, Hash)):
                if not isinstance(action, Hash):
                    self._steps_before[action.job] = self._order.steps_so_far()
                self._packer.submit(action)
            elif isinstance(action, ReleaseBlocks):
                self._released.add(self._sending[action.transfer].request)
            else:
                self._report(action)
        if self._outbox:
            self._loop.wake.set()

    def _report(self, ended: Ended) -> None:
        self._changed.notify_all()
        sending = self._sending.pop(ended.transfer)
        outcome: Outcome = "completed" if ended.reason is None else _OUTCOMES.get(ended.reason, "gone")
        self.log.record(
            TransferReport(
                transfer_id=ended.transfer,
                request_id=sending.request,
                outcome=outcome,
                reason=ended.reason or "",
                failure=ended.reason,
                tokens=sending.tokens,
                wire_bytes=sending.wire_bytes + ended.read_in_place,
                parcels=ended.parcels,
                pack_s=sending.pack_s,
                prefilled_at=sending.prefilled_at,
            )
        )
        if outcome not in ("completed", "aborted"):
            self._monitor.events.warning(
                ended.reason or "", f"transfer ended: {ended.reason}", transfer=ended.transfer, request=sending.request
            )
        else:
            _log.debug("transfer %s ended: %s", ended.transfer, outcome)

    def _measure(self) -> None:
        """Gauges and counts of what has changed by itself."""
        assert self._protocol is not None
        self.log.set_gauges(**prefill_gauges(self._protocol, self._server.connections))
        self._monitor.count_epochs(e for e, (state, _) in peer_states(self._protocol).items() if state == "paired")
        self._monitor.count_drops(asdict(self._server.counts))

    def _unready(self) -> list[str]:
        """Why this side cannot serve all that it should; decode sides come by themselves, so their absence is none."""
        return ["this side is draining"] if self._protocol is not None and self._protocol.draining else []

    def _drain(self, allowed: bool) -> Draining:
        """Drains where that is allowed; the answer to whoever asked for it."""
        assert self._protocol is not None
        if not allowed:
            return Draining(epoch=self._epoch, role="prefill", refused=DRAIN_REFUSED)
        if not self._protocol.draining:
            _log.info("draining: what is offered goes on to its end, nothing new is offered")
        self._protocol.drain()
        return Draining(epoch=self._epoch, role="prefill", held=self._protocol.held())

    def _snapshot(self, transfer_id: str, transfer: Transfer) -> TransferSnapshot:
        sending = self._sending.get(transfer_id)
        return prefill_snapshot(transfer, self._clock(), sending.request if sending is not None else "")

    def _status(self) -> bytes:
        protocol = self._protocol
        assert protocol is not None
        dropped = asdict(self._server.counts)
        return self._monitor.status(
            protocol.held(), prefill_pairings(protocol), protocol.live, self._unready(), dropped
        )


def _whole_blocks(layers: list[LayerSource], block_size: int) -> CacheSource | None:
    """The cache as whole blocks; None where its layers are not kept alike, so that only mode hawk can be served."""
    try:
        return cache_source(layers, block_size)
    except UnsupportedError as error:
        _log.info("modes direct and host are not served: %s", error)
        return None


def _process_session() -> str:
    """This process's session for readers on its own machine; empty where there can be none."""
    try:
        return local_session()
    except LocalError as error:
        _log.debug("no peer can read this process by protocol local: %s", error)
        return ""
