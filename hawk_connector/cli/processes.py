"""Starting, watching and stopping a set of processes that belong together.

Each process is a session of its own: a Ctrl-C in the terminal reaches only the supervisor, which then stops
the others in order; and a process's helpers (vLLM's engine core) can be ended with it. Where the supervisor
itself is killed, guard.py ends them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO

import httpx

from hawk_connector.errors import LocalError

LOG_TAIL_LINES = 15
_LOG_TAIL_BYTES = 16_384
_POLL_S = 0.25

# Waits for the seconds given, or less; True says that the user wants everything to stop.
Pause = Callable[[float], bool]


class DeploymentError(LocalError):
    """A process of the deployment could not be started, died, or was not ready in time."""


class StopRequested(Exception):
    """The user asked for the end while something was waited for."""


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """One process: its command line, what it adds to the environment, and where it says that it is ready."""

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    health_url: str | None = None


@dataclass(frozen=True, slots=True)
class Death:
    """A process that ended by itself. ``code``: exit code, or minus the signal's number."""

    name: str
    code: int
    log: Path

    def __str__(self) -> str:
        killed = self.code < 0
        how = f"was killed by {signal.Signals(-self.code).name}" if killed else f"ended with code {self.code}"
        return f"{self.name} {how}. {_log_text(self.log)}"


