"""Reads counted and placed against the oracle's runs; published figures of Llama-3.1-70B."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hawk_connector.layout.kv_pool import KVPoolLayout
from hawk_connector.plan.parcel import ChipShare, ParcelPlan
from hawk_connector.plan.segments import PoolPlacement, Segments, pool_segments
from tests.layout.pools import KINDS, pool_of
from tests.oracle.scalar import expected_runs, expected_segments
from tests.plan.test_parcel import sent_pages

REGION = 0x7F00_0000_0000
CHIP = 1 << 40
BANK = 1 << 34
"""Made-up host addresses: no memory is touched here.  A pool's device address is below BANK."""


def laid_out(layout: KVPoolLayout) -> tuple[PoolPlacement, list[int]]:
    buffers = [0x100080 + index * 0x4000000 for index in range(layout.pools)]
    origins = [[CHIP * (chip + 1) + BANK * bank for bank in range(layout.banks)] for chip in range(layout.chips)]
    return PoolPlacement(np.array(origins, dtype=np.int64), tuple(buffers), 1000), buffers


def whole(layout: KVPoolLayout, blocks: int) -> ParcelPlan:
    """One rank with all heads feeds all chips."""
    shares = tuple(
        ChipShare(chip, tuple((chip * layout.heads + i, i) for i in range(layout.heads)))
        for chip in range(layout.chips)
    )
    return ParcelPlan(layout, shares, blocks)


def segments_of(layout: KVPoolLayout, block_ids: list[int], each: int | None = None) -> list[Segments]:
    placement, _ = laid_out(layout)
    step = each or len(block_ids)
    cuts = [block_ids[first : first + step] for first in range(0, len(block_ids), step)]
    return [pool_segments(whole(layout, len(ids)), REGION, ids, placement) for ids in cuts]


def count(layout: KVPoolLayout, block_ids: list[int], each: int | None = None) -> int:
    return sum(part.count for part in segments_of(layout, block_ids, each))


layouts = st.builds(
    KVPoolLayout,
    kind=st.sampled_from(KINDS),
    layers=st.integers(1, 4),
    chips=st.integers(1, 3),
    heads=st.integers(1, 4),
    block_size=st.sampled_from([16, 32, 64, 128]),
    head_dim=st.sampled_from([32, 64, 128]),
    codec=st.sampled_from(["float32", "bfloat16", "bfp8", "bfp4", "bfp2"]),
    banks=st.sampled_from([1, 7, 8, 12]),
    alignment=st.sampled_from([32, 64]),
)
scattered = st.lists(st.integers(0, 40), min_size=1, max_size=6, unique=True)
neighbours = st.builds(lambda first, n: list(range(first, first + n)), st.integers(0, 20), st.integers(1, 6))
block_ids = st.one_of(scattered, neighbours, neighbours.map(lambda ids: ids[::-1]))


@given(layouts, block_ids)
@settings(max_examples=200, deadline=None)
def test_reads_are_the_oracles_runs(layout: KVPoolLayout, ids: list[int]) -> None:
    """Same runs in the same order, and each read from where the streams, end to end, have it."""
    (segments,) = segments_of(layout, ids)
    _, buffers = laid_out(layout)
    runs = expected_runs(pool_of(layout, [BANK * bank for bank in range(layout.banks)], buffers), ids)
    wanted, remote = [], REGION
    for chip in range(layout.chips):
        for run in runs:
            wanted.append((remote, CHIP * (chip + 1) + run.address, run.length))
            remote += run.length
    found = zip(segments.remote.tolist(), segments.local.tolist(), segments.length.tolist(), strict=True)
    assert list(found) == wanted
    assert segments.count == len(wanted)
    assert segments.nbytes == remote - REGION == whole(layout, len(ids)).nbytes


@given(layouts, block_ids, st.integers(1, 4))
@settings(max_examples=100, deadline=None)
def test_parcels_are_counted_as_the_oracle_counts_them(layout: KVPoolLayout, ids: list[int], each: int) -> None:
    _, buffers = laid_out(layout)
    pool = pool_of(layout, [0] * layout.banks, buffers)
    assert count(layout, ids, each) == expected_segments(pool, ids, chips=layout.chips, blocks_per_parcel=each)


@given(layouts, block_ids, st.data())
@settings(max_examples=100, deadline=None)
def test_a_rank_with_some_of_the_heads(layout: KVPoolLayout, ids: list[int], data: st.DataObject) -> None:
    """Cut wherever the rank's own stream, or the bank, jumps."""
    first = data.draw(st.integers(0, layout.heads - 1))
    heads = tuple(range(first, first + data.draw(st.integers(1, layout.heads - first))))
    chip = data.draw(st.integers(0, layout.chips - 1))
    plan = ParcelPlan(layout, (ChipShare(chip, tuple(enumerate(heads))),), len(ids))
    placement, buffers = laid_out(layout)
    segments = pool_segments(plan, REGION, ids, placement)
    pool = pool_of(layout, [BANK * bank for bank in range(layout.banks)], buffers)
    size, wanted = layout.page_pitch, []
    for stream in sent_pages(pool, ids, heads):
        after = None
        for bank, address in stream:
            if (bank, address) == after:
                wanted[-1][1] += size
            else:
                wanted.append([CHIP * (chip + 1) + address, size])
            after = (bank, address + size)
    assert list(map(list, zip(segments.local.tolist(), segments.length.tolist(), strict=True))) == wanted


