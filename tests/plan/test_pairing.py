"""Who may feed whom, and with which heads: against the oracle's split, and every refusal with both values."""

from __future__ import annotations

import tracemalloc
from collections import Counter
from typing import Any

import msgspec
import pytest

from hawk_connector.errors import Mismatch
from hawk_connector.layout.kv_pool import KVPoolLayout
from hawk_connector.layout.kv_shape import KVShape
from hawk_connector.plan.pairing import DecodeFacts, Pairing, PrefillFacts, pair
from tests.oracle.scalar import heads_of_chip

SHAPE = KVShape(layers=2, kv_heads=4, head_dim=64, dtype="bfloat16")
LAYOUT = KVPoolLayout("cross_layer", 2, 2, 2, 64, 64, "bfp8", 8, 64)
PREFILL = PrefillFacts(SHAPE, "llama", ranks=2, rank=1, block_size=16, send_buffer_bytes=1 << 20)
DECODE = DecodeFacts(SHAPE, "llama", LAYOUT)


def changed(facts: Any, **fields: Any) -> Any:
    """``facts`` with other values; ``shape__x`` and ``layout__x`` reach into the shape and the layout."""
    inner: dict[str, dict[str, Any]] = {}
    plain = {}
    for name, value in fields.items():
        outer, _, field = name.partition("__")
        if field:
            inner.setdefault(outer, {})[field] = value
        else:
            plain[name] = value
    plain |= {outer: msgspec.structs.replace(getattr(facts, outer), **values) for outer, values in inner.items()}
    return msgspec.structs.replace(facts, **plain)


def refused(prefill: PrefillFacts = PREFILL, decode: DecodeFacts = DECODE) -> dict[str, Mismatch]:
    found = pair(prefill, decode)
    assert isinstance(found, tuple) and found, "the pairing should have been refused"
    for mismatch in found:
        assert mismatch.fix and mismatch.prefill and mismatch.decode
    return {mismatch.field: mismatch for mismatch in found}


def split(heads: int, parts: int) -> list[list[int]] | None:
    """The oracle's heads of each part, or None where it knows no such split."""
    try:
        return [heads_of_chip(part, parts, heads) for part in range(parts)]
    except ValueError:
        return None


@pytest.mark.parametrize("kv_heads", range(1, 13))
def test_every_chips_heads_come_from_exactly_one_rank(kv_heads: int) -> None:
    """All TP by chips up to 16: no head is missing, none comes twice, and each is the head that it says it is."""
    accepted = 0
    for ranks in range(1, 17):
        for chips in range(1, 17):
            held, wanted = split(kv_heads, ranks), split(kv_heads, chips)
            shape = KVShape(1, kv_heads, 32, "float32")
            layout = KVPoolLayout("per_layer", 1, chips, len(wanted[0]) if wanted else 1, 32, 32, "bfp8", 8, 64)
            fed: Counter[tuple[int, int, int]] = Counter()
            for rank in range(ranks):
                facts = PrefillFacts(shape, "m", ranks, rank, 16, 1 << 30)
                found = pair(facts, DecodeFacts(shape, "m", layout))
                if held is None or wanted is None:
                    assert isinstance(found, tuple)
                    fields = {mismatch.field for mismatch in found}
                    assert ("tensor_parallel_size" in fields) == (held is None)
                    assert ("chips" in fields) == (wanted is None)
                    continue
                assert isinstance(found, Pairing)
                for share in found.shares:
                    assert share.heads  # a chip that gets nothing has no share
                    fed.update((share.chip, on_chip, held[rank][on_rank]) for on_rank, on_chip in share.heads)
            if held is None or wanted is None:
                continue
            accepted += 1
            assert fed == Counter((chip, i, head) for chip, mine in enumerate(wanted) for i, head in enumerate(mine))
    assert accepted >= 4


def test_replicated_heads_come_from_their_first_holder() -> None:
    """Two heads on four ranks: ranks 1 and 3 hold copies, and send nothing."""
    shape = KVShape(1, 2, 32, "float32")
    layout = KVPoolLayout("per_layer", 1, 1, 2, 32, 32, "bfp8", 8, 64)
    shares = []
    for rank in range(4):
        found = pair(PrefillFacts(shape, "m", 4, rank, 16, 1 << 20), DecodeFacts(shape, "m", layout))
        assert isinstance(found, Pairing)
        shares.append([share.heads for share in found.shares])
        assert found.plan(3).nbytes == len(found.shares) * 3 * 2 * 1088
    assert shares == [[((0, 0),)], [], [((0, 1),)], []]


