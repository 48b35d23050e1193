"""The side channel over ZMQ: a ROUTER that serves, and one DEALER for each peer that is connected to.

Each object belongs to **one** thread, which polls: :func:`wait` until something is readable, then ``receive``
until None. Nothing else here blocks. With CURVE keys every peer is checked against the known keys, in the
same loop (no authenticator thread), when it connects and again with each message: a key that is taken from the list
has no more say from then on.

A serving end bounds what its peers can cost: connections, bytes of a message, messages that wait, messages a second.
"""

from __future__ import annotations

import errno
import socket
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import zmq
from zmq.utils import z85

from ..address import Address, bracketed, is_loopback
from ..errors import ConfigError
from ..rate import RateBook
from .channel import MAX_MESSAGE_BYTES, MAX_REQUEST_BYTES, Received, Wake, checked_size
from .curve import CurveKeys
from .door import Door

__all__ = [
    "MAX_MESSAGE_BYTES",
    "MAX_REQUEST_BYTES",
    "ChannelCounts",
    "Received",
    "SideChannelClient",
    "SideChannelServer",
    "Wake",
    "wait",
]

# Messages that wait for one peer. Past it they are dropped, and sent again by the protocol.
_QUEUE_LENGTH = 1024
# Messages of one peer that wait here to be looked at; past it the peer's TCP has to wait.
_INBOX_LENGTH = 32
# Connections that ZMQ has not yet accepted.
_BACKLOG = 128
# Dropped messages that are looked at before the loop's other work has its turn.
_DROPS_A_TURN = 256
_ZAP_DOMAIN = b"hawk"


@dataclass(slots=True)
class ChannelCounts:
    """What a channel has dropped since its start: messages, and connections past ``max_connections``."""

    oversize: int = 0
    malformed: int = 0
    refused_keys: int = 0
    rate: int = 0
    unsent: int = 0
    connections: int = 0


