"""What the simulated instances share: virtual time, events, the network, ids, and the bytes that KV is made of."""

from __future__ import annotations

import hashlib
import heapq
import random
from collections.abc import Callable
from functools import lru_cache
from typing import Protocol

from hawk_connector.address import Address
from hawk_connector.layout.kv_pool import KVPoolLayout
from hawk_connector.layout.kv_shape import KVShape
from hawk_connector.plan.pairing import DecodeFacts, PrefillFacts, rank_heads
from hawk_connector.protocol.lease import Clock
from hawk_connector.protocol.prefill import PrefillProtocol
from hawk_connector.protocol.prefill_actions import PrefillLimits
from hawk_connector.transport.memory_channel import MemoryClient, MemoryNetwork, MemoryServer, NetworkFaults

BLOCK = 32
BUFFER_ADDRESS = 0x10000
LIMITS = PrefillLimits(
    parcel_tokens=2 * BLOCK,
    lease_s=30.0,
    buffer_wait_s=60.0,
    verdict_keep_s=60.0,
    max_transfers=64,
    max_peers=8,
)


class Violation(AssertionError):
    """An invariant of the protocol does not hold."""


def require(holds: bool, what: str) -> None:
    if not holds:
        raise Violation(what)


def prefill_facts(
    *, heads: int = 2, ranks: int = 1, rank: int = 0, buffer_bytes: int = 1 << 20, model: str = "m"
) -> PrefillFacts:
    return PrefillFacts(KVShape(1, heads, 32, "float32"), model, ranks, rank, 16, buffer_bytes)


def decode_facts(*, heads: int = 2, chips: int = 1, codec: str = "bfp8", model: str = "m") -> DecodeFacts:
    split = rank_heads(heads, chips)
    assert split is not None
    layout = KVPoolLayout("cross_layer", 1, chips, len(split[0]), BLOCK, 32, codec, 8, 64)
    return DecodeFacts(KVShape(1, heads, 32, "float32"), model, layout)


def prefill_protocol(facts: PrefillFacts, epoch: str, clock: Clock, limits: PrefillLimits = LIMITS) -> PrefillProtocol:
    return PrefillProtocol(facts, limits, epoch, "engine:0", BUFFER_ADDRESS, clock)


@lru_cache(maxsize=4096)
def kv_bytes(content: str, nbytes: int) -> bytes:
    """Stand-in for one packed block on one rank; ``content`` says whose KV it is."""
    tag = hashlib.blake2b(content.encode(), digest_size=8).digest()
    return tag * (nbytes // 8) + tag[: nbytes % 8]


class End(Protocol):
    """An end of the network with its owner's handler."""

    def receive_all(self) -> None: ...


class World:
    """Events in virtual time.  Everything random about the instances comes from ``rng``, the network has its own."""

    def __init__(self, seed: int, faults: NetworkFaults) -> None:
        self.now = 0.0
        self.rng = random.Random(seed)
        self.network = MemoryNetwork(self.clock, random.Random(seed + 1), faults)
        self._idle_end = self.network.client()  # moves the network along while every process is down
        self.buffers: dict[str, bytearray] = {}  # what an engine session serves; absent while the process is down
        self.ends: list[End] = []
        self.check: Callable[[], None] = lambda: None
        self.steps = 0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def clock(self) -> float:
        return self.now

    def id(self) -> str:
        return f"{self.rng.getrandbits(128):032x}"

    def after(self, delay: float, event: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (self.now + delay, self._count, event))

    def between(self, low: float, high: float) -> float:
        return self.rng.uniform(low, high)

    def chance(self, p: float) -> bool:
        return self.rng.random() < p

    def server(self, address: str) -> MemoryServer:
        return self.network.server(Address.parse(address))

    def client(self) -> MemoryClient:
        return self.network.client()

    def run(self, until: float) -> None:
        """Lets everything happen that is due up to ``until``; invariants are checked after each event."""
        while True:
            event_at = self._events[0][0] if self._events else float("inf")
            message_at = self.network.next_due()
            if message_at is not None and message_at <= event_at:
                if message_at > until:
                    break
                self.now = max(self.now, message_at)
                self._idle_end.receive()
                for end in list(self.ends):
                    end.receive_all()
            else:
                if event_at > until:
                    break
                at, _, event = heapq.heappop(self._events)
                self.now = max(self.now, at)
                event()
            self.steps += 1
            self.check()
        self.now = until
