"""Caches into banks, byte for byte against the oracle: shapes, block sizes, banks, codecs, TP, tails, parcels."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.oracle.scalar import heads_of_chip
from tests.transform.crossing import Banks, Crossing, Prefill, assert_crossing, carry, oracle_banks

pytestmark = pytest.mark.slow

BLACKHOLE = (0,) * 8
P100 = (0,) * 7
WORMHOLE = (0, 0x40000000) * 6
CODECS = ("float32", "bfloat16", "bfp8", "bfp4", "bfp2")
TOKENS = (1, 31, 32, 33, 63, 64, 65, 200)


@pytest.mark.parametrize("block_size", [64, 32, 16])
@pytest.mark.parametrize("source_block", [16, 48, 128])
@pytest.mark.parametrize("kind", ["per_layer", "cross_layer"])
def test_block_sizes(kind: Any, source_block: int, block_size: int) -> None:
    assert_crossing(Crossing(kind=kind, source_block=source_block, block_size=block_size, tokens=113, codec="bfp8"))


@pytest.mark.parametrize("kind", ["per_layer", "cross_layer"])
@pytest.mark.parametrize("kv_heads", [1, 3, 4, 8])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_heads(kind: Any, kv_heads: int, head_dim: int) -> None:
    crossing = Crossing(kind=kind, kv_heads=kv_heads, head_dim=head_dim, layers=2, block_size=32, tokens=33)
    assert_crossing(replace(crossing, family="LBNHC", dtype="bfloat16", codec="bfloat16"))


@pytest.mark.parametrize("kind", ["per_layer", "cross_layer"])
@pytest.mark.parametrize("order", ["scattered", "consecutive", "descending"])
@pytest.mark.parametrize(("bases", "alignment"), [(BLACKHOLE, 64), (P100, 64), (WORMHOLE, 32)], ids=["8", "7", "12"])
def test_banks_and_block_ids(bases: Any, alignment: int, order: Any, kind: Any) -> None:
    crossing = Crossing(kind=kind, order=order, bases=bases, alignment=alignment, layers=2, kv_heads=3)
    assert_crossing(replace(crossing, block_size=32, tokens=100, codec="bfp8"))


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_codecs(codec: Any, dtype: str) -> None:
    assert_crossing(Crossing(codec=codec, dtype=dtype, kv_heads=2, poison=1e30 if dtype != "float16" else 6e4))


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("block_size", [64, 32, 16])
def test_tails_are_zeros_whatever_the_cache_holds(tokens: int, block_size: int) -> None:
    """NaN and huge numbers would both show: one as itself, the other in its neighbours' shared exponent."""
    poison = math.nan if tokens % 2 else 1e30
    assert_crossing(Crossing(tokens=tokens, block_size=block_size, poison=poison, codec="bfp4", source_block=128))


@pytest.mark.parametrize(("source_block", "block_size"), [(32, 64), (32, 16), (128, 64), (128, 32), (96, 64)])
@pytest.mark.parametrize("codec", ["float32", "bfp8"])
def test_column_major_k_of_vllms_cpu_backend(source_block: int, block_size: int, codec: Any) -> None:
    crossing = Crossing(family="cpu", source_block=source_block, block_size=block_size, kv_heads=3, codec=codec)
    assert_crossing(replace(crossing, tokens=100))


@pytest.mark.parametrize("chips", [1, 2, 4])
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_tensor_parallelism(kv_heads: int, ranks: int, chips: int) -> None:
    """One or two KV heads: vLLM replicates them on the ranks, HAWK on the chips."""
    crossing = Crossing(kv_heads=kv_heads, ranks=ranks, chips=chips, codec="bfp8", layers=2, block_size=32, tokens=40)
    assert_crossing(crossing)


@pytest.mark.parametrize("kind", ["per_layer", "cross_layer"])
@pytest.mark.parametrize(("bases", "alignment"), [(P100, 64), (WORMHOLE, 32)], ids=["7", "12"])
def test_several_ranks_feed_one_chip(kind: Any, bases: Any, alignment: int) -> None:
    crossing = Crossing(kind=kind, bases=bases, alignment=alignment, kv_heads=8, ranks=4, chips=2, layers=2)
    assert_crossing(replace(crossing, block_size=32, tokens=20, codec="bfp2", family="LBNHC"))


