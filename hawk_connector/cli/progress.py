"""One line that says what is going on, and lines that stay."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.status import Status


class Progress:
    """A live line above which other lines stay. Where the output is no terminal there is no live line."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._status: Status | None = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._clear()

    def live(self, text: str) -> None:
        """Replaces the live line by ``text``."""
        if not self._console.is_terminal:
            return
        if self._status is None:
            self._status = self._console.status(text)
            self._status.start()
        self._status.update(text)

    def line(self, text: str) -> None:
        """Prints ``text`` for good; the live line, if any, is over."""
        self._clear()
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _clear(self) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None
