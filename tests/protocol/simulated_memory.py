"""The decode side's requests and the memory of their blocks: whose each block is, and which bytes are in it."""

from __future__ import annotations

from dataclasses import dataclass

from hawk_connector.plan.pairing import DecodeFacts, pair
from hawk_connector.protocol.decode_actions import Read
from hawk_connector.protocol.ticket import Ticket
from tests.protocol.simulated_blocks import BlockPool
from tests.protocol.world import BLOCK, Text, World, kv_bytes, prefill_facts


@dataclass(eq=False)
class Wish:
    """One request on the decode side.

    ``outcome``: how its KV came, set exactly once.  ``over``: nothing of it is left in this process.
    """

    name: str
    text: Text
    stage: str = "new"
    ticket: Ticket | None = None
    first: int = 0  # blocks that come from the prefix cache
    table: tuple[int, ...] = ()
    abort_after: float | None = None
    refused_by_decode: bool = False  # its client or its template is wrong: it goes before it is admitted
    outcome: str | None = None
    reason: str = ""
    over: bool = False
    preempted: bool = False


class DecodeMemory:
    """Bytes by block and by the prefill rank that they come from.

    A block's owner is the request that it is loaded for, and from then on the request that computes or decodes in it:
    bytes that arrive for anybody else are foreign.
    """

    def __init__(self, world: World, facts: DecodeFacts, ranks: int, blocks: int) -> None:
        self.world = world
        self.pool = BlockPool(blocks, world.rng, self._wiped)
        self._owner: list[str | None] = [None] * blocks
        self._bytes: list[dict[int, bytes]] = [{} for _ in range(blocks)]
        # Bytes of a block from each rank that sends any, by the pairing that both sides must come to.
        self._each: dict[int, int] = {}
        for r in range(ranks):
            pairing = pair(prefill_facts(heads=facts.shape.kv_heads, ranks=ranks, rank=r, model=facts.model), facts)
            if not isinstance(pairing, tuple) and pairing.shares:
                self._each[r] = pairing.parcel(0, 1, BLOCK).nbytes

    def _wiped(self, block: int) -> None:
        self._bytes[block] = {}
        self._owner[block] = None

    def own(self, wish: Wish, owner: str) -> None:
        """The request's blocks, those from the prefix cache left out, are ``owner``'s now."""
        for block in wish.table[wish.first :]:
            self._owner[block] = owner

    def compute(self, wish: Wish) -> None:
        """The request has computed those blocks itself."""
        for i, block in enumerate(wish.table[wish.first :], start=wish.first):
            self._bytes[block] = {r: self._expected(wish, i, r) for r in self._each}

    def write(self, read: Read, index: int, data: bytes) -> None:
        """Bytes of a read arrive in its block ``index``."""
        block = read.block_ids[index]
        owner = self._owner[block]
        own = owner == read.request
        self.world.require(1, own, lambda: f"block {block} of {owner} is written by a read for {read.request}")
        rank = int(read.address.rpartition(":")[2]) - 1
        self._bytes[block][rank] = data

    def require_own_bytes(self, wish: Wish, rule: int) -> None:
        """Every block of the request, shared ones too, holds the KV of its own tokens."""
        for i, block in enumerate(wish.table):
            for r in self._each:
                own = self._bytes[block].get(r) == self._expected(wish, i, r)
                what = f"{wish.name} ({wish.stage}): block {i} from rank {r} holds other bytes than its own KV"
                self.world.require(rule, own, what)

    def _expected(self, wish: Wish, block: int, rank: int) -> bytes:
        return kv_bytes(f"{wish.text.content(block)}/{rank}", self._each[rank])
