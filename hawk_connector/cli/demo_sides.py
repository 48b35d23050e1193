"""What both sides say about the requests that the demo sent: asked over their side channels."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType

from hawk_connector.address import Address
from hawk_connector.cli.deployment import DeploymentConfig
from hawk_connector.cli.processes import Pause, StopRequested
from hawk_connector.cli.status import StatusClient
from hawk_connector.config import DECODE_ROLE, PREFILL_ROLE, HawkConfig
from hawk_connector.errors import PeerGone
from hawk_connector.metrics import TransferReport
from hawk_connector.protocol.messages import Status

_POLL_S = 0.05
_ANSWER_S = 5.0


@dataclass(frozen=True, slots=True)
class Movement:
    """One request's KV on its way, as both sides report it; None where a side has nothing to report."""

    prefill: TransferReport | None
    decode: TransferReport | None

    @property
    def problem(self) -> str:
        """Why this KV cannot be said to have come through HAWK; "" when it has."""
        for side, report in (("prefill", self.prefill), ("decode", self.decode)):
            if report is None:
                return f"the {side} side reports no transfer for it"
            if report.outcome != "completed":
                return f"the {side} side reports its transfer {report.outcome}: {report.reason}"
        assert self.prefill is not None and self.decode is not None
        if self.prefill.transfer_id != self.decode.transfer_id:
            return "the two sides report different transfers for it"
        if not self.decode.wire_bytes or not self.decode.segments:
            return "the decode side read no bytes for it"
        return ""

    @property
    def handover_s(self) -> float | None:
        """Seconds from the end of the prompt's computation to its landing; both by one machine's clock."""
        began = self.prefill.prefilled_at if self.prefill is not None else None
        ended = self.decode.landed_at if self.decode is not None else None
        return None if began is None or ended is None else ended - began


def report_of(reports: Iterable[TransferReport], request: str) -> TransferReport | None:
    """The report on the request that a server's answer calls ``request``; vLLM appends to that name."""
    return next((report for report in reports if report.request_id.startswith(f"{request}-")), None)


class Sides:
    """The status of a deployment's two sides; one thread's, a context manager.

    Raises PeerGone where a side does not answer, StopRequested where ``pause`` says so.
    """

    def __init__(self, config: DeploymentConfig, pause: Pause, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._pause = pause
        self._clock = clock
        self._open = ExitStack()
        self._clients = {}
        for name, server, role in (
            ("prefill", config.prefill, PREFILL_ROLE),
            ("decode", config.decode, DECODE_ROLE),
        ):
            hawk = HawkConfig.parse(server.hawk, role)
            address = Address(hawk.peer_host, hawk.side_channel_port)
            self._clients[name] = self._open.enter_context(StatusClient(address, clock=clock))

    def __enter__(self) -> Sides:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    def movement(self, request: str, timeout_s: float) -> Movement:
        """What both sides report on ``request``, waiting up to ``timeout_s`` for both to have a report."""
        deadline = self._clock() + timeout_s
        while True:
            found = Movement(
                prefill=report_of(self._ask("prefill").reports, request),
                decode=report_of(self._ask("decode").reports, request),
            )
            if (found.prefill is not None and found.decode is not None) or self._clock() >= deadline:
                return found
            self._wait()

    def held(self, timeout_s: float) -> list[str]:
        """What the sides hold, as "prefill: 2 leases"; waits up to ``timeout_s`` for both to hold nothing."""
        deadline = self._clock() + timeout_s
        while True:
            left = [
                f"{name}: {count} {what}"
                for name in self._clients
                for what, count in self._ask(name).held.items()
                if count
            ]
            if not left or self._clock() >= deadline:
                return left
            self._wait()

    def _ask(self, name: str) -> Status:
        status = self._clients[name].ask(_ANSWER_S)
        if status is None:
            raise PeerGone(f"no answer from the {name} side's side channel within {_ANSWER_S:g} s")
        return status

    def _wait(self) -> None:
        if self._pause(_POLL_S):
            raise StopRequested
