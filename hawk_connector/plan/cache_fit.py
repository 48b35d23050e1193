"""Whether a prefill side's cache, as vLLM keeps it, can serve a decode side in mode direct or host."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ..errors import Mismatch
from ..layout.cache_layout import CacheLayout, ElementPlace
from .facts import Mode, PrefillFacts

__all__ = ["direct_mismatches", "raw_mismatches"]

_BLOCK_SIZE = "give both sides the same --block-size, and the same attention backend"
_BACKEND = "start both sides with the same attention backend and vLLM version, on the same kind of processor"
# What differs first is what the others follow from.
_FIXES = {
    "codec": "give both sides the same --dtype and --kv-cache-dtype auto",
    "block_size": _BLOCK_SIZE,
    "split": _BLOCK_SIZE,
    "k": _BACKEND,
    "v": _BACKEND,
    "block_bytes": _BACKEND,
    "block_stride": _BACKEND,
}
_NAMES = {"codec": "kv cache dtype", "k": "place of K", "v": "place of V"}


def direct_mismatches(prefill: PrefillFacts, layout: CacheLayout) -> list[Mismatch]:
    """Where the caches of mode direct differ: blocks are read from the one into the other as they are."""
    found: list[Mismatch] = []
    if prefill.ranks != 1:
        fix = "mode direct needs --tensor-parallel-size 1 on both sides; mode hawk or host serves more ranks"
        found.append(Mismatch("tensor_parallel_size", str(prefill.ranks), "1", fix))
    cache = prefill.cache
    if cache is None:
        return [*found, _unknown("one of one layout in all layers")]
    if not (cache.sound and layout.sound):
        fix = "check the version of vLLM on both sides"
        return [*found, Mismatch("cache layout", _words(cache), _words(layout), f"K and V must lie in a block: {fix}")]
    if cache.block_tokens != layout.block_tokens:
        fix = "give both sides the same --block-size"
        found.append(Mismatch("block_size", str(cache.block_tokens), str(layout.block_tokens), fix))
    for field in ("layers", "heads", "head_dim", *_FIXES):
        here, there = getattr(cache, field), getattr(layout, field)
        if field == "block_size" and cache.block_tokens != layout.block_tokens:
            continue  # said above, in vLLM's terms
        if here != there:
            fix = _FIXES.get(field, "serve one --model on both sides")
            found.append(Mismatch(_NAMES.get(field, field), _text(here), _text(there), fix))
    if (cache.opaque or layout.opaque) and cache.backend != layout.backend:
        found.append(Mismatch("attention backend", cache.backend, layout.backend, _BACKEND))
    return found


def raw_mismatches(prefill: PrefillFacts, mode: Mode, rank_heads: Sequence[Sequence[int]] | None) -> list[Mismatch]:
    """Why the rank's blocks cannot be read by whoever knows the model's shape: to pack them, or to send them raw."""
    cache = prefill.cache
    if cache is None:
        return [_unknown("one that mode host can convert")] if mode == "host" else []
    if cache.opaque:
        here = f"packed by {cache.backend} in an order of its own"
        fix = (
            "start the prefill side with --dtype float32 (and, on a CPU, a model whose head size is a multiple of 32), "
            "or serve decode sides in mode direct"
        )
        return [Mismatch("kv cache", here, f"mode {mode} reads K and V themselves", fix)]
    if mode != "host":
        return []
    heads = len(rank_heads[0]) if rank_heads else cache.heads
    ours = (prefill.shape.layers, heads, prefill.shape.head_dim)
    theirs = (cache.layers, cache.heads, cache.head_dim)
    if not cache.sound or ours != theirs:
        fix = "the prefill side's cache does not fit its own model: check its version of vLLM"
        return [Mismatch("cache layout", _words(cache), f"{ours[0]} layers, {ours[1]} heads of {ours[2]}", fix)]
    return []


def _unknown(wanted: str) -> Mismatch:
    fix = "mode hawk on the decode side does not need it; else start the prefill side with another attention backend"
    return Mismatch("kv cache", "a layout that it does not know", wanted, fix)


def _words(cache: CacheLayout) -> str:
    size = f"{cache.layers} layers, {cache.heads} heads of {cache.head_dim}, blocks of {cache.block_size} tokens"
    return f"{size} in {cache.block_bytes} bytes of {cache.codec}"


def _text(value: object) -> str:
    if isinstance(value, ElementPlace):
        return ", ".join(f"{name} {n}" for name, n in msgspec.structs.asdict(value).items())
    return str(value)
