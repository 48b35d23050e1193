"""The side channel over real sockets on loopback, with and without keys."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
import zmq
from zmq.utils.monitor import parse_monitor_message

from hawk_connector.address import Address
from hawk_connector.errors import ConfigError, LocalError
from hawk_connector.transport.channel import MAX_MESSAGE_BYTES, MAX_REQUEST_BYTES, Received, Wake
from hawk_connector.transport.curve import CurveKeys, load_curve_keys, write_key_pair
from hawk_connector.transport.side_channel import SideChannelClient, SideChannelServer, wait
from tests.transport.waiting import eventually

End = SideChannelServer | SideChannelClient


@pytest.fixture
def server() -> Iterator[SideChannelServer]:
    with closing(SideChannelServer("127.0.0.1", 0)) as server:
        yield server


@pytest.fixture
def client() -> Iterator[SideChannelClient]:
    with closing(SideChannelClient()) as client:
        yield client


def next_of(end: End, *others: End) -> Received:
    """The next message at ``end``, while the others' loops turn too."""
    got: list[Received] = []

    def turn() -> bool:
        for other in others:
            assert other.receive() is None
        message = end.receive()
        if message is not None:
            got.append(message)
        return bool(got)

    eventually(turn, "a message comes")
    return got[0]


def raw_dealer(context: zmq.Context[zmq.Socket[bytes]], address: Address) -> zmq.Socket[bytes]:
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.LINGER, 0)
    dealer.connect(f"tcp://{address}")
    return dealer


def test_there_and_back(server: SideChannelServer, client: SideChannelClient) -> None:
    peer = client.connect(server.address)
    assert client.send(peer, b"hello")
    message = next_of(server)
    assert message.payload == b"hello"
    assert server.send(message.peer, b"welcome")
    assert next_of(client) == Received(peer, b"welcome")
    assert client.receive() is None
    assert server.receive() is None


def test_two_clients_are_two_peers(server: SideChannelServer, client: SideChannelClient) -> None:
    with closing(SideChannelClient()) as second:
        client.send(client.connect(server.address), b"1")
        second.send(second.connect(server.address), b"2")
        names = {message.payload: message.peer for message in (next_of(server), next_of(server))}
        assert server.send(names[b"2"], b"for the second")
        assert server.send(names[b"1"], b"for the first")
        assert next_of(client).payload == b"for the first"
        assert next_of(second).payload == b"for the second"


def test_one_client_talks_to_several_servers_and_serves_each_in_turn(client: SideChannelClient) -> None:
    with closing(SideChannelServer("127.0.0.1", 0)) as one, closing(SideChannelServer("127.0.0.1", 0)) as two:
        for each in (one, two):
            client.send(client.connect(each.address), b"?")
            message = next_of(each)
            for number in range(20):
                assert each.send(message.peer, b"%d" % number)
        received = [next_of(client) for _ in range(40)]
        for each in (one, two):
            mine = [int(message.payload) for message in received if message.peer == str(each.address)]
            assert mine == list(range(20))


def test_ipv6() -> None:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        pytest.skip("this machine has no IPv6 loopback")
    with closing(SideChannelServer("::1", 0)) as server, closing(SideChannelClient()) as client:
        assert str(server.address).startswith("[::1]:")
        client.send(client.connect(server.address), b"six")
        assert next_of(server).payload == b"six"


def test_what_is_sent_before_the_peer_is_there_waits_for_it(client: SideChannelClient) -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
    assert client.send(client.connect(Address("127.0.0.1", port)), b"early")
    with closing(SideChannelServer("127.0.0.1", port)) as server:
        assert next_of(server).payload == b"early"


def test_sending_to_nobody_says_so(server: SideChannelServer, client: SideChannelClient) -> None:
    assert not server.send("0011223344", b"?")
    assert not client.send("127.0.0.1:1", b"?")
    assert (server.counts.unsent, client.counts.unsent) == (1, 1)


def test_a_full_queue_says_so_and_does_not_wait(client: SideChannelClient) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # takes no connection: it does not listen
        peer = client.connect(Address("127.0.0.1", silent.getsockname()[1]))
        taken = 0
        while client.send(peer, b"x"):
            taken += 1
            assert taken <= 100_000
    assert taken == 1024
    assert client.counts.unsent == 1


