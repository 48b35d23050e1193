"""Whether the pools of a decode side can be served: everything that is wrong with a layout that a peer says it has."""

from __future__ import annotations

from ..errors import Mismatch
from ..layout.kv_pool import KVPoolLayout
from ..layout.tilings import TILINGS, Tiling
from .facts import PrefillFacts
from .parcel import classes_fit

__all__ = ["pool_mismatches"]


def pool_mismatches(prefill: PrefillFacts, layout: KVPoolLayout) -> list[Mismatch]:
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
