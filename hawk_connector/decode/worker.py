"""The decode worker: the thin loop around ``protocol.decode``.  Runs without vLLM and torch.

vLLM's step thread (or a bare device process) says what to load; the channel loop speaks with prefill ranks; the
reader's threads read and land.  They meet under one short lock; a step never waits for a peer.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from ..address import Address
from ..config import DecodeConfig
from ..layout.cache_layout import CacheLayout
from ..metrics import Outcome, TransferLog, TransferReport
from ..monitor import SideMonitor
from ..plan.pairing import DecodeFacts
from ..protocol.circuit import CircuitLimits
from ..protocol.decode import DecodeProtocol
from ..protocol.decode_actions import DecodeLimits, Disconnect, Fence, Read, Report, SendTo, StopRead
from ..protocol.decode_view import load_snapshot
from ..protocol.epochs import IdSource, random_id
from ..protocol.lease import Clock
from ..protocol.link import LinkLimits
from ..protocol.load import Load
from ..protocol.messages import (
    DRAIN_REFUSED,
    Accepted,
    Claimed,
    Drain,
    Draining,
    Gone,
    Ready,
    Refused,
    Renewed,
    Stale,
    StatusQuery,
    Welcome,
    decode_message,
    encode,
)
from ..protocol.snapshot import TransferSnapshot
from ..transport.engine import EngineFactory
from ..transport.loop import ChannelLoop
from ..transport.side_channel import SideChannelClient, SideChannelServer
from .landing import Landing
from .measures import decode_gauges, decode_pairings, link_detail, link_states, unserved
from .metadata import DecodeFeedback, DecodeHandshake, DecodeStep
from .reader import Reader, ReadResult

__all__ = ["DecodeWorker", "LoadEnd", "link_limits"]

_log = logging.getLogger(__name__)

_FROM_PREFILL = (Welcome, Refused, Stale, Claimed, Ready, Renewed, Accepted, Gone)
_TURN_S = 0.05


def link_limits(config: DecodeConfig) -> LinkLimits:
    return LinkLimits(
        config.hello_deadline_s,
        config.resend_s,
        config.renew_s,
        circuit=CircuitLimits(config.circuit_failures, config.circuit_open_s, config.circuit_open_max_s),
        digests=config.parcel_digest,
        by_process=config.protocol == "local",
    )


@dataclass(frozen=True, slots=True)
class LoadEnd:
    """A load that has ended; ``ok`` false means that ``block_ids`` hold nothing that may be used."""

    request: str
    ok: bool
    block_ids: tuple[int, ...]


@dataclass(slots=True)
class _Tally:
    """What a load moved, for its report."""

    transfer: str
    tokens: int
    external_tokens: int
    begun_at: float
    pull_s: float = 0.0
    land_s: float = 0.0
    wire_bytes: int = 0
    segments: int = 0
    fill: dict[tuple[int, int], int] = field(default_factory=dict)


class DecodeWorker:
    """One decode worker, from construction to ``close``."""

    def __init__(
        self,
        config: DecodeConfig,
        facts: DecodeFacts,
        landing: Landing,
        server: SideChannelServer,
        client: SideChannelClient,
        make_engine: EngineFactory,
        *,
        recompute: bool = False,
        clock: Clock = time.monotonic,
        wall_clock: Clock = time.time,
        new_id: IdSource = random_id,
    ) -> None:
        """``server`` answers status queries; ``client`` speaks with prefill ranks.  ``recompute``: requests whose load
        fails compute their own KV (vLLM's policy), which is counted here."""
        self._config = config
        self._recompute = recompute
        self._facts = facts
        self._server = server
        self._client = client
        self._clock = clock
        self._wall_clock = wall_clock
        self._epoch = new_id()
        self._lock = threading.Lock()
        limits = DecodeLimits(
            link_limits(config), config.admission_deadline_s, config.load_deadline_s, config.read_threads
        )
        self._protocol = DecodeProtocol(self._epoch, facts, limits, clock)
        self._reader = Reader(landing, make_engine, config.read_threads, self._on_read, self._on_fenced, clock)
        self._outbox: deque[tuple[str, bytes | None]] = deque()  # None: disconnect
        self._answers: deque[tuple[str, bytes]] = deque()
        self._ended: list[LoadEnd] = []
        self._tallies: dict[str, _Tally] = {}
        self._admissions = 0
        self._draining = self._told_draining = False
        self.log = TransferLog("decode/0", history=config.status_history)
        self._monitor: SideMonitor[Load] = SideMonitor(
            "decode", self._epoch, self.log, self._snapshot, stall_s=config.stall_report_s, clock=clock, logger=_log
        )
        self._loop = ChannelLoop("hawk-decode", [server, client], self._on_message, self._on_turn)

    def start(self) -> None:
        """Starts the loop and pairs with the configured peers."""
        with self._lock:
            for peer in self._config.peers:
                self._protocol.connect(peer)
            self._dispatch()
        self._loop.start()
        layout = self._facts.layout
        if isinstance(layout, CacheLayout):
            where = f"vLLM's own cache in {layout.codec}, as {layout.backend} keeps it"
        else:
            where = f"{layout.kind} pools in {layout.codec} on {layout.chips} chips x {layout.banks} banks"
        _log.info(
            "decode: status on %s, mode %s, %s, block size %d",
            self._server.address,
            self._facts.mode,
            where,
            self._facts.block_size,
        )

    @property
    def handshake(self) -> DecodeHandshake:
        return DecodeHandshake(self._epoch, self._facts, str(self._server.address))

    # --- vLLM's step thread

    def step(self, step: DecodeStep) -> None:
        """Starts what the scheduler decided."""
        self._admissions = step.admissions
        if not (step.loads or step.refused or step.aborted):
            return
        with self._lock:
            for load in step.loads:
                tokens, block_size = load.ticket.tokens, self._facts.block_size
                end = (load.first_block + len(load.block_ids)) * block_size
                external = min(tokens, end) - load.first_block * block_size
                self._tallies[load.request] = _Tally(load.ticket.transfer, tokens, external, self._clock())
                self._protocol.load(load.request, load.ticket, load.first_block, load.block_ids, load.left_out)
            for refused in step.refused:
                self._protocol.refuse(refused.request, refused.block_ids, refused.failure, refused.reason)
            for request in step.aborted:
                self._protocol.abort(request)
            self._dispatch()

    def take_ended(self) -> Sequence[LoadEnd]:
        """Loads that have ended since the last call, each once."""
        with self._lock:
            ended, self._ended = self._ended, []
        return ended

    def take_feedback(self) -> DecodeFeedback | None:
        """What the scheduler should know, where there is something new."""
        with self._lock:
            feedback = DecodeFeedback(tuple(self._protocol.take_outcomes()), self._draining)
            if not feedback.outcomes and feedback.draining == self._told_draining:
                return None
            self._told_draining = feedback.draining
        return feedback

    def close(self) -> bool:
        """Ends the threads.  False where a read could not be ended: late bytes may still arrive in the landing's
        memory, which must not be unmapped or used for anything else while this process lives."""
        self._loop.close()
        return self._reader.close()

    # --- the reader's threads

    def _on_read(self, result: ReadResult) -> None:
        with self._lock:
            tally = self._tallies.get(result.read.request)
            if tally is not None:
                tally.pull_s += result.seconds
                tally.land_s += result.land_s
                tally.wire_bytes += result.nbytes
                tally.segments += result.segments
                for chip, bank, nbytes in result.fill:
                    tally.fill[chip, bank] = tally.fill.get((chip, bank), 0) + nbytes
            self._protocol.read_ended(
                result.read.id, result.ok, result.reason, failure=result.failure, stopped=result.stopped
            )
            self._dispatch()

    def _on_fenced(self, address: str) -> None:
        with self._lock:
            self._protocol.fenced(address)
            self._dispatch()
        self.log.count("fences")

    # --- the channel loop's thread

    def _on_message(self, channel: SideChannelServer | SideChannelClient, peer: str, payload: bytes) -> None:
        if channel is self._server:
            message = decode_message(payload, (StatusQuery, Drain))
            with self._lock:
                if isinstance(message, Drain):
                    self._answers.append((peer, encode(self._drain(self._server.may_command(peer)))))
                elif self._monitor.may_ask(peer):
                    self._answers.append((peer, self._status()))
                else:
                    self._server.counts.rate += 1
            return
        message = decode_message(payload, _FROM_PREFILL)
        if isinstance(message, (Welcome, Refused, Stale, Claimed, Ready, Renewed, Accepted, Gone)):
            with self._lock:
                self._protocol.receive(peer, message)
                self._dispatch()

    def _on_turn(self) -> float:
        with self._lock:
            self._protocol.tick()
            self._dispatch()
        self._send()  # before anything that nobody waits for
        with self._lock:
            held = self._protocol.held()
            self._measure()
            links = self._protocol.links
            changes = self._monitor.peer_changes(link_states(self._protocol), lambda peer: link_detail(links[peer]))
            stalls = self._monitor.watch(self._protocol.live)
        self._monitor.say(stalls)
        self._monitor.say_peers(changes)
        return _TURN_S if held["loads"] or held["farewells"] else 5 * _TURN_S

    def _send(self) -> None:
        """What has been said since the last turn, to the channels."""
        while self._outbox:
            address, payload = self._outbox.popleft()
            if payload is None:
                self._client.disconnect(address)
                continue
            self._client.connect(Address.parse(address))
            self._client.send(address, payload)
        while self._answers:
            peer, answer = self._answers.popleft()
            self._server.send(peer, answer)

    # --- under the lock

    def _dispatch(self) -> None:
        """Hands the protocol's actions to whoever carries them out."""
        for action in self._protocol.take_actions():
            if isinstance(action, SendTo):
                self._outbox.append((action.address, encode(action.message)))
            elif isinstance(action, Disconnect):
                self._outbox.append((action.address, None))
            elif isinstance(action, Read):
                self._reader.read(action)
            elif isinstance(action, StopRead):
                self._reader.stop(action.id)
            elif isinstance(action, Fence):
                self._reader.fence(action.address)
            else:
                self._report(action)
        if self._outbox:
            self._loop.wake.set()

    def _report(self, report: Report) -> None:
        self._ended.append(LoadEnd(report.request, report.ok or report.aborted, report.block_ids))
        tally = self._tallies.pop(report.request, None)
        outcome: Outcome = "completed" if report.ok else "aborted" if report.aborted else "failed"
        transfer = tally.transfer if tally is not None else ""
        if outcome == "failed":
            event = report.failure or "failed"
            text = f"load failed: {report.reason}"
            self._monitor.events.warning(event, text, transfer=transfer, request=report.request)
            if self._recompute and report.failure is not None:
                self.log.count("recomputes", 1, report.failure)
        else:
            _log.debug("load of transfer %s ended: %s", transfer, outcome)
        if tally is None:
            if report.failure is not None:
                self.log.count("failures", 1, report.failure)
            return
        now = self._clock()
        self.log.record(
            TransferReport(
                transfer_id=tally.transfer,
                request_id=report.request,
                outcome=outcome,
                reason=report.reason,
                failure=report.failure,
                tokens=tally.tokens,
                external_tokens=tally.external_tokens,
                blocks=len(report.block_ids),
                wire_bytes=tally.wire_bytes,
                segments=tally.segments,
                parcels=report.parcels,
                pull_s=tally.pull_s,
                land_s=tally.land_s,
                handover_s=report.handover_s,
                wait_s=max(0.0, now - tally.begun_at - tally.pull_s),
                bank_fill=tuple((chip, bank, n) for (chip, bank), n in sorted(tally.fill.items())),
                landed_at=self._wall_clock(),
            )
        )

    def _measure(self) -> None:
        """Gauges and counts of what has changed by itself."""
        gauges = decode_gauges(
            self._protocol,
            self._facts.block_bytes,
            admissions=self._admissions,
            connections=self._server.connections,
            draining=self._draining,
            ready=not self._unready(),
        )
        self.log.set_gauges(**gauges)
        links = self._protocol.links.values()
        self._monitor.count_epochs(link.remote_epoch for link in links if link.remote_epoch is not None)
        self._monitor.count_drops(self._dropped())

    def _dropped(self) -> dict[str, int]:
        """Messages dropped on both channels, by reason, since the start."""
        served, asked = asdict(self._server.counts), asdict(self._client.counts)
        return {reason: served[reason] + asked[reason] for reason in served}

    def _unready(self) -> list[str]:
        """Why this side cannot serve all that it should: it drains, or configured peers cannot be pulled from."""
        reasons = unserved(self._protocol, self._config.peers)
        return ["this side is draining", *reasons] if self._draining else reasons

    def _drain(self, allowed: bool) -> Draining:
        """Drains where that is allowed; the answer to whoever asked for it."""
        if not allowed:
            return Draining(epoch=self._epoch, role="decode", refused=DRAIN_REFUSED)
        if not self._draining:
            _log.info("draining: loads go on, new requests compute their own KV")
        self._draining = True
        return Draining(epoch=self._epoch, role="decode", held=self._held())

    def _held(self) -> dict[str, int]:
        return {**self._protocol.held(), "admissions": self._admissions}

    def _snapshot(self, request: str, load: Load) -> TransferSnapshot:
        return load_snapshot(load, self._clock())

    def _status(self) -> bytes:
        protocol = self._protocol
        pairings = decode_pairings(protocol)
        return self._monitor.status(self._held(), pairings, protocol.live, self._unready(), self._dropped())