@pytest.mark.parametrize("chips", [1, 2, 4, 8])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("kv_heads", [2, 8])
def test_any_tensor_parallelism(kv_heads: int, ranks: int, chips: int) -> None:
    """With two heads, 4 and 8 ranks or chips hold copies."""
    crossing = Crossing(kv_heads=kv_heads, ranks=ranks, chips=chips, head_dim=32, block_size=32, tokens=33)
    assert_crossing(replace(crossing, codec="bfp4", bases=P100 if ranks == 4 else BLACKHOLE, source_block=16))


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("codec", ["bfp8", "bfloat16"])
def test_head_dims(head_dim: int, codec: Any) -> None:
    """80 is padded to 96 with zeros, which share exponents with the last dims."""
    assert_crossing(Crossing(head_dim=head_dim, codec=codec, kv_heads=2, block_size=32, tokens=40))


@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 32), (128, 64), (80, 20), (96, 96)])
def test_partial_rotary(head_dim: int, rotary_dim: int) -> None:
    crossing = Crossing(head_dim=head_dim, rotary_dim=rotary_dim, codec="bfp8", block_size=32, tokens=40)
    assert_crossing(crossing)


@pytest.mark.parametrize("order", ["scattered", "consecutive", "descending"])
@pytest.mark.parametrize(("bases", "alignment"), [(BLACKHOLE, 64), (P100, 64), (WORMHOLE, 32)], ids=["8", "7", "12"])
@pytest.mark.parametrize(
    ("kind", "layers", "shard_rows"),
    [("per_layer", 2, 1), ("per_layer", 1, 3), ("cross_layer", 2, 1), ("cross_layer", 2, 2), ("cross_layer", 2, 4)],
)
def test_nd_shards(kind: Any, layers: int, shard_rows: int, bases: Any, alignment: int, order: Any) -> None:
    """Shards of one row, of several; units of several shards, shards of one and of several units."""
    crossing = Crossing(kind=kind, layers=layers, shard_rows=shard_rows, channels="nd_sharded", bases=bases)
    crossing = replace(crossing, alignment=alignment, order=order, kv_heads=3, head_dim=32, block_size=32, tokens=100)
    parts = assert_crossing(replace(crossing, codec="bfp8"))
    if order != "consecutive":
        return
    # A block's row is one run: never more reads than rows.
    assert parts[0].count <= 4 * layers * 2


@pytest.mark.parametrize("shard_rows", [1, 2])
def test_height_shards(shard_rows: int) -> None:
    """A shard for every bank; a pool of 5 blocks, or of 5 blocks' two layers, on 7 banks."""
    kind: Any = "per_layer" if shard_rows == 1 else "cross_layer"
    crossing = Crossing(kind=kind, layers=2, shard_rows=shard_rows, channels="height_sharded", bases=P100)
    parts = assert_crossing(replace(crossing, kv_heads=2, block_size=32, tokens=20, codec="bfp8"))
    assert parts[0].count == (2 if kind == "cross_layer" else 4)


@pytest.mark.parametrize("rope_interleaved", [True, False])
def test_a_model_may_keep_hfs_order_of_k(rope_interleaved: bool) -> None:
    assert_crossing(Crossing(rope_interleaved=rope_interleaved, head_dim=128))


@pytest.mark.parametrize("kind", ["per_layer", "cross_layer"])
@pytest.mark.parametrize("order", ["scattered", "consecutive"])
@pytest.mark.parametrize("each", [1, 2, 3])
def test_parcels_give_the_bytes_of_one_transfer(kind: Any, order: Any, each: int) -> None:
    """Seven blocks of 32; the last parcel is short, and the last block half full."""
    crossing = Crossing(kind=kind, order=order, kv_heads=2, layers=2, block_size=32, tokens=200, codec="bfp8")
    parts = assert_crossing(crossing, blocks_per_parcel=each)
    assert len(parts) == math.ceil(7 / each)
    prefill, banks, whole = Prefill.of(crossing), Banks(crossing), Banks(crossing)
    carry(crossing, prefill, banks, blocks_per_parcel=each)
    carry(crossing, prefill, whole)
    assert (banks.memory == whole.memory).all()