def test_a_client_that_went_is_unreachable(server: SideChannelServer) -> None:
    with closing(SideChannelClient()) as passing:
        passing.send(passing.connect(server.address), b"?")
        gone = next_of(server).peer
    eventually(lambda: not server.send(gone, b"!"), "the server notices")


def test_oversize_messages_are_refused_by_the_sender(server: SideChannelServer, client: SideChannelClient) -> None:
    peer = client.connect(server.address)
    assert client.send(peer, bytes(MAX_REQUEST_BYTES))
    message = next_of(server)
    assert len(message.payload) == MAX_REQUEST_BYTES
    assert server.send(message.peer, bytes(MAX_MESSAGE_BYTES))
    assert len(next_of(client).payload) == MAX_MESSAGE_BYTES
    for end, name in ((client, peer), (server, message.peer)):
        with pytest.raises(LocalError, match="1048576"):
            end.send(name, bytes(MAX_MESSAGE_BYTES + 1))


def test_oversize_and_malformed_messages_are_dropped_and_counted(server: SideChannelServer) -> None:
    with zmq.Context() as context, raw_dealer(context, server.address) as hostile:
        hostile.send(bytes(MAX_REQUEST_BYTES + 1))
        hostile.send_multipart([b"two", b"frames"])
        hostile.send(b"good")
        assert next_of(server).payload == b"good"
    assert (server.counts.oversize, server.counts.malformed) == (1, 1)


def test_what_is_far_too_large_costs_only_its_own_connection(
    server: SideChannelServer, client: SideChannelClient
) -> None:
    with zmq.Context() as context, raw_dealer(context, server.address) as hostile:
        hostile.send(b"first")
        name = next_of(server).peer
        hostile.send(bytes(3 * MAX_REQUEST_BYTES))
        eventually(lambda: not server.send(name, b"?"), "its connection is closed")
    client.send(client.connect(server.address), b"unharmed")
    assert next_of(server).payload == b"unharmed"
    assert server.counts.oversize == 0


def test_a_port_in_use_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"127\.0\.0\.1:{port}.*in use.*side_channel_port"):
            SideChannelServer("127.0.0.1", port)


def test_hosts_that_cannot_be_had_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'0\.0\.0\.0' with no keys.*hawk keys FILE"):
        SideChannelServer("0.0.0.0", 0)
    keys = make_keys(tmp_path, "a")
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1.*side_channel_host"):
        SideChannelServer("192.0.2.1", 0, keys=keys)  # TEST-NET-1: nobody's address
    with pytest.raises(ConfigError, match=r"'no\.such\.host\.invalid' cannot be resolved"):
        SideChannelServer("no.such.host.invalid", 0, keys=keys)


def test_another_thread_ends_a_wait(server: SideChannelServer) -> None:
    wake = Wake()
    waiter = threading.Thread(target=wait, args=([server], wake, 60.0))
    waiter.start()
    wake.set()
    waiter.join(20)
    assert not waiter.is_alive()
    assert not wait([server], wake, 0.01)
    wake.set()
    wake.set()
    assert wait([server], wake, 60.0)
    assert not wait([server], wake, 0.0)
    wake.close()


def test_a_message_ends_a_wait(server: SideChannelServer, client: SideChannelClient) -> None:
    client.send(client.connect(server.address), b"!")
    assert wait([server, client], None, 20.0)
    assert next_of(server).payload == b"!"


# --- CURVE -----------------------------------------------------------------------------------------------


def make_keys(folder: Path, name: str, known: str = "") -> CurveKeys:
    """A side's own files in ``folder``; ``known`` is the text of its known keys file."""
    (folder / f"{name}.known").write_text(known)
    write_key_pair(folder / f"{name}.key")
    keys = load_curve_keys(str(folder / f"{name}.key"), str(folder / f"{name}.known"))
    assert keys is not None
    return keys


def line(name: str, keys: CurveKeys) -> str:
    return f"{name} {keys.public.decode()}\n"


@pytest.fixture
def locked(tmp_path: Path) -> Iterator[tuple[SideChannelServer, CurveKeys, Callable[[str, str], CurveKeys]]]:
    """A server that knows "friend", the friend's keys, and a maker of further keys."""
    friend = make_keys(tmp_path, "friend")
    own = make_keys(tmp_path, "server", line("friend", friend))
    (tmp_path / "friend.known").write_text(line("127.0.0.1", own))
    with closing(SideChannelServer("127.0.0.1", 0, keys=own)) as server:
        yield (
            server,
            friend,
            lambda name, key_of: make_keys(tmp_path, name, f"{key_of} {own.public.decode()}\n"),
        )


