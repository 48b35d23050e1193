"""A process that does what it is told over a pipe: one object, whose methods are called by name."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

from hawk_connector.errors import HawkError, LocalError

__all__ = ["Child"]

_END = "end"
_END_S = 20.0
_LAST_WORDS = 2000


class Child:
    """A spawned process with an object that ``make(*arguments)`` makes there.

    Everything that crosses the pipe is plain and picklable.  Both ends are ours.
    """

    def __init__(self, name: str, make: Callable[..., Any], *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._name = name
        # What engines and libraries say there; shown where the process fails.
        self._log = tempfile.NamedTemporaryFile(prefix=f"hawk-bench-{name}-", suffix=".log")  # noqa: SIM115
        self._process = context.Process(
            target=_serve, args=(theirs, self._log.name, make, arguments), name=name, daemon=True
        )
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def call(self, method: str, *arguments: Any, within_s: float = 300.0) -> Any:
        """What the object's method returns; raises what it raises.  LocalError where the process does not answer."""
        try:
            self._pipe.send((method, arguments))
            if not self._pipe.poll(within_s):
                raise LocalError(f"the {self._name} process did not answer {method} within {within_s:g} s")
            ok, answer = self._pipe.recv()
        except (EOFError, OSError) as error:
            self._process.join(1)
            raise LocalError(
                f"the {self._name} process ended during {method}",
                got=f"exit code {self._process.exitcode} ({type(error).__name__}){self._last_words()}",
                fix="A code of -9 is the kernel's, which had no more memory: use smaller sizes.",
            ) from None
        if not ok:
            raise answer
        return answer

    def _last_words(self) -> str:
        text = self._log.read()[-_LAST_WORDS:].decode(errors="replace").strip()
        return f"; it said last:\n{text}\n" if text else ""

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Asks the process to end, and ends it where it does not."""
        with suppress(OSError):
            self._pipe.send((_END, ()))
        self._process.join(_END_S if kind is None else 2.0)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._pipe.close()
        self._log.close()


def _serve(pipe: Connection, log: str, make: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    with open(log, "ab") as file:
        os.dup2(file.fileno(), 2)
    # Ctrl-C goes to the whole group; the parent ends its children.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    served: Any = None
    while True:
        try:
            method, given = pipe.recv()
        except EOFError:
            break  # the parent is gone
        if method == _END:
            break
        try:
            if served is None:
                served = make(*arguments)
            answer = (True, getattr(served, method)(*given))
        except HawkError as error:
            answer = (False, error)
        except Exception as error:
            text = "".join(traceback.format_exception(error))
            answer = (False, LocalError(f"{method} failed with an unexpected error:\n{text}"))
        pipe.send(answer)
    # Not through the interpreter's end: threads that wait in an engine would hold it up.
    os._exit(0)
