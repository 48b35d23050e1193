"""The prefill scheduler: which requests are wanted elsewhere, which blocks hold them, when vLLM may free them."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..protocol.epochs import IdSource, random_id
from ..protocol.messages import PROTOCOL_VERSION
from ..protocol.ticket import HAWK_KEY, RankAddress, TransferParams, remote_decode_wanted
from .metadata import BeginTransfer, PrefillStep, RankHandshake, RequestProgress

__all__ = ["PrefillScheduler"]

_log = logging.getLogger(__name__)


# vLLM's name of one of the n answers to one request, which all compute the same prompt: its number and the parent.
_ANSWER = re.compile(r"\d+_(.+)", re.DOTALL)


@dataclass(slots=True)
class _Tracked:
    """``family``: the answers to one request, of which the first to be seen ``leads``: its KV is offered for all."""

    transfer: str
    tokens: int
    family: tuple[str, str] | None = None
    leads: bool = True
    sent_tokens: int = 0
    block_ids: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Family:
    transfer: str
    members: int = 1


class PrefillScheduler:
    """Follows requests with ``do_remote_decode`` from allocation to the release of their blocks."""

    def __init__(self, engine_id: str, *, new_id: IdSource = random_id) -> None:
        self._engine_id = engine_id
        self._new_id = new_id
        self._ranks: tuple[RankAddress, ...] = ()
        self._tracked: dict[str, _Tracked] = {}
        self._families: dict[tuple[str, str], _Family] = {}
        self._awaiting_release: set[str] = set()
        self._next = PrefillStep()

    def set_ranks(self, handshakes: Mapping[int, RankHandshake]) -> None:
        """Side channels of this instance's ranks, by tensor-parallel rank."""
        self._ranks = tuple(RankAddress(handshakes[r].address, handshakes[r].epoch) for r in sorted(handshakes))

    def allocated(self, request: str, params: Any, digest: str, tokens: int, block_ids: Iterable[int]) -> None:
        """vLLM gave a request its blocks (first or again after a preemption)."""
        if not remote_decode_wanted(params) or not self._ranks:
            return
        if request not in self._tracked:
            tracked = self._tracked[request] = self._track(request, digest, tokens)
            if tracked.leads:
                self._next.begun.append(BeginTransfer(request, tracked.transfer, digest, tokens))
        self._tracked[request].block_ids = list(block_ids)

    def _track(self, request: str, digest: str, tokens: int) -> _Tracked:
        """Of several answers to one request (n > 1) the client gets one's parameters: one transfer serves them all.

        The digest too must be the same, so that a name that only looks like an answer's shares nothing it should not.
        """
        name = _ANSWER.fullmatch(request)
        if name is None:
            return _Tracked(self._new_id(), tokens)
        key = (name.group(1), digest)
        family = self._families.get(key)
        if family is None:
            family = self._families[key] = _Family(self._new_id())
            return _Tracked(family.transfer, tokens, key)
        family.members += 1
        return _Tracked(family.transfer, tokens, key, leads=False)

    def build_step(
        self,
        new: Iterable[tuple[str, list[int], int]],
        cached: Iterable[tuple[str, list[int] | None, bool, int]],
        preempted: Iterable[str],
    ) -> PrefillStep:
        """What the workers need of this step.

        ``new``: (request, block ids, tokens after the step).  ``cached``: (request, new block ids, whether they replace
        the old ones, tokens after the step).
        """
        step, self._next = self._next, PrefillStep()
        for request in preempted:
            if request in self._tracked:
                self._tracked[request].sent_tokens = 0
                if self._tracked[request].leads:
                    step.preempted.append(request)
        for request, block_ids, tokens in new:
            if request in self._tracked:
                self._tracked[request].block_ids = list(block_ids)
                self._progress(step, request, tokens)
        for request, block_ids_or_none, replaces, tokens in cached:
            tracked = self._tracked.get(request)
            if tracked is None:
                continue
            if block_ids_or_none is not None:
                tracked.block_ids = ([] if replaces else tracked.block_ids) + list(block_ids_or_none)
            self._progress(step, request, tokens)
        return step

    def _progress(self, step: PrefillStep, request: str, tokens: int) -> None:
        """Only the prompt is sent: what the prefill side generates beyond it is decode's to compute."""
        tracked = self._tracked[request]
        computed = min(tokens, tracked.tokens)
        if computed > tracked.sent_tokens:
            tracked.sent_tokens = computed
            if tracked.leads:
                step.progress.append(RequestProgress(request, computed, tuple(tracked.block_ids)))

    def finished(self, request: str, ended_well: bool) -> tuple[bool, dict[str, Any] | None]:
        """vLLM's ``request_finished``: (keep the blocks, kv_transfer_params for the client)."""
        tracked = self._tracked.pop(request, None)
        if tracked is None:
            return False, None
        self._leave_family(tracked)
        complete = ended_well and tracked.sent_tokens >= tracked.tokens
        if tracked.leads:
            self._awaiting_release.add(request)
            (self._next.finished if complete else self._next.abandoned).append(request)
        return tracked.leads, self._params(tracked) if complete else None

    def _leave_family(self, tracked: _Tracked) -> None:
        if tracked.family is not None:
            family = self._families[tracked.family]
            family.members -= 1
            if not family.members:
                del self._families[tracked.family]

    def _params(self, tracked: _Tracked) -> dict[str, Any]:
        """What the client hands on to the decode side."""
        host, _, port = self._ranks[0].address.rpartition(":")
        params = TransferParams(PROTOCOL_VERSION, tracked.transfer, tracked.tokens, self._ranks)
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self._engine_id,
            "remote_host": host,
            "remote_port": int(port),
            "tp_size": len(self._ranks),
            HAWK_KEY: {
                "v": params.v,
                "transfer": params.transfer,
                "tokens": params.tokens,
                "ranks": [{"address": r.address, "epoch": r.epoch} for r in params.ranks],
                "first_token": params.first_token,
            },
        }

    def reset(self) -> None:
        """vLLM's cache was reset: what was packed before must not be believed any more."""
        self._next.reset = True

    def released(self, requests: Iterable[str]) -> None:
        """vLLM has these requests' blocks back."""
        self._awaiting_release.difference_update(requests)

    @property
    def holds_blocks(self) -> bool:
        """Whether vLLM must keep stepping: it holds blocks of finished requests for HAWK, or a reset is to be told."""
        return bool(self._awaiting_release) or self._next.reset
