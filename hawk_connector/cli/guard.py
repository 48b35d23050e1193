"""`python -m hawk_connector.cli.guard`: ends process groups when their supervisor is gone, however it went.

A supervisor that is killed cannot stop what it started, and a process that is told of its parent's death by
the kernel does not always pass it on (vLLM's server, while it starts, leaves its engine core behind). So one
small process waits for the end of its standard input, which the supervisor holds open as long as it lives.

Input, a line each: ``+GROUP`` (it exists now) and ``-GROUP`` (it has been ended).
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterable

GRACE_S = 10.0
_POLL_S = 0.1


def end_groups(groups: Iterable[int], grace_s: float) -> None:
    """SIGTERM to every process group, and SIGKILL to those that are there ``grace_s`` seconds later."""
    left = [group for group in groups if _signal(group, signal.SIGTERM)]
    deadline = time.monotonic() + grace_s
    while left and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        left = [group for group in left if _signal(group, 0)]
    for group in left:
        _signal(group, signal.SIGKILL)


def _signal(group: int, number: int) -> bool:
    """Whether the group existed and could be signalled; number 0 only asks."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def main() -> None:
    groups: set[int] = set()
    for line in sys.stdin:
        group = int(line[1:])
        if line.startswith("+"):
            groups.add(group)
        else:
            groups.discard(group)
    end_groups(groups, GRACE_S)


if __name__ == "__main__":
    main()
