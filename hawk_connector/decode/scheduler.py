"""The decode scheduler: claims transfers for waiting requests, hands them to the worker, and never waits for a peer.

The claim is asked for as soon as vLLM has taken the request, so its answer is usually there when the request is first
looked at.  A thread of its own speaks with the prefill ranks.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from ..address import Address
from ..config import DecodeConfig
from ..errors import ConfigError, ProtocolError
from ..metrics import TransferLog
from ..monitor import SideMonitor
from ..protocol.admission import AdmissionLimits, AdmissionProtocol, VerdictKind
from ..protocol.decode_actions import SendTo
from ..protocol.epochs import IdSource, random_id
from ..protocol.lease import Clock
from ..protocol.messages import (
    Accepted,
    Claimed,
    Gone,
    Ready,
    Refused,
    Renewed,
    Stale,
    Welcome,
    decode_message,
    encode,
)
from ..protocol.snapshot import TransferSnapshot
from ..protocol.ticket import Ticket, TransferParams, parse_params
from ..series import Failure
from ..transport.loop import ChannelLoop
from ..transport.side_channel import SideChannelClient, SideChannelServer
from .metadata import DecodeFeedback, DecodeHandshake, DecodeStep, LoadRequest, RefusedLoad
from .worker import link_limits

__all__ = ["DecodeScheduler"]

_log = logging.getLogger(__name__)

_FROM_PREFILL = (Welcome, Refused, Stale, Claimed, Ready, Renewed, Accepted, Gone)
_TURN_S = 0.05


class DecodeScheduler:
    """``recompute``: vLLM's kv_load_failure_policy; requests whose prefill side fails compute their own KV."""

    def __init__(
        self,
        config: DecodeConfig,
        block_size: int,
        client: SideChannelClient,
        *,
        recompute: bool,
        clock: Clock = time.monotonic,
        new_id: IdSource = random_id,
    ) -> None:
        self._config = config
        self._block_size = block_size
        self._client = client
        self._recompute = recompute
        self._clock = clock
        self._new_id = new_id
        self._lock = threading.Lock()
        self._protocol: AdmissionProtocol | None = None
        self._failed: dict[str, tuple[Failure, str]] = {}
        self._loading: set[str] = set()
        self._outbox: deque[tuple[str, bytes | None]] = deque()  # None: disconnect
        self._next = DecodeStep()
        # Reports are the worker's; this takes the counts of what never becomes a load.
        self.log = TransferLog("decode/scheduler", history=1)
        self._monitor: SideMonitor[object] = SideMonitor(
            "decode", "", self.log, self._snapshot, stall_s=config.stall_report_s, clock=clock, logger=_log
        )
        self._loop = ChannelLoop("hawk-admission", [client], self._on_message, self._on_turn)

    def set_worker(self, handshake: DecodeHandshake) -> None:
        """The worker is up: its epoch and facts are what this scheduler's links say too."""
        config = self._config
        limits = AdmissionLimits(link_limits(config), config.admission_deadline_s, config.claim_hold_s)
        self._protocol = AdmissionProtocol(handshake.epoch, handshake.facts, limits, self._clock)
        with self._lock:
            for peer in config.peers:
                self._protocol.connect(peer)
            self._flush()
        self._loop.start()

    def close(self) -> None:
        self._loop.close()

    # --- vLLM's step thread

    def new_request(self, request: str, params: Any, digest: str, tokens: int) -> None:
        """vLLM has taken a request.  Asks for the claim if the request names a transfer that it may have."""
        try:
            parsed = parse_params(params)
            if parsed is None or self._protocol is None:
                return
            self._check(parsed, tokens)
            ticket = Ticket(parsed.transfer, self._new_id(), digest, tokens, parsed.ranks)
            with self._lock:
                if not self._protocol.has_room([rank.address for rank in parsed.ranks]):
                    raise ProtocolError("other requests are waiting for too many prefill ranks already")
                self._protocol.ask(request, ticket)
                self._flush()
        except ProtocolError as error:
            self._computes(request, "", "parameters", str(error))

    def matched_tokens(self, request: str, tokens: int, computed: int) -> tuple[int | None, bool]:
        """vLLM's ``get_num_new_matched_tokens`` for a prompt of ``tokens`` of which ``computed`` are cached here."""
        if self._protocol is None:
            return 0, False
        with self._lock:
            verdict = self._protocol.verdict(request)
            self._flush()
            if verdict is None:
                return 0, False
            if verdict.kind is VerdictKind.PENDING:
                return None, False
            # vLLM computes the last token here in any case: where only that one is missing, nothing is worth moving.
            end = self._loadable(tokens)
            wanted = end - computed
            worthwhile = wanted > 0 and (end < tokens or wanted > 1 or computed == 0)
            if verdict.kind is VerdictKind.CLAIMED and worthwhile:
                return wanted, True
            if verdict.kind is VerdictKind.FAILED and not self._recompute and worthwhile:
                self._failed[request] = verdict.failure or "no_answer", verdict.reason
                return wanted, True
            if verdict.kind is not VerdictKind.CLAIMED:
                transfer = self._protocol.snapshot(request).transfer
                self._computes(request, transfer, verdict.failure or "no_answer", verdict.reason)
            self._protocol.drop(request)
            self._flush()
            return 0, False

    def allocated(self, request: str, tokens: int, external: int, block_ids: Sequence[int]) -> None:
        """vLLM gave the request blocks; ``external`` tokens of them are to be loaded."""
        if self._protocol is None:
            return
        if external <= 0:
            # Either the load is behind it (no claim is left here) or vLLM wants nothing loaded.
            with self._lock:
                self._protocol.drop(request)
                self._flush()
            return
        end = self._loadable(tokens)
        first_block = (end - external) // self._block_size
        end_block, blocks = -(-end // self._block_size), -(-tokens // self._block_size)
        wanted = tuple(block_ids[first_block:end_block])
        with self._lock:
            ticket = self._protocol.hand_over(request)
            self._flush()
        failed = self._failed.pop(request, None)
        if failed is None and ticket is not None:
            self._next.loads.append(LoadRequest(request, ticket, first_block, wanted, blocks - end_block))
        else:
            # vLLM waits for these blocks now, so it must hear of them whatever became of the claim.
            kind, reason = failed or ("blocks", "its claim was given up before vLLM gave it blocks")
            self._next.refused.append(RefusedLoad(request, wanted, kind, reason))
        self._loading.add(request)

    def build_step(self) -> DecodeStep:
        """What the worker needs of this step."""
        step, self._next = self._next, DecodeStep()
        if self._protocol is not None:
            with self._lock:
                step.admissions = self._protocol.held()["admissions"]
        return step

    def finished(self, request: str) -> None:
        """The request is over: finished, aborted or failed.  A load that runs is stopped when that is safe."""
        if self._protocol is not None:
            with self._lock:
                self._protocol.drop(request)
                self._flush()
        self._failed.pop(request, None)
        if request in self._loading:
            self._loading.discard(request)
            self._next.aborted.append(request)

    def worker_says(self, feedback: DecodeFeedback) -> None:
        """How ranks did in the worker's loads, and whether this side drains."""
        if self._protocol is None:
            return
        with self._lock:
            for outcome in feedback.outcomes:
                self._protocol.peer_outcome(outcome)
            if feedback.draining:
                self._protocol.drain()

    def loaded(self, requests: set[str]) -> None:
        """The worker has reported these loads."""
        self._loading -= requests

    def reset(self) -> bool:
        """vLLM's cache was reset: waiting requests compute their own KV.  False while loads of before still run."""
        if self._protocol is not None:
            with self._lock:
                self._protocol.drop_all()
                self._flush()
        return not self._loading

    # --- the channel loop's thread

    def _on_message(self, channel: SideChannelServer | SideChannelClient, peer: str, payload: bytes) -> None:
        message = decode_message(payload, _FROM_PREFILL)
        assert self._protocol is not None
        if isinstance(message, (Welcome, Refused, Stale, Claimed, Ready, Renewed, Accepted, Gone)):
            with self._lock:
                self._protocol.receive(peer, message)
                self._flush()

    def _on_turn(self) -> float:
        assert self._protocol is not None
        with self._lock:
            self._protocol.tick()
            self._flush()
            busy = any(self._protocol.held().values())
            stalls = self._monitor.watch(self._protocol.waiting)
        self._monitor.say(stalls)
        self._monitor.count_drops(asdict(self._client.counts))
        while self._outbox:
            address, payload = self._outbox.popleft()
            if payload is None:
                self._client.disconnect(address)
                continue
            self._client.connect(Address.parse(address))
            self._client.send(address, payload)
        return _TURN_S if busy else 5 * _TURN_S

    def _loadable(self, tokens: int) -> int:
        """How many tokens of a prompt are loaded: all, or where only whole blocks are, all before its last block."""
        if not self._config.load_whole_blocks:
            return tokens
        return (tokens - 1) // self._block_size * self._block_size

    # --- under the lock

    def _snapshot(self, request: str, _: object) -> TransferSnapshot:
        assert self._protocol is not None
        return self._protocol.snapshot(request)

    def _computes(self, request: str, transfer: str, failure: Failure, reason: str) -> None:
        """The request computes its own KV, which is right but not what was wanted."""
        text = f"the request computes its own KV: {reason}"
        self._monitor.events.warning(failure, text, transfer=transfer, request=request)
        self.log.count("recomputes", 1, failure)

    def _flush(self) -> None:
        assert self._protocol is not None
        for action in self._protocol.take_actions():
            payload = encode(action.message) if isinstance(action, SendTo) else None
            self._outbox.append((action.address, payload))
        if self._outbox:
            self._loop.wake.set()

    def _check(self, params: TransferParams, tokens: int) -> None:
        """What the parameters may name is bounded here, whoever wrote them."""
        if params.tokens != tokens:
            raise ProtocolError(
                f"kv_transfer_params are of a prompt of {params.tokens} tokens, this request has {tokens}"
            )
        for rank in params.ranks:
            try:
                address = Address.parse(rank.address)
            except ConfigError as error:
                raise ProtocolError(f"kv_transfer_params name a rank at no address: {error}") from None
            if str(address) != rank.address or not self._config.allows_peer(address):
                raise ProtocolError(
                    f"kv_transfer_params name {address}, which is not allowed here; add it to allowed_peer_hosts"
                )