class SideChannelServer:
    """The serving end. Peers are named by the connection they came on."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        keys: CurveKeys | None = None,
        max_connections: int = 256,
        max_messages_per_s: float = 2000.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Listens at once; port 0 takes a free one (see ``address``). Past ``max_connections`` a new one is closed;
        past ``max_messages_per_s`` from one connection (after a burst of twice as many) messages are dropped.

        Raises ConfigError when the address cannot be had, or is not loopback and ``keys`` is None.
        """
        # Of a name it is what it stands for that counts: "localhost" is what this machine's hosts file says.
        numeric = _numeric_host(host) if keys is not None or is_loopback(host) else host
        if keys is None and not is_loopback(numeric):
            raise ConfigError(
                f"the side channel would listen on {host!r} with no keys",
                expected="a loopback address, or CURVE keys",
                fix="Make a key pair with `hawk keys FILE`, and set curve_key_file and curve_known_keys_file.",
            )
        self.counts = ChannelCounts()
        self._rates = RateBook(max_messages_per_s, 2 * max_messages_per_s, 2 * max_connections, clock)
        # The key that each connection proved, for what is sent to it.
        self._key_of: OrderedDict[str, str] = OrderedDict()
        self._remembered = 4 * max_connections
        self._keys = keys
        self._context = zmq.Context(io_threads=1)
        self._gate: zmq.Socket[bytes] | None = None
        if keys is not None:
            # Before the ROUTER listens: with no one to ask, ZMQ would let every key in.
            self._gate = self._context.socket(zmq.REP)
            self._gate.bind("inproc://zeromq.zap.01")
        self._socket = _configured(self._context.socket(zmq.ROUTER), MAX_REQUEST_BYTES)
        self._socket.setsockopt(zmq.BACKLOG, _BACKLOG)
        self._door = Door(self._socket, max_connections)
        # Without it a message to a peer that has gone, or whose queue is full, vanishes unsaid.
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        if keys is not None:
            self._socket.curve_server = True
            self._socket.curve_publickey = keys.public
            self._socket.curve_secretkey = keys.secret
            self._socket.zap_domain = _ZAP_DOMAIN
        try:
            self._socket.bind(f"tcp://{bracketed(numeric)}:{port or '*'}")
        except zmq.ZMQError as error:
            self.close()
            raise _bind_error(host, port, error) from None
        endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._address = Address(host, Address.parse(endpoint.removeprefix("tcp://")).port)
        self._door.opened(self._address.port)

    @property
    def address(self) -> Address:
        """Where this end listens: the host as given, the port as it came out."""
        return self._address

    def sockets(self) -> list[zmq.Socket[bytes]]:
        """What to poll for reading."""
        return [self._socket, self._door.events, *([self._gate] if self._gate is not None else [])]

    @property
    def connections(self) -> int:
        """Connections that are open, those in their hand-shake included."""
        return self._door.connections

    def key_of(self, peer: str) -> str | None:
        """The public key (Z85) that ``peer`` has proved with its last message; None on a channel without keys."""
        return self._key_of.get(peer)

    def may_command(self, peer: str) -> bool:
        """Whether ``peer`` may tell this side what to do: it has proved this side's own key pair with its last message,
        or the channel has no keys and is therefore loopback's."""
        return self._keys is None or self._key_of.get(peer, "").encode() == self._keys.public

    def receive(self) -> Received | None:
        self._answer_gate()
        self.counts.connections += self._door.turn()
        for _ in range(_DROPS_A_TURN):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return None
            peer = frames[0].bytes.hex()
            if not self._rates.allows(peer):
                self.counts.rate += 1
            elif len(frames) != 2:
                self.counts.malformed += 1
            elif len(frames[1]) > MAX_REQUEST_BYTES:
                self.counts.oversize += 1
            elif not self._may_speak(peer, key := self._key_on(frames[1])):
                self.counts.refused_keys += 1
            else:
                return Received(peer, frames[1].bytes, key)
        return None

    def send(self, peer: str, payload: bytes) -> bool:
        if self._keys is not None and not self._keys.admits(self._key_of.get(peer, "").encode()):
            self.counts.refused_keys += 1
            return False
        frames = [bytes.fromhex(peer), checked_size(payload)]
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.ZMQError as error:
            # EHOSTUNREACH: that connection is gone; EAGAIN: its queue is full.
            if error.errno not in (zmq.EAGAIN, errno.EHOSTUNREACH):
                raise
            self.counts.unsent += 1
            return False
        return True

    def close(self) -> None:
        """Stop listening and drop what was not sent. Repeatable."""
        self._context.destroy(linger=0)

    def _key_on(self, frame: zmq.Frame) -> str | None:
        """The key that ZMQ's hand-shake has checked for the connection that ``frame`` came on."""
        return str(frame.get("User-Id")) if self._keys is not None else None

    def _may_speak(self, peer: str, key: str | None) -> bool:
        """Whether the key is (still) listed; keys are asked for at the gate only when a connection begins."""
        if self._keys is None or key is None:
            return self._keys is None
        if not self._keys.admits(key.encode()):
            self._key_of.pop(peer, None)
            return False
        self._key_of[peer] = key
        self._key_of.move_to_end(peer)
        if len(self._key_of) > self._remembered:
            self._key_of.popitem(last=False)
        return True

    def _answer_gate(self) -> None:
        """Answer ZMQ's questions about connecting peers (ZAP, RFC 27)."""
        while self._gate is not None and self._keys is not None:
            try:
                version, question, domain, _ip, _identity, mechanism, *credentials = self._gate.recv_multipart(
                    zmq.NOBLOCK
                )
            except zmq.Again:
                return
            key = z85.encode(credentials[0]) if mechanism == b"CURVE" and len(credentials) == 1 else b""
            welcome = domain == _ZAP_DOMAIN and self._keys.admits(key)
            if not welcome:
                self.counts.refused_keys += 1
            verdict = [b"200", b"OK", key] if welcome else [b"400", b"unknown key", b""]
            self._gate.send_multipart([version, question, *verdict, b""])


class SideChannelClient:
    """The connecting end: peers are named by their address ("host:port")."""

    def __init__(self, *, keys: CurveKeys | None = None) -> None:
        self.counts = ChannelCounts()
        self._keys = keys
        self._context = zmq.Context(io_threads=1)
        self._sockets: dict[str, zmq.Socket[bytes]] = {}
        self._next = 0

    def connect(self, address: Address) -> str:
        """Begin to connect, and return the peer's name.

        ZMQ tries until the peer is there, with growing pauses; messages wait in the queue meanwhile. A host
        name may wait for the resolver, a numeric address never does. Repeatable.

        Raises ConfigError when the host cannot be resolved, or keys are in use and none is known for
        ``address``.
        """
        name = str(address)
        if name not in self._sockets:
            host = _numeric_host(address.host)
            server_key = self._keys.key_of(address) if self._keys is not None else None
            connection = _configured(self._context.socket(zmq.DEALER), MAX_MESSAGE_BYTES)
            if self._keys is not None and server_key is not None:
                connection.curve_publickey = self._keys.public
                connection.curve_secretkey = self._keys.secret
                connection.curve_serverkey = server_key
            connection.connect(f"tcp://{bracketed(host)}:{address.port}")
            self._sockets[name] = connection
        return name

    def disconnect(self, peer: str) -> None:
        """Drop the connection and everything that waits on it."""
        connection = self._sockets.pop(peer, None)
        if connection is not None:
            connection.close(linger=0)

    def sockets(self) -> list[zmq.Socket[bytes]]:
        """What to poll for reading; changes with connect and disconnect."""
        return list(self._sockets.values())

    def receive(self) -> Received | None:
        # Starts behind the peer that was served last, so that one that talks without end starves nobody.
        names = list(self._sockets)
        for turn in range(len(names)):
            name = names[(self._next + turn) % len(names)]
            payload = self._receive_from(name)
            if payload is not None:
                self._next = (self._next + turn + 1) % len(names)
                return Received(name, payload)
        return None

    def send(self, peer: str, payload: bytes) -> bool:
        connection = self._sockets.get(peer)
        try:
            checked_size(payload)
            if connection is not None:
                connection.send(payload, zmq.NOBLOCK)
                return True
        except zmq.Again:
            pass
        self.counts.unsent += 1
        return False

    def close(self) -> None:
        """Drop every connection and what was not sent. Repeatable."""
        self._sockets.clear()
        self._context.destroy(linger=0)

    def _receive_from(self, name: str) -> bytes | None:
        while True:
            try:
                frames = self._sockets[name].recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return None
            if len(frames) != 1:
                self.counts.malformed += 1
            elif len(frames[0]) > MAX_MESSAGE_BYTES:
                self.counts.oversize += 1
            else:
                return frames[0]


