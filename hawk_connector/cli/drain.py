"""Draining running sides over their side channels: telling them, and watching what they still owe."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType

from hawk_connector.address import Address
from hawk_connector.errors import ProtocolError
from hawk_connector.event_log import escaped
from hawk_connector.protocol.epochs import random_id
from hawk_connector.protocol.messages import Drain, Draining, decode_message, encode
from hawk_connector.transport.curve import CurveKeys
from hawk_connector.transport.side_channel import SideChannelClient, wait

__all__ = ["Drainer", "SideDrain"]

_REPEAT_S = 0.5


@dataclass(frozen=True, slots=True)
class SideDrain:
    """How far one side is.  ``role`` is empty until it has answered; ``owed``: what it still holds, by name."""

    address: Address
    role: str = ""
    owed: dict[str, int] = field(default_factory=dict)
    refused: str = ""

    @property
    def done(self) -> bool:
        """Whether it drains and holds nothing any more."""
        return bool(self.role) and not self.refused and not self.owed

    @property
    def settled(self) -> bool:
        """Whether more waiting changes nothing."""
        return self.done or bool(self.refused)

    def __str__(self) -> str:
        if not self.role:
            return f"{self.address}: no answer"
        if self.refused:
            return f"{self.address} ({escaped(self.role)}): refused: {escaped(self.refused, 1024)}"
        owed = ", ".join(f"{count} {escaped(name).replace('_', ' ')}" for name, count in self.owed.items())
        return f"{self.address} ({escaped(self.role)}): " + (
            f"still holds {owed}" if owed else "drained, it holds nothing"
        )


class Drainer:
    """Tells the sides at ``addresses`` to drain; one thread's, a context manager.

    ``keys``: the pair that all of them have as their own; None for sides without keys.
    """

    def __init__(
        self,
        addresses: Sequence[Address],
        *,
        keys: CurveKeys | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises ConfigError when a host cannot be resolved."""
        self._clock = clock
        self._sides = {str(address): SideDrain(address) for address in addresses}
        self._channel = SideChannelClient(keys=keys)
        try:
            for address in addresses:
                self._channel.connect(address)
        except Exception:
            self._channel.close()
            raise

    def __enter__(self) -> Drainer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._channel.close()

    @property
    def sides(self) -> list[SideDrain]:
        """How far each side is, in the order of the addresses."""
        return list(self._sides.values())

    def turn(self) -> bool:
        """Tells those that are not done once more, and listens for half a second, or until all have answered.

        Returns whether none is left for which more waiting could change something.
        """
        message = encode(Drain(epoch=random_id()))
        asked = {name for name, side in self._sides.items() if not side.settled}
        for name in asked:
            self._channel.send(name, message)
        end = self._clock() + _REPEAT_S
        while asked and (left := end - self._clock()) > 0:
            wait([self._channel], None, left)
            while (received := self._channel.receive()) is not None:
                if self._hear(received.peer, received.payload):
                    asked.discard(received.peer)
        return all(side.settled for side in self._sides.values())

    def wait(self, timeout_s: float, pause: Callable[[float], bool], look: Callable[[list[SideDrain]], None]) -> bool:
        """Turns until nothing more can change, for ``timeout_s`` at most; whether every side is done.

        ``pause`` waits for the seconds given and says whether the user wants no more of it; ``look`` is shown how far
        the sides are, after each turn.
        """
        deadline = self._clock() + timeout_s
        while True:
            settled = self.turn()
            look(self.sides)
            if settled or self._clock() >= deadline or pause(min(_REPEAT_S, max(0.0, deadline - self._clock()))):
                return all(side.done for side in self.sides)

    def _hear(self, peer: str, payload: bytes) -> bool:
        side = self._sides[peer]
        try:
            message = decode_message(payload, (Draining,))
        except ProtocolError:
            return False
        assert isinstance(message, Draining)
        owed = {name: count for name, count in message.held.items() if count}
        self._sides[peer] = SideDrain(side.address, message.role, owed, message.refused)
        return True
