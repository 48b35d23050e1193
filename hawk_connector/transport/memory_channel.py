"""Control channels inside one process, under a simulated clock, that lose, repeat, reorder and delay.

Everything random comes from the given generator and all time from the given clock, so that a run is repeated
exactly by its seed. Nothing is ever delivered before its time, and nothing moves unless the clock does.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass

from ..address import Address
from .channel import Received, checked_size

__all__ = ["MemoryClient", "MemoryNetwork", "MemoryServer", "NetworkFaults"]


@dataclass(frozen=True, slots=True)
class NetworkFaults:
    """Chances are per message, in 0..1; delays are in the clock's seconds.

    A message takes ``delay_min_s`` .. ``delay_max_s`` (uniform), so delays alone reorder. With chance
    ``reorder`` it takes another ``delay_max_s`` on top; with chance ``duplicate`` it comes a second time,
    with a delay of its own; with chance ``drop`` it never comes.
    """

    drop: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0
    delay_min_s: float = 0.0
    delay_max_s: float = 0.0


class MemoryNetwork:
    """All messages under way. A connection is one client's to one serving life of an address."""

    def __init__(self, clock: Callable[[], float], rng: random.Random, faults: NetworkFaults | None = None) -> None:
        self.faults = faults if faults is not None else NetworkFaults()
        self.dropped = 0
        self.duplicated = 0
        self._clock = clock
        self._rng = rng
        self._servers: dict[str, MemoryServer] = {}
        self._cut: set[str] = set()
        # (due, order of sending, receiving end, peer as that end names it, payload)
        self._flying: list[tuple[float, int, _End, str, bytes]] = []
        self._sent = 0
        self._connections = 0

    def server(self, address: Address) -> MemoryServer:
        """Serve ``address``. A second server there takes over, as a restarted process does."""
        previous = self._servers.get(str(address))
        if previous is not None:
            previous.close()
        server = MemoryServer(self, address)
        self._servers[str(address)] = server
        return server

    def client(self) -> MemoryClient:
        return MemoryClient(self)

    def cut(self, address: Address) -> None:
        """Lose everything to and from ``address``, also what is under way, until :meth:`mend`."""
        self._cut.add(str(address))

    def mend(self, address: Address) -> None:
        self._cut.discard(str(address))

    def next_due(self) -> float | None:
        """When the next message under way arrives: the time to move the clock to. None when all is quiet."""
        return self._flying[0][0] if self._flying else None

    def _server_at(self, name: str) -> MemoryServer | None:
        return self._servers.get(name)

    def _new_connection(self) -> str:
        self._connections += 1
        return f"{self._connections:08x}"

    def _leave(self, server: MemoryServer) -> None:
        if self._servers.get(str(server.address)) is server:
            del self._servers[str(server.address)]

    def _post(self, end: _End, peer: str, payload: bytes) -> None:
        faults, rng = self.faults, self._rng
        # Every draw is made whatever comes of it, so that one chance can be changed and the rest stays.
        lost, twice = rng.random() < faults.drop, rng.random() < faults.duplicate
        times = [self._arrival(), self._arrival()]
        if lost:
            self.dropped += 1
            return
        if twice:
            self.duplicated += 1
        for due in times if twice else times[:1]:
            self._sent += 1
            heapq.heappush(self._flying, (due, self._sent, end, peer, payload))

    def _arrival(self) -> float:
        faults, rng = self.faults, self._rng
        delay = rng.uniform(faults.delay_min_s, faults.delay_max_s)
        held_back = rng.random() < faults.reorder
        return self._clock() + delay + (faults.delay_max_s if held_back else 0.0)

    def _deliver(self) -> None:
        """Move what is due into its receiver's inbox."""
        now = self._clock()
        while self._flying and self._flying[0][0] <= now:
            _due, _order, end, peer, payload = heapq.heappop(self._flying)
            if end.passes_through(peer) in self._cut or not end.accepts(peer):
                self.dropped += 1
            else:
                end.inbox.append(Received(peer, payload))


class _End:
    """What both ends share: an inbox."""

    def __init__(self, network: MemoryNetwork) -> None:
        self._network = network
        self.inbox: list[Received] = []

    def receive(self) -> Received | None:
        self._network._deliver()
        return self.inbox.pop(0) if self.inbox else None

    def passes_through(self, peer: str) -> str:
        """The serving address of the connection with ``peer``."""
        raise NotImplementedError

    def accepts(self, peer: str) -> bool:
        """Whether the connection that a message came on is still there."""
        raise NotImplementedError


class MemoryServer(_End):
    """The serving end; see SideChannelServer."""

    def __init__(self, network: MemoryNetwork, address: Address) -> None:
        super().__init__(network)
        self.address = address
        self._clients: dict[str, MemoryClient] = {}
        self._open = True

    def send(self, peer: str, payload: bytes) -> bool:
        client = self._clients.get(peer)
        if not self._open or client is None or not client.accepts_connection(str(self.address), peer):
            return False
        self._network._post(client, str(self.address), checked_size(payload))
        return True

    def close(self) -> None:
        self._open = False
        self.inbox.clear()
        self._network._leave(self)

    def passes_through(self, peer: str) -> str:
        return str(self.address)

    def accepts(self, peer: str) -> bool:
        return self._open

    def admit(self, connection: str, client: MemoryClient) -> None:
        self._clients[connection] = client


class MemoryClient(_End):
    """The connecting end; see SideChannelClient. Reconnects by itself to whoever serves the address."""

    def __init__(self, network: MemoryNetwork) -> None:
        super().__init__(network)
        self._connections: dict[str, tuple[MemoryServer | None, str]] = {}

    def connect(self, address: Address) -> str:
        name = str(address)
        self._connections.setdefault(name, (None, ""))
        return name

    def disconnect(self, peer: str) -> None:
        self._connections.pop(peer, None)

    def send(self, peer: str, payload: bytes) -> bool:
        checked_size(payload)
        if peer not in self._connections:
            return False
        server, connection = self._connections[peer]
        serving = self._network._server_at(peer)
        if serving is None:
            # As over a socket: the message waits in a queue that may never be read.
            self._network.dropped += 1
            return True
        if serving is not server:
            connection = self._network._new_connection()
            serving.admit(connection, self)
            self._connections[peer] = (serving, connection)
        self._network._post(serving, connection, payload)
        return True

    def close(self) -> None:
        self._connections.clear()
        self.inbox.clear()

    def passes_through(self, peer: str) -> str:
        return peer

    def accepts(self, peer: str) -> bool:
        return peer in self._connections

    def accepts_connection(self, peer: str, connection: str) -> bool:
        """Whether ``connection`` is the present one to ``peer``."""
        return self._connections.get(peer, (None, ""))[1] == connection
