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
from dataclasses import dataclass, field

from ..address import Address
from ..config import DecodeConfig
from ..metrics import Outcome, TransferLog, TransferReport
from ..plan.pairing import DecodeFacts
from ..protocol.decode import DecodeProtocol
from ..protocol.decode_actions import DecodeLimits, Disconnect, Fence, Read, Report, SendTo
from ..protocol.epochs import IdSource, random_id
from ..protocol.lease import Clock
from ..protocol.link import LinkLimits
from ..protocol.messages import (
    Accepted,
    Claimed,
    Gone,
    PairingStatus,
    Ready,
    Refused,
    Renewed,
    Stale,
    Status,
    StatusQuery,
    Welcome,
    decode_message,
    encode,
)
from ..transport.engine import EngineFactory
from ..transport.loop import ChannelLoop
from ..transport.side_channel import SideChannelClient, SideChannelServer
from .landing import Landing
from .metadata import DecodeHandshake, DecodeStep
from .reader import Reader, ReadResult

__all__ = ["DecodeWorker", "LoadEnd", "link_limits"]

_log = logging.getLogger(__name__)

_FROM_PREFILL = (Welcome, Refused, Stale, Claimed, Ready, Renewed, Accepted, Gone)
_TURN_S = 0.05


def link_limits(config: DecodeConfig) -> LinkLimits:
    return LinkLimits(config.hello_deadline_s, config.resend_s, config.renew_s)


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
    begun_at: float
    pull_s: float = 0.0
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
        clock: Clock = time.monotonic,
        wall_clock: Clock = time.time,
        new_id: IdSource = random_id,
    ) -> None:
        """``server`` answers status queries; ``client`` speaks with prefill ranks."""
        self._config = config
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
        self.log = TransferLog("decode/0", history=config.status_history)
        self._loop = ChannelLoop("hawk-decode", [server, client], self._on_message, self._on_turn)

    def start(self) -> None:
        """Starts the loop and pairs with the configured peers."""
        with self._lock:
            for peer in self._config.peers:
                self._protocol.connect(peer)
            self._dispatch()
        self._loop.start()
        layout = self._facts.layout
        _log.info(
            "decode: status on %s, %s pools in %s on %d chips x %d banks, block size %d",
            self._server.address,
            layout.kind,
            layout.codec,
            layout.chips,
            layout.banks,
            layout.block_size,
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
                self._tallies[load.request] = _Tally(load.ticket.transfer, load.ticket.tokens, self._clock())
                self._protocol.load(load.request, load.ticket, load.first_block, load.block_ids)
            for refused in step.refused:
                self._protocol.refuse(refused.request, refused.block_ids, refused.reason)
            for request in step.aborted:
                self._protocol.abort(request)
            self._dispatch()

    def take_ended(self) -> Sequence[LoadEnd]:
        """Loads that have ended since the last call, each once."""
        with self._lock:
            ended, self._ended = self._ended, []
        return ended

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
                tally.wire_bytes += result.nbytes
                tally.segments += result.segments
                for chip, bank, nbytes in result.fill:
                    tally.fill[chip, bank] = tally.fill.get((chip, bank), 0) + nbytes
            self._protocol.read_ended(result.read.id, result.ok, result.reason)
            self._dispatch()

    def _on_fenced(self, address: str) -> None:
        with self._lock:
            self._protocol.fenced(address)
            self._dispatch()

    # --- the channel loop's thread

    def _on_message(self, channel: SideChannelServer | SideChannelClient, peer: str, payload: bytes) -> None:
        if channel is self._server:
            decode_message(payload, (StatusQuery,))
            with self._lock:
                self._answers.append((peer, encode(self._status())))
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
            held = self._protocol.held()
        self.log.set_gauges(quarantined=held["quarantined_blocks"], waiting=held["loads"])
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
        return _TURN_S if held["loads"] or held["farewells"] else 5 * _TURN_S

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
        if outcome == "failed":
            _log.warning("loading the KV of request %s failed: %s", report.request, report.reason)
        if tally is None:
            return
        now = self._clock()
        self.log.record(
            TransferReport(
                transfer_id=tally.transfer,
                request_id=report.request,
                outcome=outcome,
                reason=report.reason,
                tokens=tally.tokens,
                blocks=len(report.block_ids),
                wire_bytes=tally.wire_bytes,
                segments=tally.segments,
                parcels=report.parcels,
                pull_s=tally.pull_s,
                wait_s=max(0.0, now - tally.begun_at - tally.pull_s),
                bank_fill=tuple((chip, bank, n) for (chip, bank), n in sorted(tally.fill.items())),
                landed_at=self._wall_clock(),
            )
        )

    def _status(self) -> Status:
        pairings = tuple(
            PairingStatus(peer=link.address, state=link.state.value, detail=link.detail[:1024])
            for link in self._protocol.links.values()
        )
        held = {**self._protocol.held(), "admissions": self._admissions}
        return Status(epoch=self._epoch, role="decode", held=held, pairings=pairings, reports=self.log.recent())
