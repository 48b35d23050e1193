"""Ports that nobody has, and that nobody is given."""

from __future__ import annotations

import socket
from contextlib import ExitStack, closing
from pathlib import Path

from hawk_connector.cli.free_ports import free_ports


def test_they_differ_and_the_kernel_hands_none_of_them_out() -> None:
    found = free_ports(200)
    first, last = (int(n) for n in Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    assert len(set(found)) == 200
    assert not [port for port in found if first <= port <= last or 15_000 <= port <= 17_000]


def test_ports_that_are_taken_are_left_out() -> None:
    """300 of at most some ten thousand: 300 others that were drawn blindly would hit some of them."""
    with ExitStack() as stack:
        taken = free_ports(300)
        for port in taken:
            stack.enter_context(closing(socket.socket())).bind(("127.0.0.1", port))
        assert not set(taken) & set(free_ports(300))
