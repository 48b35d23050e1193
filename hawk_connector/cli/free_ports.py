"""Ports for servers that are started later.

A port that the kernel hands out for port 0 may be given to any connection that is opened before the server listens on
it, and a vLLM server takes half a minute to come that far.  So these lie outside the range from which it hands out.
"""

from __future__ import annotations

import random
import socket
from contextlib import ExitStack, closing
from pathlib import Path

__all__ = ["free_ports"]

# Above those of Mooncake (15000-17000) and of most services.
_FIRST = 20_000
_HANDED_OUT = Path("/proc/sys/net/ipv4/ip_local_port_range")
_USUALLY_FROM = 32_768


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Different ports of ``host`` that nothing listens on now, and that no connection is given by itself.

    OSError where there are too few.
    """
    candidates = list(range(_FIRST, _end()))
    random.SystemRandom().shuffle(candidates)
    found: list[int] = []
    with ExitStack() as held:
        for port in candidates:
            if len(found) == count:
                return found
            probe = held.enter_context(closing(socket.socket()))
            try:
                probe.bind((host, port))
            except OSError:
                continue  # somebody has it
            found.append(port)
    if len(found) < count:
        raise OSError(f"{count} free ports are needed between {_FIRST} and {_end() - 1} of {host}, found {len(found)}")
    return found


def _end() -> int:
    """The first port that the kernel hands out."""
    try:
        first = int(_HANDED_OUT.read_text(encoding="ascii").split()[0])
    except (OSError, ValueError):
        first = _USUALLY_FROM
    return first if first > _FIRST + 1000 else _USUALLY_FROM
