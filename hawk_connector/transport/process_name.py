"""The name of one process's life on one machine, by which another process there may read its memory.

Read from proc(5): the boot id tells machines (and boots) apart, the pid namespace tells containers apart, and the start
time tells a process from a later one that was given the same number.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from ..errors import LocalError

__all__ = ["PROC", "ProcessName"]

PROC = Path("/proc")

_TEXT = re.compile(r"local:([0-9]{1,10}):([0-9]{1,20}):([0-9a-f-]{36}):([0-9]{1,20})")
# Field 22 of /proc/PID/stat, counted from the state (field 3), which follows the name in brackets.
_START_FIELD = 22 - 3


@dataclass(frozen=True, slots=True)
class ProcessName:
    """``started``: clock ticks since boot.  ``boot``: boot id of the kernel.  ``namespace``: inode of the pid namespace
    in which ``pid`` counts.  As text (``str``, :meth:`parse`): ``local:PID:STARTED:BOOT:NAMESPACE``."""

    pid: int
    started: int
    boot: str
    namespace: int

    @classmethod
    def own(cls, proc: Path = PROC) -> ProcessName:
        """This process's name; to be asked for after any fork.  Raises LocalError where /proc does not tell."""
        try:
            boot = (proc / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
            namespace = os.stat(proc / "self/ns/pid").st_ino
            started = start_time(os.getpid(), proc)
        except OSError as error:
            raise LocalError(f"/proc does not say which process this is: {error}", fix="Mount /proc.") from None
        if started is None:
            raise LocalError(
                f"/proc does not list this process (pid {os.getpid()})",
                fix="Mount a /proc of this process's own pid namespace.",
            )
        return cls(os.getpid(), started, boot, namespace)

    @classmethod
    def parse(cls, text: str) -> ProcessName | None:
        """The name that ``text`` is, or None: it may be anything, a peer has sent it."""
        found = _TEXT.fullmatch(text)
        if found is None:
            return None
        pid, started, boot, namespace = found.groups()
        # Past it ctypes would cut it down to another process's number.
        if not 0 < int(pid) < 2**31:
            return None
        return cls(int(pid), int(started), boot, int(namespace))

    def __str__(self) -> str:
        return f"local:{self.pid}:{self.started}:{self.boot}:{self.namespace}"

    def lives(self, proc: Path = PROC) -> bool:
        """Whether the process of this name, and not a later one of its number, is there (dead or alive: a process that
        has ended is listed until its parent has asked for it).  Meaningful in its own pid namespace only."""
        return start_time(self.pid, proc) == self.started


def start_time(pid: int, proc: Path = PROC) -> int | None:
    """Clock ticks between boot and the start of ``pid``; None where there is no such process."""
    try:
        text = (proc / str(pid) / "stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name may hold blanks and brackets: what follows the last closing one is fields.
    return int(text[text.rindex(b")") + 1 :].split()[_START_FIELD])