def log_tail(path: Path, lines: int = LOG_TAIL_LINES) -> list[str]:
    """The last lines of a log that have text; [] where there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _LOG_TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    return [line for line in text.splitlines() if line.strip()][-lines:]


def _log_text(path: Path) -> str:
    tail = "".join(f"\n  | {line}" for line in log_tail(path))
    return f"Its log is {path}" + (f" and ends with{tail}" if tail else ", and is empty")


def refuse_ports_in_use(ports: Iterable[tuple[str, str, int]]) -> None:
    """Raises DeploymentError naming every port of (key, host, port) that something listens on already."""
    taken = []
    for key, host, port in ports:
        try:
            _bind_once(host, port)
        except OSError as error:
            taken.append(f"{key}: {host}:{port}: {error.strerror or error}")
    if taken:
        raise DeploymentError(
            "cannot listen on " + "; ".join(taken),
            fix="Choose other ports in the deployment file, or end what holds them (`ss -ltnp` names it).",
        )


def _bind_once(host: str, port: int) -> None:
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        # As servers do: a port whose last connections are in TIME_WAIT is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(address)


class _Guard:
    """The process that ends the others when this one is gone; see guard.py."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "hawk_connector.cli.guard"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )

    def add(self, group: int) -> None:
        self._tell(f"+{group}\n")

    def remove(self, group: int) -> None:
        self._tell(f"-{group}\n")

    def close(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._input.close()
        self._process.wait()

    def _tell(self, line: str) -> None:
        # A guard that someone has killed is missed only if the supervisor is killed too.
        with contextlib.suppress(BrokenPipeError):
            self._input.write(line.encode())
            self._input.flush()

    @property
    def _input(self) -> IO[bytes]:
        assert self._process.stdin is not None
        return self._process.stdin


class _Running:
    """A started process with its log."""

    def __init__(self, spec: ProcessSpec, log: Path, guard: _Guard) -> None:
        self.spec = spec
        self.log = log
        self._guard = guard
        if log.exists():
            os.replace(log, log.with_suffix(".log.old"))
        with log.open("wb") as output:
            try:
                self._process = subprocess.Popen(
                    spec.argv,
                    env={**os.environ, **spec.env},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            except OSError as error:
                raise DeploymentError(f"cannot start {spec.name} ({spec.argv[0]}): {error.strerror}") from error

        guard.add(self.pid)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def ended(self) -> bool:
        """Whether the process has ended. It is not reaped yet, so its process group keeps its number."""
        if self._process.returncode is not None:
            return True
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def signal(self, number: signal.Signals) -> None:
        """Signals the process and its helpers; nothing once it has been reaped."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, number)

    def reap(self) -> int:
        """Kills what is left of the group and collects the exit code (minus the signal, when killed)."""
        self.signal(signal.SIGKILL)
        if self._process.returncode is None:
            self._guard.remove(self.pid)
        return self._process.wait()


def _say_nothing(text: str) -> None:
    pass


class Deployment:
    """A set of processes, started stage by stage and stopped in the opposite order.

    Used as a context manager, or by start() / wait_ready() / stop(). ``pause`` is how it waits (an injected
    sleep that the user can cut short), ``clock`` what it measures deadlines with, in seconds; ``announce``
    gets a line for what has happened, ``live`` one for what is going on.
    """

    def __init__(
        self,
        stages: Sequence[Sequence[ProcessSpec]],
        logs: Path,
        *,
        ready_timeout_s: float = 300.0,
        stop_timeout_s: float = 20.0,
        pause: Pause | None = None,
        clock: Callable[[], float] = time.monotonic,
        announce: Callable[[str], None] = _say_nothing,
        live: Callable[[str], None] = _say_nothing,
    ) -> None:
        self._stages = tuple(tuple(stage) for stage in stages)
        self._logs = logs
        self._ready_timeout_s = ready_timeout_s
        self._stop_timeout_s = stop_timeout_s
        self._pause = pause if pause is not None else _sleep
        self._clock = clock
        self._announce = announce
        self._live = live
        self._running: list[_Running] = []
        self._guard: _Guard | None = None

    def __enter__(self) -> Deployment:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def pids(self) -> dict[str, int]:
        """Process ids of what has been started and not stopped."""
        return {process.spec.name: process.pid for process in self._running}

    def log_of(self, name: str) -> Path:
        """Where the output of process ``name`` goes; the one of the run before is beside it (`.log.old`)."""
        return self._logs / f"{name}.log"

    def start(self) -> None:
        """Starts the first stage. Raises DeploymentError."""
        try:
            self._logs.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DeploymentError(f"cannot make the log directory {self._logs}: {error.strerror}") from error
        self._start_stage(0)

    def wait_ready(self) -> None:
        """Waits until every process is ready, starting each stage when the one before it is.

        Raises DeploymentError (a death, or the deadline) and StopRequested. Processes that are up stay up:
        stop() ends them.
        """
        began = self._clock()
        with httpx.Client(timeout=2.0, trust_env=False) as client:
            for number, stage in enumerate(self._stages):
                if number > 0:
                    self._start_stage(number)
                waiting = {spec.name: spec.health_url for spec in stage if spec.health_url is not None}
                while waiting:
                    self._raise_on_death()
                    spent = self._clock() - began
                    for name in [name for name, health in waiting.items() if _healthy(client, health)]:
                        del waiting[name]
                        self._announce(f"{name} is ready after {spent:.0f} s")
                    if not waiting:
                        break
                    if spent > self._ready_timeout_s:
                        raise self._late(waiting)
                    self._live(f"waiting for {' and '.join(waiting)} ({spent:.0f} s)")
                    if self._pause(_POLL_S):
                        raise StopRequested
        self._raise_on_death()

    def watch(self) -> Death | None:
        """Waits until a process dies (and says which) or the user asks for the end (None)."""
        while True:
            death = self.death()
            if death is not None:
                return death
            if self._pause(_POLL_S):
                return None

    def death(self) -> Death | None:
        """The first process that has ended by itself, if any."""
        for process in self._running:
            if process.ended:
                return Death(process.spec.name, process.reap(), process.log)
        return None

    def stop(self) -> None:
        """Ends everything, the last started first: SIGTERM, and SIGKILL after the deadline.

        A request to stop that comes meanwhile cuts the deadline of the process at hand short.
        """
        while self._running:
            process = self._running[-1]
            if not process.ended:
                self._live(f"stopping {process.spec.name}")
                process.signal(signal.SIGTERM)
                deadline = self._clock() + self._stop_timeout_s
                while not process.ended and self._clock() < deadline:
                    if self._pause(_POLL_S):
                        break
            process.reap()
            self._running.pop()
        if self._guard is not None:
            self._guard.close()
            self._guard = None

    def _start_stage(self, number: int) -> None:
        if self._guard is None:
            self._guard = _Guard()
        for spec in self._stages[number]:
            self._running.append(_Running(spec, self.log_of(spec.name), self._guard))

    def _raise_on_death(self) -> None:
        death = self.death()
        if death is not None:
            raise DeploymentError(str(death))

    def _late(self, waiting: Mapping[str, str]) -> DeploymentError:
        text = f"not ready within {self._ready_timeout_s:g} s: "
        for name, health in waiting.items():
            text += f"{name} (no answer from {health}). {_log_text(self.log_of(name))}\n"
        return DeploymentError(text + "Raise ready_timeout_s if it was only slow")


def _healthy(client: httpx.Client, health_url: str) -> bool:
    try:
        return client.get(health_url).status_code == 200
    except httpx.HTTPError:
        return False


def _sleep(seconds: float) -> bool:
    time.sleep(seconds)
    return False
