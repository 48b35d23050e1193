"""The tools of the chaos run do what they say: a cut network is cut, a full disk is full, and both can be mended."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.chaos.network import MISSING, Network, SmallDisk

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