@pytest.mark.parametrize("each", [None, 2])
@pytest.mark.parametrize("skip", [0, 1, 3, 4])
def test_blocks_that_decode_has_are_not_read(each: int | None, skip: int) -> None:
    """Four blocks; the parcels lie in the send buffer whole, decode reads from block ``skip`` on."""
    crossing = Crossing(kv_heads=2, layers=2, block_size=32, tokens=111, codec="bfp8")
    parts = assert_crossing(crossing, blocks_per_parcel=each, skip=skip)
    assert sum(part.nbytes for part in parts) == (4 - skip) * 2 * 2 * 2 * 2 * 1088  # layers, K and V, heads, tiles


def test_padding_between_pages() -> None:
    """Where the alignment leaves gaps between pages, the gaps lie inside the segments; the pages are still exact."""
    crossing = Crossing(alignment=128, codec="bfp8", kv_heads=2)
    prefill, banks = Prefill.of(crossing), Banks(crossing)
    found = oracle_banks(crossing, prefill, banks)
    wanted = banks.with_pages(found)
    compared = np.ones(len(wanted), dtype=bool)
    for (chip, bank), pages in found.items():
        for address in pages:
            after = int(banks.first[chip, bank]) + address + 1088
            compared[after : after + 64] = False
    carry(crossing, prefill, banks)
    assert (banks.memory == wanted)[compared].all()


@st.composite
def crossings(draw: st.DrawFn) -> Crossing:
    """Any small crossing that both sides can serve."""
    kv_heads = draw(st.sampled_from([1, 2, 3, 4]))
    parts = [n for n in (1, 2, 3, 4) if kv_heads % n == 0 or n % kv_heads == 0]
    family = draw(st.sampled_from(["LBHNC", "LBNHC", "cpu"]))
    block_size = draw(st.sampled_from([16, 32, 48, 64]))
    bases, alignment = draw(st.sampled_from([(BLACKHOLE, 64), (P100, 64), (WORMHOLE, 32)]))
    chips = draw(st.sampled_from(parts))
    layers, head_dim = draw(st.sampled_from([(1, 32), (1, 64), (1, 40), (2, 32)]))
    # The oracle takes a millisecond a page.
    heads = chips * len(heads_of_chip(0, chips, kv_heads))
    per_block = 2 * layers * heads * math.ceil(block_size / 32) * math.ceil(head_dim / 32)
    return Crossing(
        tokens=draw(st.integers(1, max(1, 24 // per_block) * block_size)),
        kind=draw(st.sampled_from(["per_layer", "cross_layer"])),
        layers=layers,
        kv_heads=kv_heads,
        head_dim=head_dim,
        family=family,
        dtype="float32" if family == "cpu" else draw(st.sampled_from(["float32", "bfloat16", "float16"])),
        source_block=draw(st.sampled_from([32, 64, 96] if family == "cpu" else [16, 32, 48, 128])),
        ranks=draw(st.sampled_from(parts)),
        chips=chips,
        block_size=block_size,
        codec=draw(st.sampled_from(CODECS)),
        bases=bases,
        alignment=alignment,
        order=draw(st.sampled_from(["scattered", "consecutive", "descending"])),
        rope_interleaved=draw(st.booleans()),
        rotary_dim=draw(st.sampled_from([None, 16, 32])),
        channels=draw(st.sampled_from(["interleaved", "nd_sharded"])),
        shard_rows=layers * draw(st.integers(1, 2)) if draw(st.booleans()) else 1,
        poison=draw(st.sampled_from([math.nan, math.inf, 6e4])),
        seed=draw(st.integers(0, 1 << 20)),
    )


@pytest.mark.slow
@given(crossings(), st.data())
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_crossing(crossing: Crossing, data: st.DataObject) -> None:
    each = data.draw(st.none() | st.integers(1, crossing.blocks))
    skip = data.draw(st.integers(0, crossing.blocks))
    assert_crossing(crossing, blocks_per_parcel=each, skip=skip)