@given(layouts, scattered.filter(lambda ids: len(ids) > 1), st.data())
@settings(max_examples=100, deadline=None)
def test_blocks_left_out_at_either_end_leave_the_others_reads(
    layout: KVPoolLayout, ids: list[int], data: st.DataObject
) -> None:
    skip = data.draw(st.integers(0, len(ids)))
    end = data.draw(st.integers(skip, len(ids)))
    placement, _ = laid_out(layout)
    plan = whole(layout, len(ids))
    found = pool_segments(plan, REGION, [-1] * skip + ids[skip:end], placement, skip)
    units = (end - skip) * layout.pools * layout.chips
    assert found.nbytes == units * layout.unit_bytes
    page = {(r, x) for _, r, x in _pages(pool_segments(plan, REGION, ids, placement), layout.page_pitch)}
    assert {(r, x) for _, r, x in _pages(found, layout.page_pitch)} <= page
    if skip < end:
        alone = pool_segments(whole(layout, end - skip), REGION, ids[skip:end], placement)
        landed = [x for _, _, x in _pages(found, layout.page_pitch)]
        assert sorted(landed) == sorted(x for _, _, x in _pages(alone, layout.page_pitch))


def _pages(segments: Segments, pitch: int) -> list[tuple[int, int, int]]:
    reads = zip(segments.remote.tolist(), segments.local.tolist(), segments.length.tolist(), strict=True)
    return [(i, remote + at, local + at) for i, (remote, local, n) in enumerate(reads) for at in range(0, n, pitch)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("banks", [7, 8, 12])
@pytest.mark.parametrize("chips", [1, 2, 4])
def test_scattered_blocks_cost_a_read_per_bank(kind: Any, banks: int, chips: int) -> None:
    """U is at least NB: NB reads for every block, chip and pool."""
    layout = KVPoolLayout(kind, 2, chips, 3, 64, 64, "bfp8", banks, 32)
    assert layout.pages_per_unit >= banks
    assert count(layout, [9, 2, 30, 17, 5]) == banks * 5 * chips * layout.pools


@pytest.mark.parametrize(
    ("kind", "heads", "banks"),
    [("per_layer", 2, 8), ("cross_layer", 2, 8), ("per_layer", 3, 12), ("cross_layer", 7, 7)],
)
@pytest.mark.parametrize("chips", [1, 2, 4])
def test_consecutive_blocks_merge(kind: Any, heads: int, banks: int, chips: int) -> None:
    """U % NB == 0: a read for every chip, bank and pool of a parcel."""
    layout = KVPoolLayout(kind, 2, chips, heads, 64, 64, "bfp8", banks, 32)
    assert layout.pages_per_unit % banks == 0
    each = banks * chips * layout.pools
    assert count(layout, [4, 5, 6, 7, 8]) == each
    assert count(layout, [4, 5, 6, 7, 8], each=2) == 3 * each
    assert count(layout, [8, 7, 6, 5, 4]) == 5 * each  # descending: nothing merges
    assert count(layout, [4, 5, 20, 21, 22]) == 2 * each


def test_consecutive_blocks_do_not_merge_where_units_do_not_fill_the_banks() -> None:
    """SmolLM2-135M with 32-token blocks on 8 banks: U = 180; Llama's tiles on 7 banks."""
    for layout in (
        KVPoolLayout("cross_layer", 30, 1, 3, 32, 64, "bfp8", 8, 64),
        KVPoolLayout("cross_layer", 80, 1, 2, 64, 128, "bfp8", 7, 64),
    ):
        assert layout.pages_per_unit % layout.banks
        assert count(layout, [3, 4, 5]) == 3 * 2 * layout.banks


@pytest.mark.parametrize("kind", KINDS)
def test_a_pool_that_begins_where_another_ends_joins_it(kind: Any) -> None:
    """Two blocks fill a pool, and the pools touch: a bank's part of the transfer is one read."""
    layout = KVPoolLayout(kind, 2, 1, 2, 64, 64, "bfp8", 8, 64)
    placement, _ = laid_out(layout)
    size = layout.rule.slots(layout.pool_pages(2)) * layout.page_pitch
    touching = PoolPlacement(placement.origins, tuple(i * size for i in range(layout.pools)), 2)
    segments = pool_segments(whole(layout, 2), REGION, [0, 1], touching)
    assert segments.length.tolist() == [layout.pools * size] * 8


def test_reads_do_not_join_over_a_skipped_block() -> None:
    """The last block read ends a pool, the first begins the next; but in the parcel a skipped block is between."""
    layout = KVPoolLayout("cross_layer", 1, 1, 2, 64, 64, "bfp8", 8, 64)
    placement, _ = laid_out(layout)
    size = layout.rule.slots(layout.pool_pages(3)) * layout.page_pitch
    touching = PoolPlacement(placement.origins, (0, size), 3)
    segments = pool_segments(whole(layout, 3), REGION, [-1, 0, 2], touching, skip_blocks=1)
    assert layout.pages_per_unit == 8  # one page a bank, block and pool
    assert segments.length.tolist() == [1088] * 8 * 2 * 2
    row = [(REGION + (bank * 6 + pool * 3 + block) * 1088) for bank in range(8) for pool in (0, 1) for block in (1, 2)]
    assert segments.remote.tolist() == row


def test_reads_never_join_across_banks() -> None:
    """Neighbouring banks may touch in host memory; a read that went on from one to the next would leave its window."""
    layout = KVPoolLayout("cross_layer", 1, 1, 2, 32, 64, "bfp8", 2, 64)  # two pages a bank: one block fills it
    size = layout.rule.slots(layout.pool_pages(1)) * layout.page_pitch
    origins = np.array([[CHIP, CHIP + 2 * size]], dtype=np.int64)
    segments = pool_segments(whole(layout, 1), REGION, [0], PoolPlacement(origins, (0, size), 1))
    assert segments.local.tolist() == [CHIP, CHIP + 2 * size]
    assert segments.length.tolist() == [2 * size, 2 * size]


# ---- Llama-3.1-70B on four chips of eight banks, 64-token blocks: published figures ----------------------


def llama_70b(kind: Any, codec: str = "bfp8") -> KVPoolLayout:
    return KVPoolLayout(kind, 80, 4, 2, 64, 128, codec, 8, 64)


def test_llama_70b_cross_layer() -> None:
    """A block is 174,080 bytes for every chip, bank, and K and V; 1,024 tokens are 1,024 reads, or 64 merged."""
    layout = llama_70b("cross_layer")
    (one,) = segments_of(layout, [11])
    assert one.length.tolist() == [174_080] * 64
    assert count(layout, list(range(0, 32, 2))) == 1024
    (merged,) = segments_of(layout, list(range(16)))
    assert merged.length.tolist() == [16 * 174_080] * 64


def test_llama_70b_per_layer() -> None:
    """1,024 tokens in scattered blocks: 81,920 reads of 2,176 bytes; 1.0625 bytes for each of 167,772,160 elements."""
    (segments,) = segments_of(llama_70b("per_layer"), list(range(0, 32, 2)))
    assert segments.count == 81_920
    assert set(segments.length.tolist()) == {2_176}
    assert segments.nbytes == 178_257_920 == 2 * 80 * 8 * 128 * 1024 * 17 // 16
    (wide,) = segments_of(llama_70b("per_layer", "bfloat16"), list(range(0, 32, 2)))
    assert wide.nbytes == 335_544_320


# ---- refusals, batches --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ids", "range_"), [([0, 1000], r"0\.\.1000"), ([-1, 5], r"-1\.\.5")])
def test_block_ids_must_lie_in_the_pool(ids: list[int], range_: str) -> None:
    with pytest.raises(ValueError, match=rf"must lie in 0\.\.999; got {range_}"):
        segments_of(llama_70b("cross_layer"), ids)


@pytest.mark.parametrize(("ids", "skip"), [([1, 2, 3], 0), ([1], 2)])
def test_more_blocks_than_a_parcel_has_or_fewer_than_are_skipped_are_refused(ids: list[int], skip: int) -> None:
    layout = llama_70b("cross_layer")
    with pytest.raises(ValueError, match=f"the parcel has 2 blocks, {skip} of them skipped; got {len(ids)} block ids"):
        pool_segments(whole(layout, 2), REGION, ids, laid_out(layout)[0], skip)


def test_segments_come_in_threes() -> None:
    one, two = np.zeros(1, dtype=np.int64), np.zeros(2, dtype=np.int64)
    with pytest.raises(ValueError, match="2 remote, 1 local, 1 lengths"):
        Segments(two, one, one)


@given(st.integers(0, 50), st.integers(1, 20))
@settings(deadline=None)
def test_batches_are_the_same_reads_in_order(n: int, size: int) -> None:
    numbers = np.arange(n, dtype=np.int64)
    batches = Segments(numbers, numbers + 100, numbers + 200).batches(size)
    assert all(1 <= batch.count <= size for batch in batches)
    assert len(batches) == -(-n // size)
    assert [x for batch in batches for x in batch.remote.tolist()] == list(range(n))
    assert [x for batch in batches for x in batch.local.tolist()] == list(range(100, 100 + n))
    assert [x for batch in batches for x in batch.length.tolist()] == list(range(200, 200 + n))
