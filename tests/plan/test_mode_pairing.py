"""Who may feed whom in modes direct and host: equal caches, known places, and every refusal with its flag."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from hawk_connector.layout.cache_layout import CacheLayout, ElementPlace
from hawk_connector.layout.kv_pool import KVPoolLayout
from hawk_connector.layout.kv_shape import KVShape
from hawk_connector.plan.pairing import DecodeFacts, DirectPairing, HostPairing, PrefillFacts, pair
from hawk_connector.plan.parcel_digest import wanted_ranges

SHAPE = KVShape(layers=2, kv_heads=4, head_dim=64, dtype="float32")
POOLS = KVPoolLayout("cross_layer", 2, 2, 2, 64, 64, "bfp8", 8, 64)


def cache(heads: int = 4, block_size: int = 16, **change: Any) -> CacheLayout:
    nbytes = 2 * heads * block_size * 64 * 4
    k, v = (ElementPlace(kv * 64, block_size * 128, 128, 1) for kv in (0, 1))
    found = CacheLayout("CPU_ATTN vec", 2, heads, 64, block_size, "float32", nbytes, nbytes, k, v)
    return msgspec.structs.replace(found, **change)


def prefill(ranks: int = 1, rank: int = 0, buffer: int = 1 << 20, **change: Any) -> PrefillFacts:
    layout = cache(4 // ranks, **change)
    return PrefillFacts(SHAPE, "m", ranks, rank, layout.block_tokens, buffer, cache=layout)


def direct(**change: Any) -> DecodeFacts:
    return DecodeFacts(SHAPE, "m", cache(**change), "direct")


HOST = DecodeFacts(SHAPE, "m", POOLS, "host")


def refused(here: PrefillFacts, there: DecodeFacts) -> dict[str, str]:
    """The fix for each field that differs."""
    verdict = pair(here, there)
    assert isinstance(verdict, tuple)
    return {mismatch.field: mismatch.fix for mismatch in verdict}


def test_equal_caches_pair() -> None:
    found = pair(prefill(), direct())
    assert isinstance(found, DirectPairing) and found.mode == "direct"
    assert (found.block_size, found.chips, found.heads) == (16, 1, 4)
    assert [share.heads for share in found.shares] == [((0, 0), (1, 1), (2, 2), (3, 3))]
    # K and V of 2 layers, 4 heads of 64 floats, 3 blocks of 16 tokens.
    assert found.parcel(5, 3, 1000).nbytes == 3 * 16 * 4 * 64 * 4 * 2 * 2


def test_vllms_blocks_of_several_of_the_caches_pair() -> None:
    found = pair(prefill(split=4), direct(split=4))
    assert isinstance(found, DirectPairing)
    assert (found.block_size, found.parcel(0, 1, 64).nbytes) == (64, 64 * 4 * 64 * 4 * 2 * 2)


@pytest.mark.parametrize(
    ("here", "there", "field", "fix"),
    [
        ({"block_size": 32}, {}, "block_size", "--block-size"),
        ({"split": 2}, {}, "block_size", "--block-size"),
        ({"codec": "bfloat16", "block_bytes": 1 << 14, "block_stride": 1 << 14}, {}, "kv cache dtype", "--dtype"),
        ({"k": ElementPlace(64, 2048, 128, 1)}, {}, "place of K", "attention backend"),
        ({"v": None}, {}, "place of V", "attention backend"),
        ({"block_stride": 1 << 16}, {}, "block_stride", "attention backend"),
        ({"k": None, "v": None, "backend": "CPU_ATTN amx"}, {"k": None, "v": None}, "attention backend", "processor"),
        ({"ranks": 2}, {}, "tensor_parallel_size", "--tensor-parallel-size 1 on both sides"),
    ],
)
def test_caches_that_differ_are_refused_by_field(
    here: dict[str, Any], there: dict[str, Any], field: str, fix: str
) -> None:
    assert fix in refused(prefill(**here), direct(**there))[field]


def test_opaque_caches_of_the_same_kernels_pair_and_others_of_known_places_may_have_any() -> None:
    amx = {"k": None, "v": None, "backend": "CPU_ATTN amx"}
    assert isinstance(pair(prefill(**amx), direct(**amx)), DirectPairing)
    assert isinstance(pair(prefill(backend="FLASH_ATTN"), direct(backend="FLASHINFER")), DirectPairing)
    for decode in (HOST, DecodeFacts(SHAPE, "m", POOLS)):
        assert "--dtype float32" in refused(prefill(**amx), decode)["kv cache"]


def test_a_prefill_side_that_does_not_know_its_cache_serves_mode_hawk_alone() -> None:
    unknown = PrefillFacts(SHAPE, "m", 1, 0, 16, 1 << 20)
    assert not isinstance(pair(unknown, DecodeFacts(SHAPE, "m", POOLS)), tuple)
    assert list(refused(unknown, HOST)) == list(refused(unknown, direct())) == ["kv cache"]


def test_layout_and_mode_belong_together() -> None:
    for layout, mode in ((POOLS, "direct"), (cache(), "hawk"), (cache(), "host")):
        with pytest.raises(ValueError, match="expected a layout of mode"):
            DecodeFacts(SHAPE, "m", layout, mode)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("block_size", "granule", "parcels"),
    [
        # (first block, blocks) -> source blocks, of a prompt of 333 tokens in decode's blocks of 64.
        (16, 1, {(0, 2): 8, (4, 2): 5}),
        (128, 2, {(0, 2): 1, (4, 2): 1}),
        (48, 3, {(0, 3): 4, (3, 3): 3}),
    ],
)
def test_raw_parcels_are_whole_source_blocks(
    block_size: int, granule: int, parcels: dict[tuple[int, int], int]
) -> None:
    found = pair(prefill(block_size=block_size), HOST)
    assert isinstance(found, HostPairing) and found.granule == granule and found.mode == "host"
    for (first, blocks), count in parcels.items():
        plan = found.parcel(first, blocks, 333)
        assert plan.source_blocks == count
        assert plan.nbytes == count * block_size * 4 * 64 * 4 * 2 * 2
        assert plan.packed == found.plan(blocks)


def test_what_is_wanted_of_a_raw_parcel_begins_with_a_source_block() -> None:
    found = pair(prefill(), HOST)
    assert isinstance(found, HostPairing)
    plan = found.parcel(0, 5, 5 * 64 - 7)
    each = 16 * 4 * 64 * 4 * 2 * 2
    assert plan.source_blocks == 20
    assert list(wanted_ranges(plan, 0)) == [(0, 20 * each)]
    assert list(wanted_ranges(plan, 3)) == [(12 * each, 8 * each)]
    assert list(wanted_ranges(plan, 5)) == []
    assert [plan.source_end(n) for n in range(6)] == [0, 4, 8, 12, 16, 20]


def test_a_rank_that_feeds_nobody_sends_nothing() -> None:
    shape = KVShape(2, 1, 64, "float32")
    layout = KVPoolLayout("cross_layer", 2, 1, 1, 64, 64, "bfp8", 8, 64)
    facts = PrefillFacts(shape, "m", 2, 1, 16, 1 << 20, cache=cache(1))
    found = pair(facts, DecodeFacts(shape, "m", layout, "host"))
    assert isinstance(found, HostPairing) and found.shares == ()
    assert found.parcel(0, 2, 100).nbytes == 0


def test_a_send_buffer_that_holds_no_raw_parcel_is_told_its_size() -> None:
    least = 2 * 64 * 4 * 64 * 4 * 2 * 2  # decode's blocks of 64 and blocks of 128 meet after 128 tokens
    verdict = pair(prefill(block_size=128, buffer=least - 1), HOST)
    assert isinstance(verdict, tuple)
    assert [(m.field, str(least) in m.fix) for m in verdict] == [("send_buffer_bytes", True)]
    assert not isinstance(pair(prefill(block_size=128, buffer=least), HOST), tuple)


def test_a_source_whose_elements_leave_their_block_is_refused() -> None:
    """What a peer says of its cache is used to look into memory: it has to be looked at first."""
    far = ElementPlace(1 << 40, 2048, 128, 1)
    assert list(refused(prefill(k=far), HOST)) == ["cache layout"]
    assert list(refused(prefill(k=far), direct(k=far))) == ["cache layout"]
