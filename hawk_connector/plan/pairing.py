"""Pairing: may this prefill instance feed this decode instance, and which heads go where.

Both sides compute it from the same facts, so neither has to believe the other.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from ..errors import Mismatch
from ..layout.kv_pool import KVPoolLayout
from ..layout.kv_shape import Extent, KVShape
from ..layout.tilings import TILINGS, Tiling
from .parcel import ChipShare, ParcelPlan, classes_fit

__all__ = ["DecodeFacts", "Pairing", "PrefillFacts", "chip_heads", "pair", "rank_heads"]


# Prefill ranks, or chips of a decode side.
MAX_PARTS = 1024


class PrefillFacts(msgspec.Struct, frozen=True):
    """What one prefill rank says of itself.

    ``model``: fingerprint of the model.  ``ranks``/``rank``: tensor parallelism.  ``block_size``: tokens.
    ``send_buffer_bytes``: capacity for parcels.  ``rope_half_split``: K is cached in HF order.
    """

    shape: KVShape
    model: str
    ranks: Extent
    rank: int
    block_size: Extent
    send_buffer_bytes: int
    rope_half_split: bool = True


class DecodeFacts(msgspec.Struct, frozen=True):
    """What a decode instance says of itself."""

    shape: KVShape
    model: str
    layout: KVPoolLayout


@dataclass(frozen=True, slots=True)
class Pairing:
    """An accepted pairing of one prefill rank: the heads that it sends to each chip; empty where it sends none."""

    layout: KVPoolLayout
    shares: tuple[ChipShare, ...]

    def plan(self, blocks: int) -> ParcelPlan:
        return ParcelPlan(self.layout, self.shares, blocks)


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


def pair(prefill: PrefillFacts, decode: DecodeFacts) -> Pairing | tuple[Mismatch, ...]:
    """The pairing of one prefill rank with a decode instance, or every reason why there is none.

    A mismatch's ``prefill`` and ``decode`` name both values; ``fix`` says which flag mends it.
    """
    found = _shape_mismatches(prefill, decode)
    oversized = _size_mismatches(prefill, decode)
    if oversized:
        return (*found, *oversized)  # before anything is worked out from these counts
    layout, shape = decode.layout, decode.shape
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
    found.extend(_layout_mismatches(prefill, layout))
    if found or ranks is None or chips is None:
        return tuple(found)
    pairing = Pairing(layout, _shares(prefill.rank, ranks, chips))
    block_bytes = pairing.plan(1).nbytes
    if block_bytes > prefill.send_buffer_bytes:
        return (
            Mismatch(
                "send_buffer_bytes",
                str(prefill.send_buffer_bytes),
                f"{block_bytes} bytes for one block of {layout.block_size} tokens",
                f"set send_buffer_bytes on the prefill side to at least {block_bytes}",
            ),
        )
    return pairing


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


def _size_mismatches(prefill: PrefillFacts, decode: DecodeFacts) -> list[Mismatch]:
    """Counts that no deployment has.  What follows takes time in proportion to them, and a peer chose one of them."""
    most = f"supports at most {MAX_PARTS}"
    found = []
    if prefill.ranks > MAX_PARTS:
        fix = "check --tensor-parallel-size on the prefill side"
        found.append(Mismatch("tensor_parallel_size", str(prefill.ranks), most, fix))
    if decode.layout.chips > MAX_PARTS:
        fix = "check the decode side's device package"
        found.append(Mismatch("chips", most, str(decode.layout.chips), fix))
    return found


def _layout_mismatches(prefill: PrefillFacts, layout: KVPoolLayout) -> list[Mismatch]:
    found = []
    known = "support for"
    if layout.layers != prefill.shape.layers or layout.head_dim != prefill.shape.head_dim:
        found.append(
            Mismatch(
                "pool",
                f"{prefill.shape.layers} layers, head_dim {prefill.shape.head_dim}",
                f"{layout.layers} layers, head_dim {layout.head_dim}",
                "the decode side's pools do not fit its own model: check the device package",
            )
        )
    tiling = next((t for t in TILINGS if t.name == layout.tiling), None)
    if tiling is None:
        names = ", ".join(t.name for t in TILINGS)
        found.append(Mismatch("tiling", f"{known} {names}", layout.tiling, "serve one HAWK version on both sides"))
    else:
        found.extend(_tiling_mismatches(layout, tiling, known))
    if layout.block_size % 16 or not 16 <= layout.block_size <= 4096:
        found.append(
            Mismatch(
                "block_size",
                str(prefill.block_size),
                str(layout.block_size),
                "the decode side's --block-size must be a multiple of 16 and at most 4096",
            )
        )
    if not 1 <= layout.banks <= 64:
        found.append(Mismatch("banks", f"{known} 1 to 64 banks", str(layout.banks), "check the device's bank table"))
    if layout.alignment not in (16, 32, 64, 128, 256):
        found.append(
            Mismatch(
                "alignment",
                f"{known} 16 to 256 bytes",
                str(layout.alignment),
                "check the device's bank table",
            )
        )
    if layout.channels == "linear" and layout.banks != 1:
        found.append(
            Mismatch("banks", f"{known} 1 bank in linear memory", str(layout.banks), "check the device package")
        )
    rotary = layout.rotary_dim
    if rotary is not None and layout.rope_interleaved and (rotary % 2 or rotary > layout.head_dim):
        found.append(
            Mismatch(
                "rotary_dim",
                f"{known} an even number of at most {layout.head_dim} dims",
                str(rotary),
                "the decode side's rotary_dim does not fit its own model: check the device package",
            )
        )
    if not found and not classes_fit(layout):
        found.append(
            Mismatch(
                "shard_rows",
                f"{known} whole shards for each block, or whole blocks in each shard",
                f"shards of {layout.rule.shard_pages} pages, units of {layout.pages_per_unit}",
                f"set shard_rows on the decode side to a divisor or a multiple of {layout.layers}"
                if layout.kind == "cross_layer"
                else "check the device package",
            )
        )
    if not prefill.rope_half_split and layout.rope_interleaved:
        found.append(
            Mismatch(
                "rope_interleaved",
                "K is already interleaved",
                "expects K to be permuted",
                "set rope_interleaved to false on the decode side",
            )
        )
    return found


def _tiling_mismatches(layout: KVPoolLayout, tiling: Tiling, known: str) -> list[Mismatch]:
    """What keeps a pool of this shape from being stored in ``tiling``."""
    found = []
    if layout.codec not in tiling.codecs:
        names = ", ".join(tiling.codecs)
        found.append(Mismatch("kv_dtype", f"{known} {names}", layout.codec, "choose one of these kv_dtype"))
    for field, axis, extent in (("head_dim", "dim", layout.head_dim), ("block_size", "token", layout.block_size)):
        if extent % tiling.tile(axis) and axis not in tiling.padded:
            fix = f"{tiling.name} does not pad: {field} must be a multiple of {tiling.tile(axis)}"
            found.append(Mismatch(field, f"{known} tiles of {tiling.tile(axis)}", str(extent), fix))
    return found
