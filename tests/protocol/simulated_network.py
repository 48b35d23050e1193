"""The side channel between simulated processes: loses, repeats, reorders, delays; can be cut; queues for the absent."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from hawk_connector.transport.memory_channel import NetworkFaults
from tests.protocol.world import World

Deliver = Callable[[str, bytes], None]

_QUEUE = 32


@dataclass(eq=False)
class Server:
    """One life of a serving address.  ``deliver(identity, payload)``."""

    address: str
    deliver: Deliver
    clients: dict[str, Client] = field(default_factory=dict)
    open: bool = True


@dataclass(eq=False)
class Client:
    """The connecting end of one machine.  ``deliver(address, payload)``."""

    deliver: Deliver
    connections: dict[str, tuple[Server, str]] = field(default_factory=dict)
    waiting: dict[str, list[bytes]] = field(default_factory=dict)  # for addresses that nobody serves now
    open: bool = True


class Network:
    """A connection is one client's to one serving life of an address."""

    def __init__(self, world: World, seed: int, faults: NetworkFaults) -> None:
        self.faults = faults
        self._world = world
        self._rng = random.Random(seed)
        self._servers: dict[str, Server] = {}
        self._clients: list[Client] = []
        self._cut: set[str] = set()
        self._connections = 0

    def serve(self, address: str, deliver: Deliver) -> Server:
        server = Server(address, deliver)
        self._servers[address] = server
        for client in self._clients:
            for payload in client.waiting.pop(address, ()):
                self.send(client, address, payload)
        return server

    def close(self, server: Server) -> None:
        server.open = False
        if self._servers.get(server.address) is server:
            del self._servers[server.address]

    def client(self, deliver: Deliver) -> Client:
        client = Client(deliver)
        self._clients.append(client)
        return client

    def leave(self, client: Client) -> None:
        client.open = False
        self._clients.remove(client)

    def disconnect(self, client: Client, address: str) -> None:
        client.connections.pop(address, None)
        client.waiting.pop(address, None)

    def cut(self, address: str) -> None:
        """Lose everything to and from ``address``, also what is under way, until ``mend``."""
        self._cut.add(address)

    def mend(self, address: str) -> None:
        self._cut.discard(address)

    def send(self, client: Client, address: str, payload: bytes) -> None:
        server = self._servers.get(address)
        if server is None:
            # A DEALER keeps it until somebody listens: perhaps another life than it was meant for.
            queue = client.waiting.setdefault(address, [])
            if len(queue) < _QUEUE:
                queue.append(payload)
            return
        known = client.connections.get(address)
        if known is None or known[0] is not server:
            self._connections += 1
            known = (server, f"{self._connections:08x}")
            client.connections[address] = known
            server.clients[known[1]] = client
        identity = known[1]

        def arrive() -> None:
            if server.open and client.open and address not in self._cut:
                server.deliver(identity, payload)

        self._post(arrive)

    def reply(self, server: Server, identity: str, payload: bytes) -> None:
        client = server.clients.get(identity)
        if client is None:
            return

        def arrive() -> None:
            present = client.connections.get(server.address)
            if client.open and present is not None and present[1] == identity and server.address not in self._cut:
                client.deliver(server.address, payload)

        self._post(arrive)

    def _post(self, arrive: Callable[[], None]) -> None:
        faults, rng, world = self.faults, self._rng, self._world
        if rng.random() < faults.drop:
            world.covered["message lost", ""] += 1
            return
        world.after(self._delay(), arrive)
        if rng.random() < faults.duplicate:
            world.covered["message repeated", ""] += 1
            world.after(self._delay(), arrive)

    def _delay(self) -> float:
        faults, rng = self.faults, self._rng
        delay = faults.delay_min_s + (faults.delay_max_s - faults.delay_min_s) * rng.random()
        if rng.random() < faults.reorder:
            self._world.covered["message held back", ""] += 1
            delay += faults.delay_max_s
        return delay
