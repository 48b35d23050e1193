"""Ctrl-C and SIGTERM as an answer to "wait a moment", instead of an exception somewhere."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from types import FrameType, TracebackType

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopSignal:
    """While it is entered, SIGINT, SIGTERM and SIGHUP only end the current or the next pause().

    Main thread only (Python's rule for signal handlers).
    """

    def __enter__(self) -> StopSignal:
        self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._before = {number: signal.signal(number, self._note) for number in _SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(self._read)
        os.close(self._write)

    def pause(self, seconds: float) -> bool:
        """Waits up to ``seconds``; True at once when a signal has come since the last True."""
        readable, _, _ = select.select([self._read], [], [], seconds)
        if not readable:
            return False
        with contextlib.suppress(BlockingIOError):
            os.read(self._read, 4096)
        return True

    def _note(self, number: int, frame: FrameType | None) -> None:
        with contextlib.suppress(BlockingIOError):  # full: enough has been noted
            os.write(self._write, b"!")
