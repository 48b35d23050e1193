"""The thread that owns a side's channels: waits for messages, for other threads' wakes, and for deadlines."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

from ..errors import HawkError, ProtocolError
from ..event_log import EventLog
from .channel import Received
from .side_channel import SideChannelClient, SideChannelServer, Wake, wait

__all__ = ["ChannelLoop"]

_log = logging.getLogger(__name__)

# Pause after a turn that failed (no descriptor left, say), so that the loop is not busy with failing.
_AFTER_ERROR_S = 0.05


class ChannelLoop:
    """Calls ``on_message(channel, peer, payload)`` for each message and ``on_turn()`` once a turn, on its own thread.

    ``on_turn`` gives the seconds after which it wants to be called again whatever happens.  An exception in either
    is logged and costs that message or turn only.  A ProtocolError of a message is counted as malformed on its channel.
    """

    def __init__(
        self,
        name: str,
        channels: Sequence[SideChannelServer | SideChannelClient],
        on_message: Callable[[SideChannelServer | SideChannelClient, str, bytes], None],
        on_turn: Callable[[], float],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.wake = Wake()
        self._channels = list(channels)
        self._on_message = on_message
        self._on_turn = on_turn
        self._closing = threading.Event()
        self._events = EventLog(_log, clock)
        self._timeout_s = 0.0
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self, timeout_s: float = 5.0) -> None:
        """Ends the thread and closes the channels.  Repeatable; not from the loop's own thread."""
        if self._closing.is_set():
            return
        self._closing.set()
        self.wake.set()
        if self._thread.ident is None:
            # Never started, so nobody else closes them; a ZMQ context that is collected while open waits for ever.
            self._close_channels()
        else:
            self._thread.join(timeout_s)
        if not self._thread.is_alive():
            self.wake.close()

    def _run(self) -> None:
        while not self._closing.is_set():
            # Deadlines move on this thread only: whatever goes wrong in a turn, there is a next one.
            if self._guard(self._turn) is None:
                self._closing.wait(_AFTER_ERROR_S)
        self._close_channels()

    def _turn(self) -> float:
        wait(self._channels, self.wake, self._timeout_s)
        for channel in self._channels:
            # Bounded, so that a peer that talks without end cannot keep the turn from coming.
            for _ in range(256):
                received = channel.receive()
                if received is None:
                    break
                self._guard(partial(self._take, channel, received))
        self._timeout_s = self._guard(self._on_turn) or _AFTER_ERROR_S
        return self._timeout_s

    def _take(self, channel: SideChannelServer | SideChannelClient, received: Received) -> None:
        try:
            self._on_message(channel, received.peer, received.payload)
        except ProtocolError as error:
            channel.counts.malformed += 1
            self._events.warning("message", str(error), peer=received.peer)

    def _close_channels(self) -> None:
        for channel in self._channels:
            channel.close()

    def _guard(self, work: Callable[[], float | None]) -> float | None:
        try:
            return work()
        except HawkError as error:
            self._events.warning("turn", str(error))
        except Exception:
            self._events.exception("turn", "the side channel's loop met an error; it goes on")
        return None