def wait(channels: Iterable[SideChannelServer | SideChannelClient], wake: Wake | None, timeout_s: float) -> bool:
    """Wait until one of ``channels`` may have something, ``wake`` is set, or ``timeout_s`` is over.

    Clears ``wake``. Returns False when the time was over.
    """
    poller = zmq.Poller()
    for channel in channels:
        for each in channel.sockets():
            poller.register(each, zmq.POLLIN)
    if wake is not None:
        poller.register(wake.fileno(), zmq.POLLIN)
    # Rounded up: rounding down would turn the last part of a millisecond into a busy loop.
    events = poller.poll(max(0, -int(-timeout_s * 1000 // 1)))
    if wake is not None:
        wake.clear()
    return bool(events)


def _configured(connection: zmq.Socket[bytes], largest: int) -> zmq.Socket[bytes]:
    """What both ends share; set before bind or connect. ``largest``: bytes of a message that this end takes."""
    for option, value in (
        (zmq.LINGER, 0),
        (zmq.SNDHWM, _QUEUE_LENGTH),
        (zmq.RCVHWM, _INBOX_LENGTH),
        # Frames up to twice the limit are read, counted and dropped; beyond it ZMQ closes the connection unread.
        (zmq.MAXMSGSIZE, 2 * largest),
        (zmq.IPV6, 1),
        # A peer that comes back is to be met within seconds. TCP alone doubles its pauses, so that after a cut it stays
        # silent for about as long again: a connection is given up and made anew instead, and so is a try to connect.
        (zmq.RECONNECT_IVL, 100),
        (zmq.RECONNECT_IVL_MAX, 1000),
        (zmq.CONNECT_TIMEOUT, 2000),
        (zmq.TCP_MAXRT, 4000),
        (zmq.HANDSHAKE_IVL, 5000),
        # Liveness is the protocol's (leases, deadlines). This only frees what a vanished host leaves open.
        (zmq.TCP_KEEPALIVE, 1),
        (zmq.TCP_KEEPALIVE_IDLE, 60),
        (zmq.TCP_KEEPALIVE_INTVL, 10),
        (zmq.TCP_KEEPALIVE_CNT, 3),
    ):
        connection.setsockopt(option, value)
    return connection


def _numeric_host(host: str) -> str:
    """``host`` as a numeric address: ZMQ does not bind to names, and resolves them anew at each try."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(
            f"side channel host {host!r} cannot be resolved ({error})",
            fix="Use a name that this machine resolves, or a numeric address.",
        ) from None
    return str(found[0][4][0])


def _bind_error(host: str, port: int, error: zmq.ZMQError) -> ConfigError:
    where = f"the side channel cannot listen on {bracketed(host)}:{port}"
    if error.errno == errno.EADDRINUSE:
        return ConfigError(
            f"{where}: the port is in use",
            fix="Set side_channel_port to a free port (0 takes any), or stop what listens there "
            f"(ss -ltnp 'sport = :{port}' shows it).",
        )
    if error.errno == errno.EACCES:
        return ConfigError(f"{where}: not permitted", fix="Set side_channel_port to 1024 or more.")
    if error.errno in (errno.EADDRNOTAVAIL, errno.ENODEV):
        return ConfigError(
            f"{where}: no interface of this machine has that address",
            fix="Set side_channel_host to an address of this machine.",
        )
    return ConfigError(f"{where}: {error.strerror or error}", fix="Check side_channel_host and side_channel_port.")