def test_an_accepted_pairing() -> None:
    found = pair(PREFILL, DECODE)
    assert isinstance(found, Pairing) and found.layout == LAYOUT
    assert [(share.chip, share.heads) for share in found.shares] == [(1, ((0, 0), (1, 1)))]


@pytest.mark.parametrize(
    ("fields", "name", "here", "there"),
    [
        ({"model": "qwen"}, "model", "llama", "qwen"),
        ({"shape__layers": 3}, "layers", "2", "3"),
        ({"shape__kv_heads": 8}, "kv_heads", "4", "8"),
        ({"shape__head_dim": 128}, "head_dim", "64", "128"),
        ({"shape__dtype": "float16"}, "dtype", "bfloat16", "float16"),
        ({"layout__chips": 3}, "chips", "4 KV heads", "3 chips with 2 heads each"),
        ({"layout__heads": 4}, "chips", "4 KV heads", "2 chips with 4 heads each"),
        ({"layout__layers": 3}, "pool", "2 layers, head_dim 64", "3 layers, head_dim 64"),
        ({"layout__head_dim": 128}, "pool", "2 layers, head_dim 64", "2 layers, head_dim 128"),
        ({"layout__codec": "fp8"}, "kv_dtype", "float32, bfloat16, bfp8, bfp4, bfp2", "fp8"),
        ({"layout__block_size": 40}, "block_size", "16", "40"),
        ({"layout__block_size": 8}, "block_size", "16", "8"),
        ({"layout__block_size": 0}, "block_size", "16", "0"),
        ({"layout__block_size": -16}, "block_size", "16", "-16"),
        ({"layout__block_size": 8192}, "block_size", "16", "8192"),
        ({"layout__banks": 0}, "banks", "1 to 64 banks", "0"),
        ({"layout__banks": 65}, "banks", "1 to 64 banks", "65"),
        ({"layout__alignment": 8}, "alignment", "16 to 256 bytes", "8"),
        ({"layout__alignment": 48}, "alignment", "16 to 256 bytes", "48"),
    ],
)
def test_refusals_of_a_decode_side(fields: dict[str, Any], name: str, here: str, there: str) -> None:
    mismatch = refused(decode=changed(DECODE, **fields))[name]
    assert here in mismatch.prefill
    assert mismatch.decode == there


@pytest.mark.parametrize(
    ("fields", "name", "here", "there"),
    [
        ({"ranks": 3, "rank": 0}, "tensor_parallel_size", "3 (rank 0)", "4 KV heads"),
        ({"ranks": 2, "rank": 2}, "tensor_parallel_size", "2 (rank 2)", "4 KV heads"),
        ({"ranks": 2, "rank": -1}, "tensor_parallel_size", "2 (rank -1)", "4 KV heads"),
        ({"ranks": 0, "rank": 0}, "tensor_parallel_size", "0 (rank 0)", "4 KV heads"),
        ({"rope_half_split": False}, "rope_interleaved", "already interleaved", "expects K to be permuted"),
    ],
)
def test_refusals_of_a_prefill_side(fields: dict[str, Any], name: str, here: str, there: str) -> None:
    mismatch = refused(prefill=changed(PREFILL, **fields))[name]
    assert here in mismatch.prefill
    assert mismatch.decode == there


def with_head_dim(head_dim: int, **layout: Any) -> tuple[PrefillFacts, DecodeFacts]:
    fields = {f"layout__{name}": value for name, value in layout.items()}
    decode = changed(DECODE, shape__head_dim=head_dim, layout__head_dim=head_dim, **fields)
    return changed(PREFILL, shape__head_dim=head_dim), decode


@pytest.mark.parametrize(("head_dim", "tiles"), [(64, 2), (80, 3), (96, 3), (128, 4), (256, 8)])
def test_head_dims_are_padded_to_tiles(head_dim: int, tiles: int) -> None:
    found = pair(*with_head_dim(head_dim))
    assert isinstance(found, Pairing)
    assert found.plan(1).nbytes == 2 * 2 * 2 * (2 * tiles) * 1088  # layers, K and V, heads, tiles of 64 tokens


