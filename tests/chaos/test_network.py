"""The tools of the chaos run do what they say: a cut network is cut, a full disk is full, and both can be mended.

And what one of them shows of the side channel's connections, which no loopback can.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.chaos.network import MISSING, Network, SmallDisk
from tests.transport.waiting import eventually

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(MISSING), reason=MISSING)]

# A port that nobody listens on: a host that is reached refuses.
CONNECT = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], 9), timeout=1)
except ConnectionRefusedError:
    print("reached")
except OSError:
    print("lost")
"""

LISTENS = """
import sys, zmq
socket = zmq.Context().socket(zmq.ROUTER)
socket.bind(f"tcp://{sys.argv[1]}")
while True:
    socket.recv_multipart()
    print("heard", flush=True)
"""
SPEAKS = """
import sys, time
from hawk_connector.address import Address
from hawk_connector.transport.side_channel import SideChannelClient
client = SideChannelClient()
peer = client.connect(Address.parse(sys.argv[1]))
while True:
    client.send(peer, b"hello")
    time.sleep(0.1)
"""


@pytest.fixture
def network() -> Iterator[Network]:
    network = Network(2, "80mbit")
    yield network
    network.close()


def reaches(network: Network, source: int, target: int) -> bool:
    words = [*network.hosts[source - 1].wrapper, sys.executable, "-c", CONNECT, network.address(target)]
    said = subprocess.run(words, check=True, capture_output=True, text=True, timeout=30).stdout.strip()
    assert said in ("reached", "lost")
    return said == "reached"


def test_a_cut_and_each_cable_and_their_mending(network: Network) -> None:
    assert reaches(network, 1, 2) and reaches(network, 2, 1)
    network.cut()
    assert not reaches(network, 1, 2) and not reaches(network, 2, 1)
    network.mend()
    assert reaches(network, 1, 2)
    for number in (1, 2):
        network.unplug(number)
        assert not reaches(network, 1, 2)
        network.plug(number)
        assert reaches(network, 1, 2)


def connections(network: Network, host: int) -> dict[str, str]:
    """State of each TCP connection of a host by its local end, as its kernel tells."""
    words = [*network.hosts[host - 1].wrapper, "ss", "-Htn", "state", "connected"]
    rows = subprocess.run(words, check=True, capture_output=True, text=True, timeout=30).stdout.splitlines()
    return {local: state for state, _, _, local, *_ in map(str.split, rows)}


def test_the_side_channel_does_not_wait_for_tcp_after_a_cut(network: Network) -> None:
    """A cut connection is given up within seconds, and so is each try to connect, so that a fresh one is never far.

    Left to itself the kernel repeats what is not acknowledged for 15 minutes and a try to connect for 2, with pauses
    that double (tcp(7): tcp_retries2, tcp_syn_retries): the three that are seen here in seconds need them.
    """
    at = f"{network.address(1)}:9000"
    with ExitStack() as stack:
        ends = []
        for host, code in ((1, LISTENS), (2, SPEAKS)):
            words = [*network.hosts[host - 1].wrapper, sys.executable, "-c", code, at]
            end = stack.enter_context(subprocess.Popen(words, stdout=subprocess.PIPE))
            stack.callback(end.kill)
            ends.append(end)
        heard = ends[0].stdout
        assert heard is not None and heard.readline() == b"heard\n"
        (first,) = (local for local, state in connections(network, 2).items() if state == "ESTAB")
        network.cut()
        eventually(lambda: connections(network, 2).get(first) != "ESTAB", "the cut connection is given up", 30)
        tried: set[str] = set()

        def tries() -> int:
            tried.update(local for local, state in connections(network, 2).items() if state == "SYN-SENT")
            return len(tried)

        eventually(lambda: tries() >= 3, "it is tried anew", 40)
        network.mend()
        eventually(lambda: "ESTAB" in connections(network, 2).values(), "it is connected again", 40)


def test_a_full_disk_takes_nothing_until_it_is_freed() -> None:
    disk = SmallDisk(256)
    try:
        with (disk.directory / "log").open("ab", buffering=0) as log:
            disk.fill()
            with pytest.raises(OSError, match="No space left"):
                log.write(b"a line")
            disk.free()
            assert log.write(b"a line") == 6
    finally:
        disk.close()
