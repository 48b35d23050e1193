"""Log lines about transfers and peers: one shape on both sides, bounded in length and number.

A line is the text followed by what it is about, ``[event=read transfer=0f12.. request=cmpl-1 peer=10.0.0.7:18550]``, so
that one id finds a transfer in both sides' logs.  Request ids, error texts and names come from clients and peers:
control characters are escaped, so that none can forge a line, and everything is cut to a length.  Each (event, peer)
has a token bucket; what it refuses is counted and said with the next line that passes.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from .rate import RateBook

__all__ = ["EventLog", "escaped"]

_TEXT_LIMIT = 2000
_VALUE_LIMIT = 256
# Lines of one event about one peer: ten at once, then one in five seconds; about all peers together ten times that,
# since whoever connects anew is a new peer.
_BURST = 10
_PER_S = 0.2
_ALL_PEERS = 10
_NAMES = 1024


def escaped(text: str, limit: int = _VALUE_LIMIT) -> str:
    """``text`` on one line: what is not printable as an escape sequence, at most ``limit`` characters of it."""
    clean = "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text[:limit])
    return clean if len(text) <= limit else f"{clean}... ({len(text)} characters)"


class EventLog:
    """Writes to ``logger``; from any thread."""

    def __init__(
        self, logger: logging.Logger, clock: Callable[[], float] = time.monotonic, *, per_s: float = _PER_S
    ) -> None:
        self._logger = logger
        self._lock = threading.Lock()
        self._rates = RateBook(per_s, _BURST, _NAMES, clock)
        self._events = RateBook(per_s * _ALL_PEERS, _BURST * _ALL_PEERS, _NAMES, clock)

    def info(self, event: str, text: str, *, peer: str = "", transfer: str = "", request: str = "") -> None:
        self._write(logging.INFO, event, text, peer, transfer, request)

    def warning(self, event: str, text: str, *, peer: str = "", transfer: str = "", request: str = "") -> None:
        self._write(logging.WARNING, event, text, peer, transfer, request)

    def exception(self, event: str, text: str, *, peer: str = "", transfer: str = "", request: str = "") -> None:
        """An error with the traceback of the exception that is being handled."""
        self._write(logging.ERROR, event, text, peer, transfer, request, traceback=True)

    def _write(
        self, level: int, event: str, text: str, peer: str, transfer: str, request: str, traceback: bool = False
    ) -> None:
        if not self._logger.isEnabledFor(level):
            return
        with self._lock:
            if not (self._rates.allows((event, peer)) and self._events.allows(event)):
                return
            unsaid = self._rates.unsaid((event, peer)) + self._events.unsaid(event)
        about = {"event": event, "transfer": transfer, "request": request, "peer": peer}
        words = " ".join(f"{name}={_value(value)}" for name, value in about.items() if value)
        more = f" ({unsaid} more like this were not logged)" if unsaid else ""
        self._logger.log(level, "%s%s [%s]", escaped(text, _TEXT_LIMIT), more, words, exc_info=traceback)


def _value(text: str) -> str:
    """``text`` as the value of a word: without spaces, quotes and brackets, which would end it."""
    return "".join(c if c not in ' "[]=' else f"\\x{ord(c):02x}" for c in escaped(text))
