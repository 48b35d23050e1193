"""Runs, stages and the choice between placements, against the scalar oracle and hand-worked numbers."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hawk_connector.layout.kv_pool import KVPoolLayout, PoolKind
from hawk_connector.plan.parcel import ChipShare, ParcelPlan
from hawk_connector.plan.placement import (
    PlacementCosts,
    PlacementCounts,
    count_placements,
    stage_bytes,
    stream_segments,
)
from hawk_connector.plan.runs import BankRuns, bank_runs, stage_copies
from tests.oracle import scalar

pytestmark = pytest.mark.slow

KIB = 1 << 10


def plan_of(layout: KVPoolLayout, blocks: int) -> ParcelPlan:
    """One rank feeds all heads of all chips."""
    heads = layout.heads
    shares = (ChipShare(c, tuple((c * heads + h, h) for h in range(heads))) for c in range(layout.chips))
    return ParcelPlan(layout, tuple(shares), blocks)


def addresses_of(layout: KVPoolLayout, num_blocks: int, falling: bool = False) -> tuple[int, ...]:
    """Pools one after another, the first one lowest, or highest."""
    size = layout.rule.slots(layout.pool_pages(num_blocks)) * layout.page_pitch
    rising = tuple(0x100080 + index * size for index in range(layout.pools))
    return rising[::-1] if falling else rising


def oracle_pool(layout: KVPoolLayout, addresses: tuple[int, ...]) -> scalar.Pool:
    buffers: Any
    if layout.kind == "cross_layer":
        buffers = {"k": addresses[0], "v": addresses[1]}
    else:
        buffers = [{"k": addresses[2 * i], "v": addresses[2 * i + 1]} for i in range(layout.layers)]
    return scalar.Pool(
        layout.kind,
        layout.layers,
        layout.heads,
        layout.block_size,
        layout.head_dim,
        (0,) * layout.banks,
        buffers,
        layout.codec,  # type: ignore[arg-type]
        layout.alignment,
    )


def llama_70b(kind: PoolKind) -> tuple[ParcelPlan, BankRuns]:
    """1,024 tokens in 16 scattered blocks, 8 heads on 4 chips of 8 banks, bfp8."""
    layout = KVPoolLayout(kind, 80, 4, 2, 64, 128, "bfp8", 8, 64)
    plan = plan_of(layout, 16)
    return plan, bank_runs(plan, [2 * i + 1 for i in range(16)], addresses_of(layout, 40), 40)


def test_llama_70b_in_pools_of_one_layer_is_staged() -> None:
    """80 layers x K and V x 16 blocks x 8 banks x 4 chips = 81,920 reads of two pages of 1,088 bytes; a stream for
    each bank of each chip is 32."""
    plan, runs = llama_70b("per_layer")
    assert set(runs.length.tolist()) == {2176}
    assert count_placements(plan, runs) == PlacementCounts(
        nbytes=178_257_920, pool_reads=81_920, staged_reads=32, copies=81_920, copied_bytes=178_257_920 // 4
    )
    assert count_placements(plan, runs).choice(PlacementCosts()) == "staged"
    segments = stream_segments(plan, 0, [0] * 32)
    assert set(segments.length.tolist()) == {178_257_920 // 32} == {stage_bytes(plan)}
    assert stage_copies(plan, runs, 0).crossing == 0


def test_llama_70b_in_pools_across_layers_is_not() -> None:
    """A block's whole depth is one run a bank: 2 x 16 x 8 x 4 = 1,024 reads of 80 x 2 pages."""
    plan, runs = llama_70b("cross_layer")
    assert set(runs.length.tolist()) == {174_080}
    counts = count_placements(plan, runs)
    assert (counts.pool_reads, counts.staged_reads) == (1024, 32)
    # The reads are long enough to cost nothing beside their bytes; copies add a fifth of the busiest chip's.
    assert counts.cost("pool", PlacementCosts()) == 178_257_920
    assert counts.cost("staged", PlacementCosts()) == 178_257_920 + 44_564_480 / 5
    assert counts.choice(PlacementCosts()) == "pool"


@pytest.mark.parametrize(
    ("pool_reads", "staged_reads", "copied", "chosen"),
    [
        # 1 MiB in reads as long as they are free: staging only adds copies.
        (64, 8, 1 << 20, "pool"),
        # The same in reads of half that length costs 2 MiB; staged 1 MiB and a fifth.
        (128, 8, 1 << 20, "staged"),
        # 77 reads cost 1,261,568 bytes, staging 1,258,291; 76 cost 1,245,184.
        (77, 8, 1 << 20, "staged"),
        (76, 8, 1 << 20, "pool"),
        # As many reads either way.
        (128, 128, 1 << 20, "pool"),
        (8, 8, 0, "pool"),
    ],
)
def test_the_choice_is_by_counts(pool_reads: int, staged_reads: int, copied: int, chosen: str) -> None:
    counts = PlacementCounts(1 << 20, pool_reads, staged_reads, pool_reads, copied)
    assert counts.choice(PlacementCosts(read_bytes=16 * KIB, copy_share=0.2)) == chosen


