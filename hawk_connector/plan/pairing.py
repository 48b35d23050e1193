"""Pairing: may this prefill instance feed this decode instance, and which heads go where.

Both sides compute it from the same facts, so neither has to believe the other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..errors import Mismatch
from ..layout.cache_layout import CacheLayout
from ..layout.kv_pool import KVPoolLayout
from .any_plan import Plan
from .block_plan import BlockPlan
from .cache_fit import direct_mismatches, raw_mismatches
from .facts import MAX_PARTS, DecodeFacts, Mode, PrefillFacts
from .parcel import ChipShare, ParcelPlan
from .pool_fit import pool_mismatches
from .raw_plan import RawPlan

__all__ = [
    "AnyPairing",
    "DecodeFacts",
    "DirectPairing",
    "HostPairing",
    "Pairing",
    "PrefillFacts",
    "chip_heads",
    "pair",
    "rank_heads",
    "smallest_parcel",
]


@dataclass(frozen=True, slots=True)
class Pairing:
    """An accepted pairing of one prefill rank: the heads that it sends to each chip; empty where it sends none."""

    layout: KVPoolLayout
    shares: tuple[ChipShare, ...]

    @property
    def mode(self) -> Mode:
        return "hawk"

    @property
    def chips(self) -> int:
        return self.layout.chips

    @property
    def heads(self) -> int:
        """KV heads of a chip."""
        return self.layout.heads

    @property
    def block_size(self) -> int:
        """Tokens of decode's blocks."""
        return self.layout.block_size

    @property
    def granule(self) -> int:
        """Decode's blocks of which a parcel, but a transfer's last one, has a multiple."""
        return 1

    @property
    def detail(self) -> str:
        """Decode's layout in words."""
        return _words(self.layout)

    def plan(self, blocks: int) -> ParcelPlan:
        """What ``blocks`` of decode's blocks are on its device."""
        return ParcelPlan(self.layout, self.shares, blocks)

    def parcel(self, first_block: int, blocks: int, tokens: int) -> Plan:
        """The parcel of blocks ``first_block`` and up of a transfer of ``tokens`` tokens."""
        return self.plan(blocks)


@dataclass(frozen=True, slots=True)
class HostPairing(Pairing):
    """Mode host: the rank sends its blocks as they are, of ``source``, and decode's host converts them."""

    source: CacheLayout

    @property
    def mode(self) -> Mode:
        return "host"

    @property
    def granule(self) -> int:
        size = self.layout.block_size
        return math.lcm(size, self.source.block_size) // size

    @property
    def detail(self) -> str:
        raw = f"{self.source.codec} in blocks of {self.source.block_size} tokens"
        return f"mode host, {raw}, converted into {_words(self.layout)}"

    def parcel(self, first_block: int, blocks: int, tokens: int) -> RawPlan:
        size = self.layout.block_size
        return RawPlan(self.plan(blocks), self.source, min(blocks * size, tokens - first_block * size))


@dataclass(frozen=True, slots=True)
class DirectPairing:
    """Mode direct: equal caches on both sides, read from the one into the other.  There is one rank and one chip."""

    layout: CacheLayout

    @property
    def mode(self) -> Mode:
        return "direct"

    @property
    def shares(self) -> tuple[ChipShare, ...]:
        return (ChipShare(0, tuple((head, head) for head in range(self.layout.heads))),)

    @property
    def chips(self) -> int:
        return 1

    @property
    def heads(self) -> int:
        return self.layout.heads

    @property
    def block_size(self) -> int:
        return self.layout.block_tokens

    @property
    def granule(self) -> int:
        return 1

    @property
    def detail(self) -> str:
        layout = self.layout
        return f"mode direct, {layout.codec} as {layout.backend} keeps it, block size {layout.block_tokens}"

    def parcel(self, first_block: int, blocks: int, tokens: int) -> BlockPlan:
        return BlockPlan(self.layout, blocks)


AnyPairing = Pairing | DirectPairing


def _words(layout: KVPoolLayout) -> str:
    cut = f"{layout.chips} chips x {layout.banks} banks, block size {layout.block_size}"
    return f"{layout.kind} {layout.codec}, {cut}"


def rank_heads(kv_heads: int, ranks: int) -> tuple[tuple[int, ...], ...] | None:
    """Global KV heads of each prefill rank, as vLLM splits or replicates them; None where it can do neither."""
    return _split(kv_heads, ranks)


def chip_heads(kv_heads: int, chips: int) -> tuple[tuple[int, ...], ...] | None:
    """Global KV heads of each chip: equal slices, or one head on several chips; None where neither works."""
    return _split(kv_heads, chips)