def test_known_keys_talk(locked: tuple[SideChannelServer, CurveKeys, object]) -> None:
    server, friend, _ = locked
    with closing(SideChannelClient(keys=friend)) as client:
        peer = client.connect(server.address)
        client.send(peer, b"hello")
        message = next_of(server)
        assert message.payload == b"hello"
        assert server.send(message.peer, b"welcome")
        assert next_of(client, server) == Received(peer, b"welcome")
    assert server.counts.refused_keys == 0


def test_an_unknown_key_gets_nothing(
    locked: tuple[SideChannelServer, CurveKeys, Callable[[str, str], CurveKeys]],
) -> None:
    server, friend, make = locked
    stranger = make("stranger", "127.0.0.1")
    with (
        closing(SideChannelClient(keys=stranger)) as intruder,
        closing(SideChannelClient(keys=friend)) as client,
    ):
        peer = intruder.connect(server.address)
        monitor = intruder.sockets()[0].get_monitor_socket(
            zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_SUCCEEDED
        )
        intruder.send(peer, b"let me in")

        def refused() -> bool:
            assert server.receive() is None
            return server.counts.refused_keys > 0

        eventually(refused, "the stranger is refused")
        # At the gate already: it never gets as far as a connection on which it could speak.
        assert monitor.poll(20_000)
        assert parse_monitor_message(monitor.recv_multipart())["event"] == zmq.EVENT_HANDSHAKE_FAILED_AUTH
        monitor.close()
        client.send(client.connect(server.address), b"hello")
        assert next_of(server, intruder).payload == b"hello"
        assert server.receive() is None


def test_a_client_without_keys_gets_nothing(locked: tuple[SideChannelServer, CurveKeys, object]) -> None:
    server, friend, _ = locked
    with closing(SideChannelClient()) as plain, closing(SideChannelClient(keys=friend)) as client:
        plain.send(plain.connect(server.address), b"let me in")
        client.send(client.connect(server.address), b"hello")
        assert next_of(server, plain).payload == b"hello"
        assert server.receive() is None


def test_a_server_with_another_key_gets_nothing(tmp_path: Path) -> None:
    expected = make_keys(tmp_path, "expected")
    client_keys = make_keys(tmp_path, "client", line("127.0.0.1", expected))
    impostor = make_keys(tmp_path, "impostor", line("client", client_keys))
    with (
        closing(SideChannelServer("127.0.0.1", 0, keys=impostor)) as server,
        closing(SideChannelClient(keys=client_keys)) as client,
    ):
        peer = client.connect(server.address)
        monitor = client.sockets()[0].get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED)
        client.send(peer, b"secret")

        def turned_away() -> bool:
            assert server.receive() is None
            return bool(monitor.poll(0))

        eventually(turned_away, "the hand-shake fails")
        assert server.receive() is None
        monitor.close()


def test_a_key_that_is_added_later_is_let_in(tmp_path: Path) -> None:
    friend = make_keys(tmp_path, "friend")
    own = make_keys(tmp_path, "server")
    (tmp_path / "friend.known").write_text(line("127.0.0.1", own))
    with closing(SideChannelServer("127.0.0.1", 0, keys=own)) as server:
        with closing(SideChannelClient(keys=friend)) as client:
            client.send(client.connect(server.address), b"early")

            def refused() -> bool:
                assert server.receive() is None
                return server.counts.refused_keys > 0

            eventually(refused, "the key is not known yet")
        (tmp_path / "server.known").write_text(line("friend", friend))
        with closing(SideChannelClient(keys=friend)) as client:
            client.send(client.connect(server.address), b"hello")
            assert next_of(server).payload == b"hello"


def test_a_server_whose_key_is_not_known_is_named(tmp_path: Path) -> None:
    keys = make_keys(tmp_path, "a")
    with (
        closing(SideChannelClient(keys=keys)) as client,
        pytest.raises(ConfigError, match=r"'127\.0\.0\.1:18550 KEY'.*a\.known"),
    ):
        client.connect(Address("127.0.0.1", 18550))
