"""What a control channel is, for the loops that use one: bytes to and from named peers, never waiting.

No message types here: their meaning is `protocol.messages`'. A channel may lose, repeat and delay; it says
so only where it knows at once (``send`` returns False).
"""

from __future__ import annotations

import contextlib
import os
import threading
from typing import NamedTuple, Protocol

from ..errors import LocalError

__all__ = ["MAX_MESSAGE_BYTES", "MAX_REQUEST_BYTES", "Channel", "Received", "Wake", "checked_size"]

MAX_MESSAGE_BYTES = 1024 * 1024
# What a serving end takes.  Nothing that it is asked is longer; its answers (a status, say) may be.
MAX_REQUEST_BYTES = 32 * 1024


class Received(NamedTuple):
    """A message and whom it came from: a name that ``send`` takes, valid while that connection lives.

    ``key``: the public key (Z85) with which the sender has proved itself, None on a channel without keys.
    """

    peer: str
    payload: bytes
    key: str | None = None


class Channel(Protocol):
    """Both ends look alike; a serving end learns its peers' names from what they send."""

    def receive(self) -> Received | None:
        """The next message, or None when there is none now."""
        ...

    def send(self, peer: str, payload: bytes) -> bool:
        """Hand a message over; False when it was dropped at once (no such peer, or its queue is full).

        Raises LocalError for more than MAX_MESSAGE_BYTES: no peer would take it.
        """
        ...


class Wake:
    """Lets other threads end a wait of the thread that polls. ``fileno`` is readable while it is set."""

    def __init__(self) -> None:
        self._descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # The number of a closed descriptor may be another file's: no late ``set`` may write to that.
        self._lock = threading.Lock()
        self._closed = False

    def fileno(self) -> int:
        return self._descriptor

    def set(self) -> None:
        """End the current wait, or the next. From any thread, at any time; after close() nobody waits."""
        with self._lock:
            if not self._closed:
                os.eventfd_write(self._descriptor, 1)

    def clear(self) -> None:
        """Take back every ``set`` so far; the polling thread calls it before it looks for work."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._descriptor)

    def close(self) -> None:
        """Gives the descriptor back; the thread that polls it must have ended. Repeatable."""
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self._descriptor)


def checked_size(payload: bytes) -> bytes:
    """``payload``; raises LocalError when it is larger than a message may be."""
    if len(payload) > MAX_MESSAGE_BYTES:
        raise LocalError(
            "a control message is too large to send",
            expected=f"at most {MAX_MESSAGE_BYTES} bytes",
            got=f"{len(payload)} bytes",
        )
    return payload
