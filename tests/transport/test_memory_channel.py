"""The simulated channel: exact under a seed, never early, and every fault counted."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from hawk_connector.address import Address
from hawk_connector.errors import LocalError
from hawk_connector.transport.channel import MAX_MESSAGE_BYTES, Received
from hawk_connector.transport.memory_channel import MemoryClient, MemoryNetwork, MemoryServer, NetworkFaults

HOME = Address("prefill-0", 1)


class Time:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def network(seed: int = 1, **faults: float) -> tuple[Time, MemoryNetwork, MemoryServer, MemoryClient]:
    clock = Time()
    net = MemoryNetwork(clock, random.Random(seed), NetworkFaults(**faults))
    server, client = net.server(HOME), net.client()
    client.connect(HOME)
    return clock, net, server, client


def everything(end: MemoryServer | MemoryClient) -> list[bytes]:
    got = []
    while (message := end.receive()) is not None:
        got.append(message.payload)
    return got


def test_there_and_back_in_order() -> None:
    _, _, server, client = network()
    for number in range(5):
        assert client.send(str(HOME), b"%d" % number)
    message = server.receive()
    assert message is not None
    assert everything(server) == [b"1", b"2", b"3", b"4"]
    assert server.send(message.peer, b"yes")
    assert client.receive() == Received(str(HOME), b"yes")


def test_nothing_comes_before_its_time() -> None:
    clock, net, server, client = network(delay_min_s=2.0, delay_max_s=2.0)
    client.send(str(HOME), b"x")
    assert net.next_due() == 102.0
    clock.now = 101.999
    assert server.receive() is None
    clock.now = 102.0
    assert everything(server) == [b"x"]
    assert net.next_due() is None


def test_faults_are_as_many_as_the_chances_say_and_equal_for_equal_seeds() -> None:
    def outcome(seed: int) -> tuple[list[bytes], int, int]:
        clock, net, server, client = network(
            seed, drop=0.2, duplicate=0.1, reorder=0.1, delay_min_s=0.1, delay_max_s=0.5
        )
        for number in range(2000):
            client.send(str(HOME), b"%d" % number)
        clock.now += 10
        return everything(server), net.dropped, net.duplicated

    got, dropped, duplicated = outcome(7)
    assert outcome(7) == (got, dropped, duplicated)
    assert outcome(8)[0] != got
    assert len(got) == 2000 - dropped + duplicated
    assert len(set(got)) == 2000 - dropped
    assert Counter(Counter(got).values()) == {1: 2000 - dropped - duplicated, 2: duplicated}
    assert abs(dropped - 400) < 80
    assert abs(duplicated - 160) < 50
    assert got != sorted(got, key=int)


def test_a_cut_loses_what_is_under_way_and_a_mend_lets_new_messages_through() -> None:
    clock, net, server, client = network(delay_min_s=1.0, delay_max_s=1.0)
    client.send(str(HOME), b"under way")
    net.cut(HOME)
    clock.now += 1
    assert server.receive() is None
    net.mend(HOME)
    client.send(str(HOME), b"new")
    clock.now += 1
    assert everything(server) == [b"new"]
    assert net.dropped == 1


def test_a_restarted_server_is_another_end() -> None:
    clock, net, old, client = network(delay_min_s=1.0, delay_max_s=1.0)
    client.send(str(HOME), b"to the old life")
    clock.now += 1
    first = old.receive()
    assert first is not None
    client.send(str(HOME), b"lost with it")
    new = net.server(HOME)
    clock.now += 1
    assert new.receive() is None
    assert old.receive() is None
    assert not old.send(first.peer, b"?")
    assert not new.send(first.peer, b"?")
    client.send(str(HOME), b"to the new life")
    clock.now += 1
    again = new.receive()
    assert again is not None
    assert again.payload == b"to the new life"
    assert again.peer != first.peer
    assert new.send(again.peer, b"yes")


def test_a_client_that_went_gets_nothing() -> None:
    _, _, server, client = network()
    client.send(str(HOME), b"?")
    message = server.receive()
    assert message is not None
    client.disconnect(str(HOME))
    assert not server.send(message.peer, b"!")
    assert not client.send(str(HOME), b"?")


def test_sizes_are_bounded_as_over_sockets() -> None:
    _, _, _, client = network()
    with pytest.raises(LocalError, match="too large"):
        client.send(str(HOME), bytes(MAX_MESSAGE_BYTES + 1))