@st.composite
def parcels(draw: st.DrawFn) -> tuple[KVPoolLayout, list[int], int, tuple[int, ...]]:
    """A layout, block ids, leading blocks to skip, and the pools' addresses."""
    layout = KVPoolLayout(
        draw(st.sampled_from(["per_layer", "cross_layer"])),
        draw(st.integers(1, 3)),
        draw(st.integers(1, 2)),
        draw(st.integers(1, 3)),
        draw(st.sampled_from([32, 64])),
        draw(st.sampled_from([32, 64])),
        "bfp4",
        draw(st.sampled_from([1, 7, 8, 12])),
        64,
    )
    block_ids = draw(st.lists(st.integers(0, 8), min_size=1, max_size=4, unique=True))
    skip = draw(st.integers(0, len(block_ids) - 1))
    return layout, block_ids, skip, addresses_of(layout, 9, draw(st.booleans()))


@given(parcels())
@settings(deadline=None, max_examples=60)
def test_runs_are_the_oracles(parcel: tuple[KVPoolLayout, list[int], int, tuple[int, ...]]) -> None:
    layout, block_ids, _, addresses = parcel
    plan = plan_of(layout, len(block_ids))
    runs = bank_runs(plan, block_ids, addresses, 9)
    pool = oracle_pool(layout, addresses)
    found = _page_places(runs, layout.page_pitch)
    wanted = {}
    offset = 0
    for chip in range(layout.chips):
        for stream in scalar.stream_pages(pool, block_ids):
            for bank, address in stream:
                wanted[offset] = (chip, bank, address)
                offset += layout.page_pitch
    assert found == wanted
    assert runs.nbytes == plan.nbytes


@given(parcels())
@settings(deadline=None, max_examples=60)
def test_copies_bring_each_staged_page_to_where_its_run_says(
    parcel: tuple[KVPoolLayout, list[int], int, tuple[int, ...]],
) -> None:
    """Page by page: parcel -> stream's stage -> pool; with leading blocks skipped, nothing of them is copied."""
    layout, block_ids, skip, addresses = parcel
    plan = plan_of(layout, len(block_ids))
    runs = bank_runs(plan, block_ids, addresses, 9, skip)
    stage = 1 << 30
    copies = stage_copies(plan, runs, stage)
    staged = {}  # (chip, bank, address in the bank) -> offset in the parcel
    for stream in plan.streams():
        assert stream.length <= stage_bytes(plan)
        for byte in range(0, stream.length, layout.page_pitch):
            staged[stream.chip, stream.page_class, stage + byte] = stream.offset + byte
    found = {}
    for chip, source_bank, source, bank, address, length in zip(
        copies.chip, copies.source_bank, copies.source, copies.bank, copies.address, copies.length, strict=True
    ):
        for byte in range(0, int(length), layout.page_pitch):
            found[staged[chip, source_bank, source + byte]] = (chip, bank, address + byte)
    assert found == _page_places(runs, layout.page_pitch)
    if layout.pages_per_unit % layout.banks == 0:
        assert copies.crossing == 0


def test_a_run_that_goes_on_into_the_next_stream_is_copied_in_two() -> None:
    """Hand-worked: 7 banks, units of 2 pages, 5 blocks: two slots a bank; V's pool lies below K's.

    Blocks 0 and 4: the stream of class 0 ends with V's page 8, bank 1, slot 1.  That of class 1 begins with K's page
    1, bank 1, slot 0 of K's pool, which is the next byte of the bank.  One run, but from two stages.
    """
    layout = KVPoolLayout("per_layer", 1, 1, 1, 32, 64, "bfp4", 7, 64)
    plan = plan_of(layout, 2)
    runs = bank_runs(plan, [0, 4], (2 * 576, 0), 5)
    stage = 1 << 20
    copies = stage_copies(plan, runs, stage)
    rows = zip(copies.source_bank, copies.source - stage, copies.bank, copies.address, copies.length, strict=True)
    # (stage's bank, page in it, bank, slot, pages)
    found = [(int(s), int(o) // 576, int(b), int(a) // 576, int(n) // 576) for s, o, b, a, n in rows]
    assert found == [
        (0, 0, 0, 2, 1),  # K, block 0
        (0, 1, 1, 3, 1),  # K, block 4: page 8
        (0, 2, 0, 0, 1),  # V, block 0
        (0, 3, 1, 1, 1),  # V, block 4
        (1, 0, 1, 2, 1),  # K, block 0: page 1
        (1, 1, 2, 3, 1),  # K, block 4: page 9
        (1, 2, 1, 0, 1),  # V, block 0
        (1, 3, 2, 1, 1),  # V, block 4
    ]
    assert (runs.count, copies.crossing) == (7, 4)


def _page_places(runs: BankRuns, pitch: int) -> dict[int, tuple[int, int, int]]:
    """Offset of each page in the parcel -> (chip, bank, address)."""
    found = {}
    for offset, chip, bank, address, length in zip(
        runs.offset, runs.chip, runs.bank, runs.address, runs.length, strict=True
    ):
        for byte in range(0, int(length), pitch):
            assert int(offset) + byte not in found
            found[int(offset) + byte] = (int(chip), int(bank), int(address) + byte)
    return found
