"""Asking running sides, over their side channels, how they are."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import TracebackType

from hawk_connector.address import Address
from hawk_connector.errors import ProtocolError
from hawk_connector.protocol.epochs import random_id
from hawk_connector.protocol.messages import Status, StatusQuery, decode_message, encode
from hawk_connector.transport.curve import CurveKeys
from hawk_connector.transport.side_channel import SideChannelClient, wait

__all__ = ["StatusBoard", "StatusClient"]

_RESEND_S = 0.5


class StatusBoard:
    """Asks several side channels at once for their status; one thread's, a context manager."""

    def __init__(
        self,
        addresses: Sequence[Address],
        *,
        keys: CurveKeys | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises ConfigError when a host cannot be resolved, or no key is known for it."""
        self._clock = clock
        self._channel = SideChannelClient(keys=keys)
        try:
            self._peers = [self._channel.connect(address) for address in addresses]
        except Exception:
            self._channel.close()
            raise

    def __enter__(self) -> StatusBoard:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._channel.close()

    def ask(self, timeout_s: float) -> list[Status | None]:
        """Each side's status in the order of the addresses, None where none comes within ``timeout_s``.

        Asks again meanwhile. What has come by now, in answer to an earlier question, is not taken for this one's.
        """
        while self._channel.receive() is not None:
            pass
        deadline = self._clock() + timeout_s
        question = encode(StatusQuery(epoch=random_id()))
        answers: dict[str, Status] = {}
        while len(answers) < len(set(self._peers)) and (left := deadline - self._clock()) > 0:
            for peer in self._peers:
                if peer not in answers:
                    self._channel.send(peer, question)
            round_end = self._clock() + min(left, _RESEND_S)
            while len(answers) < len(set(self._peers)) and (rest := round_end - self._clock()) > 0:
                wait([self._channel], None, rest)
                while (answer := self._channel.receive()) is not None:
                    try:
                        message = decode_message(answer.payload, (Status,))
                    except ProtocolError:
                        continue
                    assert isinstance(message, Status)
                    answers[answer.peer] = message
        return [answers.get(peer) for peer in self._peers]


class StatusClient:
    """Asks the side channel at one ``address``; one thread's, a context manager."""

    def __init__(
        self,
        address: Address,
        *,
        keys: CurveKeys | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises ConfigError when the host cannot be resolved, or no key is known for it."""
        self._board = StatusBoard([address], keys=keys, clock=clock)

    def __enter__(self) -> StatusClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._board.__exit__(kind, error, trace)

    def ask(self, timeout_s: float) -> Status | None:
        """The side's status, or None when no answer comes within ``timeout_s``."""
        return self._board.ask(timeout_s)[0]
