"""Asking a running side, over its side channel, how it is."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType

from hawk_connector.address import Address
from hawk_connector.errors import ProtocolError
from hawk_connector.protocol.epochs import random_id
from hawk_connector.protocol.messages import Status, StatusQuery, decode_message, encode
from hawk_connector.transport.curve import CurveKeys
from hawk_connector.transport.side_channel import SideChannelClient, wait

_RESEND_S = 0.5


class StatusClient:
    """Asks the side channel at ``address`` for its status; one thread's, a context manager."""

    def __init__(
        self,
        address: Address,
        *,
        keys: CurveKeys | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises ConfigError when the host cannot be resolved, or no key is known for it."""
        self._clock = clock
        self._channel = SideChannelClient(keys=keys)
        self._peer = self._channel.connect(address)

    def __enter__(self) -> StatusClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._channel.close()

    def ask(self, timeout_s: float) -> Status | None:
        """The side's status, or None when no answer comes within ``timeout_s``. Asks again meanwhile.

        An answer to an earlier question that came too late is not taken for this one's.
        """
        while self._channel.receive() is not None:
            pass
        deadline = self._clock() + timeout_s
        question = encode(StatusQuery(epoch=random_id()))
        while (left := deadline - self._clock()) > 0:
            self._channel.send(self._peer, question)
            wait([self._channel], None, min(left, _RESEND_S))
            while (answer := self._channel.receive()) is not None:
                try:
                    message = decode_message(answer.payload, (Status,))
                except ProtocolError:
                    continue
                assert isinstance(message, Status)
                return message
        return None
