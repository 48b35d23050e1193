"""The decode sides that a prefill rank has paired with or refused: at most so many, the silent ones forgotten."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from ..errors import Mismatch
from ..plan.pairing import AnyPairing, DirectPairing, PrefillFacts, pair, smallest_parcel
from .lease import Clock
from .messages import PROTOCOL_VERSION, ForeignHello, Hello
from .prefill_actions import PrefillLimits
from .regions import REGION_ALIGNMENT

__all__ = ["Peer", "PeerBook"]


@dataclass(slots=True)
class Peer:
    """A paired decode side.  ``digests``: it asks for each parcel's digest."""

    pairing: AnyPairing
    identity: str
    seen_at: float
    digests: bool


class PeerBook:
    """By the decode sides' epochs.  ``capacity``: usable bytes of the send buffer.

    ``exposed``: whether peers can read vLLM's cache itself, which those in mode direct do.
    """

    def __init__(self, facts: PrefillFacts, limits: PrefillLimits, capacity: int, clock: Clock) -> None:
        self._facts = facts
        self._limits = limits
        self._capacity = capacity
        self.exposed = False
        self._clock = clock
        self._peers: OrderedDict[str, Peer] = OrderedDict()
        self._refused: OrderedDict[str, tuple[Mismatch, ...]] = OrderedDict()

    def __len__(self) -> int:
        """How many are paired."""
        return len(self._peers)

    def hello(self, identity: str, hello: Hello | ForeignHello) -> tuple[Mismatch, ...]:
        """Pairs with who said this, over the connection ``identity``; or every reason why not."""
        if isinstance(hello, ForeignHello) or hello.version != PROTOCOL_VERSION:
            return self._refuse(hello.epoch, _other_version(hello.version))
        verdict = self._pair(hello)
        if isinstance(verdict, tuple):
            return self._refuse(hello.epoch, verdict)
        self._refused.pop(hello.epoch, None)
        # A connection has one owner: whoever says many epochs over it takes no one else's place.
        for epoch in [e for e, peer in self._peers.items() if peer.identity == identity and e != hello.epoch]:
            del self._peers[epoch]
        self._peers[hello.epoch] = Peer(verdict, identity, self._clock(), hello.digests)
        self._peers.move_to_end(hello.epoch)
        while len(self._peers) > self._limits.max_peers:
            self._peers.popitem(last=False)
        return ()

    def heard(self, epoch: str) -> Peer | None:
        """The peer that has said something just now; None where it is not paired."""
        peer = self._peers.get(epoch)
        if peer is not None:
            peer.seen_at = self._clock()
        return peer

    def forget_silent(self) -> None:
        now = self._clock()
        for epoch in [e for e, peer in self._peers.items() if peer.seen_at + self._limits.peer_keep_s <= now]:
            del self._peers[epoch]

    def eager_pairing(self) -> AnyPairing | None:
        """The pairing to pack for before anyone asks: the one that all paired decode sides share."""
        pairings = {peer.pairing for peer in self._peers.values()}
        return pairings.pop() if len(pairings) == 1 else None

    @property
    def want_digests(self) -> bool:
        """Whether any of them asks for digests."""
        return any(peer.digests for peer in self._peers.values())

    def verdicts(self) -> dict[str, AnyPairing | tuple[Mismatch, ...]]:
        """Pairings and refusals."""
        return {**{epoch: peer.pairing for epoch, peer in self._peers.items()}, **self._refused}

    def _refuse(self, epoch: str, mismatches: tuple[Mismatch, ...]) -> tuple[Mismatch, ...]:
        self._refused[epoch] = mismatches
        while len(self._refused) > self._limits.max_peers:
            self._refused.popitem(last=False)
        return mismatches

    def _pair(self, hello: Hello) -> AnyPairing | tuple[Mismatch, ...]:
        """The pairing, where one block of it fits the usable part of the send buffer, or it needs none of it."""
        verdict = pair(self._facts, hello.facts)
        if isinstance(verdict, tuple):
            return verdict
        if isinstance(verdict, DirectPairing):
            return tuple(self._not_direct(hello)) or verdict
        block = smallest_parcel(verdict)
        if block > self._capacity:
            least = -(-block // REGION_ALIGNMENT) * REGION_ALIGNMENT
            fix = f"set send_buffer_bytes on the prefill side to at least {least}"
            return (Mismatch("send_buffer_bytes", str(self._facts.send_buffer_bytes), f"{block} bytes a block", fix),)
        return verdict

    def _not_direct(self, hello: Hello) -> list[Mismatch]:
        """Why a decode side whose cache fits cannot be served in mode direct."""
        found = []
        if self._limits.digests or hello.digests:
            here, there = (str(on).lower() for on in (self._limits.digests, hello.digests))
            fix = (
                "set parcel_digest to false on both sides, or serve mode hawk or host: in mode direct nothing is packed"
            )
            found.append(Mismatch("parcel_digest", here, there, fix))
        if not self.exposed:
            fix = "see the prefill side's log; over RDMA raise its limit of locked memory (ulimit -l unlimited)"
            found.append(
                Mismatch("kv cache", "memory that its transfer engine refused", "reads it in mode direct", fix)
            )
        return found


def _other_version(version: int) -> tuple[Mismatch, ...]:
    fix = "install the same release of hawk-connector on both sides"
    return (Mismatch("protocol version", str(PROTOCOL_VERSION), str(version), fix),)