def _split(heads: int, parts: int) -> tuple[tuple[int, ...], ...] | None:
    if parts >= 1 and heads % parts == 0:
        each = heads // parts
        return tuple(tuple(range(p * each, (p + 1) * each)) for p in range(parts))
    if parts >= 1 and parts % heads == 0:
        return tuple((p * heads // parts,) for p in range(parts))
    return None


def pair(prefill: PrefillFacts, decode: DecodeFacts) -> AnyPairing | tuple[Mismatch, ...]:
    """The pairing of one prefill rank with a decode instance, or every reason why there is none.

    A mismatch's ``prefill`` and ``decode`` name both values; ``fix`` says which flag mends it.
    """
    found = _shape_mismatches(prefill, decode)
    if prefill.ranks > MAX_PARTS:  # before anything is worked out from this count
        fix = "check --tensor-parallel-size on the prefill side"
        oversized = Mismatch("tensor_parallel_size", str(prefill.ranks), f"supports at most {MAX_PARTS}", fix)
        return (*found, oversized)
    if isinstance(decode.layout, CacheLayout):
        found.extend(direct_mismatches(prefill, decode.layout))
        return tuple(found) or DirectPairing(decode.layout)
    return _pair_pools(prefill, decode, decode.layout, found)


def _pair_pools(
    prefill: PrefillFacts, decode: DecodeFacts, layout: KVPoolLayout, found: list[Mismatch]
) -> Pairing | tuple[Mismatch, ...]:
    """``pair`` for a device's pools; ``found``: what differs already."""
    if layout.chips > MAX_PARTS:  # likewise
        fix = "check the decode side's device package"
        return (*found, Mismatch("chips", f"supports at most {MAX_PARTS}", str(layout.chips), fix))
    shape = decode.shape
    ranks = rank_heads(shape.kv_heads, prefill.ranks)
    if ranks is None or not 0 <= prefill.rank < prefill.ranks:
        found.append(
            Mismatch(
                "tensor_parallel_size",
                f"{prefill.ranks} (rank {prefill.rank})",
                f"{shape.kv_heads} KV heads",
                "--tensor-parallel-size on the prefill side must divide, or be a multiple of, the KV heads",
            )
        )
    chips = chip_heads(shape.kv_heads, layout.chips)
    if chips is None or len(chips[0]) != layout.heads:
        found.append(
            Mismatch(
                "chips",
                f"{shape.kv_heads} KV heads",
                f"{layout.chips} chips with {layout.heads} heads each",
                "the decode side's number of chips must divide, or be a multiple of, the KV heads",
            )
        )
    found.extend(pool_mismatches(prefill, layout))
    found.extend(raw_mismatches(prefill, decode.mode, ranks))
    if found or ranks is None or chips is None:
        return tuple(found)
    shares = _shares(prefill.rank, ranks, chips)
    if decode.mode == "host" and prefill.cache is not None:
        pairing: Pairing = HostPairing(layout, shares, prefill.cache)
    else:
        pairing = Pairing(layout, shares)
    least = smallest_parcel(pairing)
    if least > prefill.send_buffer_bytes:
        return (
            Mismatch(
                "send_buffer_bytes",
                str(prefill.send_buffer_bytes),
                f"{least} bytes for one block of {pairing.granule * layout.block_size} tokens",
                f"set send_buffer_bytes on the prefill side to at least {least}",
            ),
        )
    return pairing


def smallest_parcel(pairing: AnyPairing) -> int:
    """Bytes that the send buffer must have room for; 0 where nothing goes through it."""
    if isinstance(pairing, DirectPairing):
        return 0
    blocks = pairing.granule
    return pairing.parcel(0, blocks, blocks * pairing.block_size).nbytes


def _shares(rank: int, ranks: tuple[tuple[int, ...], ...], chips: tuple[tuple[int, ...], ...]) -> tuple[ChipShare, ...]:
    shares = []
    for chip, heads in enumerate(chips):
        mine = []
        for on_chip, head in enumerate(heads):
            # Where vLLM replicates a head, its first holder sends it.
            holder = next(r for r, held in enumerate(ranks) if head in held)
            if holder == rank:
                mine.append((ranks[rank].index(head), on_chip))
        if mine:
            shares.append(ChipShare(chip, tuple(mine)))
    return tuple(shares)


def _shape_mismatches(prefill: PrefillFacts, decode: DecodeFacts) -> list[Mismatch]:
    found = []
    if prefill.model != decode.model:
        found.append(
            Mismatch("model", prefill.model, decode.model, "serve one --model on both sides, or set one model_id")
        )
    fixes = {
        "layers": "serve one --model on both sides",
        "kv_heads": "serve one --model on both sides",
        "head_dim": "serve one --model on both sides",
        "dtype": "give both sides the same --dtype",
    }
    for field, fix in fixes.items():
        here, there = getattr(prefill.shape, field), getattr(decode.shape, field)
        if here != there:
            found.append(Mismatch(field, str(here), str(there), fix))
    return found