def test_a_tiling_that_does_not_pad_refuses_head_dims_that_do_not_divide() -> None:
    linear = {"codec": "bfloat16", "banks": 1, "channels": "linear", "tiling": "ascend-nz"}
    assert isinstance(pair(*with_head_dim(80, **linear)), Pairing)
    mismatch = refused(*with_head_dim(72, **linear))["head_dim"]
    assert (mismatch.prefill, mismatch.decode) == ("support for tiles of 16", "72")
    assert "ascend-nz does not pad" in mismatch.fix


@pytest.mark.parametrize(
    ("fields", "name", "here", "there"),
    [
        ({"tiling": "gaudi"}, "tiling", "ttnn, ascend-nz, tpu-8x128, linear-heads, linear-tokens", "gaudi"),
        ({"tiling": "tpu-8x128"}, "kv_dtype", "support for bfloat16", "bfp8"),
        ({"channels": "linear"}, "banks", "1 bank in linear memory", "8"),
        ({"rotary_dim": 66}, "rotary_dim", "even number of at most 64", "66"),
        ({"rotary_dim": 31}, "rotary_dim", "even number of at most 64", "31"),
        ({"channels": "nd_sharded", "shard_rows": 3}, "shard_rows", "whole shards", "shards of 24 pages, units of 16"),
    ],
)
def test_refusals_of_layouts_that_no_device_has(fields: dict[str, Any], name: str, here: str, there: str) -> None:
    mismatch = refused(decode=changed(DECODE, **{f"layout__{field}": value for field, value in fields.items()}))[name]
    assert here in mismatch.prefill
    assert mismatch.decode == there


@pytest.mark.parametrize("shard_rows", [1, 2, 4])
def test_shards_of_whole_units_or_units_of_whole_shards(shard_rows: int) -> None:
    decode = changed(DECODE, layout__channels="nd_sharded", layout__shard_rows=shard_rows)
    assert isinstance(pair(PREFILL, decode), Pairing)


def test_a_send_buffer_that_holds_no_block_is_told_its_size() -> None:
    """One 64-token block of two heads on one chip, K and V of two layers: 2 * 2 * 2 * 4 pages of bfp8."""
    needed = 2 * 2 * 2 * 4 * 1088
    assert isinstance(pair(changed(PREFILL, send_buffer_bytes=needed), DECODE), Pairing)
    mismatch = refused(prefill=changed(PREFILL, send_buffer_bytes=needed - 1))["send_buffer_bytes"]
    assert mismatch.prefill == str(needed - 1)
    assert mismatch.decode == f"{needed} bytes for one block of 64 tokens"
    assert mismatch.fix.endswith(f"send_buffer_bytes on the prefill side to at least {needed}")


def test_every_difference_is_told_at_once() -> None:
    decode = changed(DECODE, model="qwen", shape__dtype="float32", layout__codec="fp8", layout__banks=99)
    assert set(refused(decode=decode)) == {"model", "dtype", "kv_dtype", "banks"}


@pytest.mark.parametrize("rope_half_split", [True, False])
def test_k_in_hfs_order_needs_no_permutation(rope_half_split: bool) -> None:
    decode = changed(DECODE, layout__rope_interleaved=False)
    assert isinstance(pair(changed(PREFILL, rope_half_split=rope_half_split), decode), Pairing)


@pytest.mark.parametrize("field", ["ranks", "block_size"])
@pytest.mark.parametrize("value", [0, -1, 1 << 40])
def test_facts_from_the_wire_are_bounded(field: str, value: int) -> None:
    good = msgspec.to_builtins(PREFILL)
    assert msgspec.convert(good, PrefillFacts) == PREFILL
    with pytest.raises(msgspec.ValidationError, match=field):
        msgspec.convert(good | {field: value}, PrefillFacts)


def test_counts_that_no_deployment_has_are_refused_before_anything_is_made_of_them() -> None:
    """A peer that says 65,536 chips must not have us build their tables: that takes seconds, for each Hello."""
    tracemalloc.start()
    try:
        assert list(refused(decode=changed(DECODE, layout__chips=1 << 16, layout__heads=1))) == ["chips"]
        assert "tensor_parallel_size" in refused(prefill=changed(PREFILL, ranks=1 << 16))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20
