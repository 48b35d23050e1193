"""What the simulated instances share: virtual time, events, ids, and the bytes that KV is made of."""

from __future__ import annotations

import hashlib
import heapq
import random
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from hawk_connector.layout.cache_layout import CacheLayout, ElementPlace
from hawk_connector.layout.kv_pool import KVPoolLayout
from hawk_connector.layout.kv_shape import KVShape
from hawk_connector.plan.pairing import DecodeFacts, PrefillFacts, rank_heads
from hawk_connector.protocol.lease import Clock
from hawk_connector.protocol.prefill import PrefillProtocol
from hawk_connector.protocol.prefill_actions import PrefillLimits

BLOCK = 32
BUFFER_ADDRESS = 0x10000
CACHE_ADDRESS = 0x4000_0000
LIMITS = PrefillLimits(
    parcel_tokens=2 * BLOCK,
    lease_s=30.0,
    buffer_wait_s=60.0,
    verdict_keep_s=60.0,
    max_transfers=64,
    max_peers=8,
)


class Violation(AssertionError):
    """A rule of the protocol does not hold.  ``rule``: its number in docs/protocol.md."""

    def __init__(self, rule: int, what: str) -> None:
        super().__init__(f"rule {rule}: {what}")
        self.rule = rule


def prefill_facts(
    *, heads: int = 2, ranks: int = 1, rank: int = 0, buffer_bytes: int = 1 << 20, model: str = "m"
) -> PrefillFacts:
    cache = cache_layout(max(1, heads // ranks))
    return PrefillFacts(KVShape(1, heads, 32, "float32"), model, ranks, rank, 16, buffer_bytes, cache=cache)


def cache_layout(heads: int = 2) -> CacheLayout:
    """vLLM's cache of one rank, on either side: one layer, K and V side by side."""
    k, v = (ElementPlace(offset=kv * 32, head=BLOCK * 64, token=64, dim=1) for kv in (0, 1))
    nbytes = heads * BLOCK * 64 * 4
    return CacheLayout("some kernels", 1, heads, 32, BLOCK, "float32", nbytes, nbytes, k, v)


def direct_facts(*, heads: int = 2, model: str = "m") -> DecodeFacts:
    return DecodeFacts(KVShape(1, heads, 32, "float32"), model, cache_layout(heads), "direct")


def decode_facts(*, heads: int = 2, chips: int = 1, codec: str = "bfp8", model: str = "m") -> DecodeFacts:
    split = rank_heads(heads, chips)
    assert split is not None
    layout = KVPoolLayout("cross_layer", 1, chips, len(split[0]), BLOCK, 32, codec, 8, 64)
    return DecodeFacts(KVShape(1, heads, 32, "float32"), model, layout)


def prefill_protocol(facts: PrefillFacts, epoch: str, clock: Clock, limits: PrefillLimits = LIMITS) -> PrefillProtocol:
    protocol = PrefillProtocol(facts, limits, epoch, "engine:0", BUFFER_ADDRESS, clock)
    protocol.expose((CACHE_ADDRESS,))
    return protocol


@lru_cache(maxsize=4096)
def kv_bytes(content: str, nbytes: int) -> bytes:
    """Stand-in for one packed block on one rank; ``content`` says whose KV it is."""
    tag = hashlib.blake2b(content.encode(), digest_size=8).digest()
    return tag * (nbytes // 8) + tag[: nbytes % 8]


def digest_of(data: bytes) -> str:
    """A parcel's digest as the simulation's two sides compute it; the machines only compare."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


@dataclass(frozen=True)
class Text:
    """A prompt.  ``keys`` name its blocks by all tokens up to their end, as vLLM's prefix cache does."""

    digest: str
    tokens: int
    keys: tuple[str, ...]

    @property
    def blocks(self) -> int:
        return -(-self.tokens // BLOCK)

    @property
    def cachable(self) -> tuple[str, ...]:
        """Keys of the blocks that vLLM may take from its cache: the last token is always computed."""
        return self.keys[: (self.tokens - 1) // BLOCK]

    def full(self, block: int) -> bool:
        return (block + 1) * BLOCK <= self.tokens

    def content(self, block: int) -> str:
        """What the finished block's KV must be."""
        return f"{self.keys[block]}/{min(BLOCK, self.tokens - block * BLOCK)}"


@dataclass
class Session:
    """What an engine session serves, and whether the process behind it can send (TCP needs it to run).

    ``block(id, nbytes)``: the bytes of one of vLLM's blocks now.
    """

    buffer: bytearray
    process: Any
    block: Callable[[int, int], bytes]


class World:
    """Events in virtual time.  Everything random about the instances comes from ``rng``."""

    def __init__(self, seed: int, trace: Callable[[str], None] | None = None) -> None:
        self.now = 0.0
        self.rng = random.Random(seed)
        self.sessions: dict[str, Session] = {}  # absent while the process is down
        self.misfits: set[str] = set()  # epochs that must never be paired with
        self.covered: Counter[tuple[str, str]] = Counter()  # (fault, phase of a request that it hit)
        self.checks: Counter[int] = Counter()  # how often each rule was looked at
        self.steps = 0
        self.trace = trace
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def id(self) -> str:
        return f"{self.rng.getrandbits(128):032x}"

    def after(self, delay: float, event: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (self.now + delay, self._count, event))

    def between(self, low: float, high: float) -> float:
        return low + (high - low) * self.rng.random()

    def chance(self, p: float) -> bool:
        return self.rng.random() < p

    def say(self, who: str, what: str, message: object = None) -> None:
        """A line of the trace, ids cut short."""
        if self.trace is not None:
            text = f"{what} {message}" if message is not None else what
            text = re.sub(r"facts=\w+\(.*\), (?=\w+=)", "", re.sub(r"\b([0-9a-f]{6})[0-9a-f]{26,}\b", r"\1", text))
            self.trace(f"{self.now:9.3f}  {who:12} {text}")

    def require(self, rule: int, holds: bool, what: Callable[[], str] | str) -> None:
        self.checks[rule] += 1
        if not holds:
            raise Violation(rule, what if isinstance(what, str) else what())

    def run(self, until: float) -> None:
        """Lets everything happen that is due up to ``until``."""
        events = self._events
        while events and events[0][0] <= until:
            at, _, event = heapq.heappop(events)
            self.now = at
            self.steps += 1
            event()
        self.now = until
