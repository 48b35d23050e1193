"""The machine as the checks see it: files below a root, and questions that no file answers.

Tests give another root and other answers, so that every case is one that can be built.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

__all__ = ["ClockState", "Machine", "clock_state", "this_machine"]

_ANSWER_S = 2.0
_IMPORT_S = 60.0
_CAP_IPC_LOCK = 14

# What adjtimex(2) returns, and sets in its status, for a clock that nothing keeps right.
_TIME_ERROR = 5
_STA_UNSYNC = 0x40
_TIMEX_WORDS = 32


@dataclass(frozen=True, slots=True)
class ClockState:
    """The kernel's clock: whether a time service keeps it right, and the error that it admits, in seconds."""

    synchronised: bool
    error_s: float


def _version_of(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _plugins(group: str) -> tuple[str, ...]:
    return tuple(sorted(entry.name for entry in metadata.entry_points(group=group)))


def _library_error(name: str) -> str | None:
    try:
        ctypes.CDLL(name)
    except OSError as error:
        return str(error)
    return None


def _import_error(module: str) -> str | None:
    """Imports it in a process of its own: a library that does not fit may end the process that loads it."""
    command = [sys.executable, "-c", f"import {module}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_IMPORT_S)
    except subprocess.TimeoutExpired:
        return f"it had not loaded after {_IMPORT_S:g} s"
    if done.returncode == 0:
        return None
    lines = done.stderr.strip().splitlines()
    return lines[-1] if lines else f"the process that loaded it ended with code {done.returncode}"


def _bind_error(host: str, port: int) -> str | None:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        return error.strerror or str(error)
    return None


def _connect_error(host: str, port: int) -> str | None:
    try:
        socket.create_connection((host, port), timeout=_ANSWER_S).close()
    except OSError as error:
        return error.strerror or str(error)
    return None


def _memlock() -> int | None:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def _clock() -> ClockState | None:
    """adjtimex(2), asked and not told; None where the C library has none."""
    words = (ctypes.c_long * _TIMEX_WORDS)()
    try:
        answer = ctypes.CDLL(None, use_errno=True).adjtimex(words)
    except (OSError, AttributeError):
        return None
    if answer < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), "adjtimex")
    return clock_state(answer, list(words))


def clock_state(answer: int, words: Sequence[int]) -> ClockState:
    """``answer``: what adjtimex returned.  ``words``: its struct timex as longs: modes, offset, freq, maxerror,
    esterror (microseconds), status in the lower half of the next, and more."""
    return ClockState(answer != _TIME_ERROR and not words[5] & _STA_UNSYNC, words[4] / 1e6)


@dataclass(frozen=True)
class Machine:
    """``root``: where / is.  ``memlock``: bytes that this process may lock, None for no limit.

    The ``..._error`` ones say what is in the way, None where nothing is.
    """

    root: Path = Path("/")
    environment: Mapping[str, str] = field(default_factory=dict)
    version_of: Callable[[str], str | None] = _version_of
    plugins: Callable[[str], tuple[str, ...]] = _plugins
    library_error: Callable[[str], str | None] = _library_error
    import_error: Callable[[str], str | None] = _import_error
    bind_error: Callable[[str, int], str | None] = _bind_error
    connect_error: Callable[[str, int], str | None] = _connect_error
    memlock: Callable[[], int | None] = _memlock
    clock: Callable[[], ClockState | None] = _clock

    def text(self, path: str) -> str | None:
        """What a file holds, without surrounding space; None where it is not there.  OSError where it may not be
        read."""
        try:
            return (self.root / path).read_text(encoding="utf-8", errors="replace").strip()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            if error.errno == errno.EINVAL:  # an attribute that its device does not fill
                return None
            raise

    def names(self, path: str) -> list[str]:
        """What a directory holds, sorted; empty where it is not there."""
        try:
            return sorted(os.listdir(self.root / path))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def link(self, path: str) -> str | None:
        """Last part of what a symbolic link points to; None where it is not there."""
        try:
            return os.path.basename(os.readlink(self.root / path))
        except OSError:
            return None

    def may_use(self, path: str) -> bool:
        """Whether this process may read and write a file, as a device node has to be."""
        return os.access(self.root / path, os.R_OK | os.W_OK)

    def may_lock_all(self) -> bool:
        """Whether this process has CAP_IPC_LOCK, for which the limit does not hold."""
        for line in (self.text("proc/self/status") or "").splitlines():
            if line.startswith("CapEff:"):
                return bool(int(line.split()[1], 16) >> _CAP_IPC_LOCK & 1)
        return False


def this_machine() -> Machine:
    return Machine(environment=dict(os.environ))
