"""How many connections a serving socket has, and the closing of those that are too many.

ZMQ accepts whoever connects, and each connection is a file descriptor of this process, of which vLLM's own clients
need some too.  ZMQ has no limit for it, but tells of each connection with its descriptor when it comes and goes.
"""

from __future__ import annotations

import os
import socket

import zmq
from zmq.utils.monitor import parse_monitor_message

__all__ = ["Door"]


class Door:
    """Counts the connections of ``listener`` and closes those past ``limit``; the newest, so that what is in use stays.

    One thread's, like the socket.  The descriptor that an event names may be another's by now, so it is only touched
    where it is a connection to this listener's port.
    """

    def __init__(self, listener: zmq.Socket[bytes], limit: int) -> None:
        """Before ``listener`` is bound."""
        self.events: zmq.Socket[bytes] = listener.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self._limit = limit
        self._port = 0
        self._open: set[int] = set()

    @property
    def connections(self) -> int:
        return len(self._open)

    def opened(self, port: int) -> None:
        """The listener is bound to ``port``."""
        self._port = port

    def turn(self) -> int:
        """Takes note of who came and went; the number of connections that it closed."""
        closed = 0
        while True:
            try:
                event = parse_monitor_message(self.events.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return closed
            descriptor = int(event["value"])
            if event["event"] == zmq.EVENT_DISCONNECTED:
                self._open.discard(descriptor)
                continue
            self._open.add(descriptor)
            # It stays among the open ones until ZMQ has seen that it is shut.
            if len(self._open) > self._limit and self._shut(descriptor):
                closed += 1

    def _shut(self, descriptor: int) -> bool:
        try:
            copy = os.dup(descriptor)
        except OSError:
            return False  # gone already
        try:
            connection = socket.socket(fileno=copy)
        except OSError:
            os.close(copy)
            return False  # no socket
        with connection:
            try:
                connection.getpeername()  # the listener itself has none
                if connection.getsockname()[1] != self._port:
                    return False
                connection.shutdown(socket.SHUT_RDWR)
            except (OSError, IndexError):
                return False
        return True
