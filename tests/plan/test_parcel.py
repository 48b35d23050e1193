"""How a parcel lies in the send buffer: rows and streams against the oracle's stream order."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hawk_connector.layout.kv_pool import KVPoolLayout
from hawk_connector.plan.parcel import ChipShare, ParcelPlan
from tests.layout.pools import KINDS, pool_of
from tests.oracle.scalar import Pool, stream_pages


def buffers_of(layout: KVPoolLayout) -> list[int]:
    return [0x100080 + index * 0x4000000 for index in range(layout.pools)]


def sent_pages(pool: Pool, block_ids: list[int], heads: tuple[int, ...]) -> list[list[tuple[int, int]]]:
    """The oracle's streams without the pages of other heads than ``heads``."""
    tensors: Any = ("k", "v")
    mine = {
        pool.address(tensor, block, layer, head, token, dim)[:2]
        for tensor, block, layer, head in product(tensors, block_ids, range(pool.layers), heads)
        for token in range(0, pool.tile_rows() * 32, 32)
        for dim in range(0, pool.head_dim, 32)
    }
    return [[page for page in stream if page in mine] for stream in stream_pages(pool, block_ids)]


@st.composite
def plans(draw: st.DrawFn) -> ParcelPlan:
    """One or two chips, each fed some of its heads."""
    heads = draw(st.integers(1, 4))
    layout = KVPoolLayout(
        kind=draw(st.sampled_from(KINDS)),  # type: ignore[arg-type]
        layers=draw(st.integers(1, 3)),
        chips=2,
        heads=heads,
        block_size=draw(st.sampled_from([16, 32, 64])),
        head_dim=draw(st.sampled_from([32, 64, 128])),
        codec=draw(st.sampled_from(["float32", "bfp8", "bfp2"])),
        banks=draw(st.sampled_from([7, 8, 12])),
        alignment=64,
    )
    shares = []
    for chip in draw(st.sampled_from([(0,), (1,), (0, 1)])):
        first = draw(st.integers(0, heads - 1))
        count = draw(st.integers(1, heads - first))
        shares.append(ChipShare(chip, tuple((i, first + i) for i in range(count))))
    return ParcelPlan(layout, tuple(shares), draw(st.integers(1, 3)))


@given(plans())
@settings(max_examples=150, deadline=None)
def test_rows_follow_the_oracles_streams(plan: ParcelPlan) -> None:
    """Row r of the parcel is page r of the streams laid end to end: chip, class, pool, block, page."""
    layout, ids = plan.layout, [5, 0, 3][: plan.blocks]
    pool = pool_of(layout, [0] * layout.banks, buffers_of(layout))
    wanted: list[tuple[int, tuple[int, int]]] = []
    streams = []
    for share in plan.shares:
        heads = tuple(on_chip for _, on_chip in share.heads)
        for cls, pages in enumerate(sent_pages(pool, ids, heads)):
            if pages:
                streams.append((share.chip, cls, len(wanted) * layout.page_pitch, len(pages) * layout.page_pitch))
            wanted.extend((share.chip, page) for page in pages)
    assert plan.rows == len(wanted) and plan.nbytes == len(wanted) * layout.page_pitch
    assert [(s.chip, s.page_class, s.offset, s.length) for s in plan.streams()] == streams
    found: dict[int, tuple[int, tuple[int, int]]] = {}
    columns = layout.head_dim // 32
    for share, layer, (kv, tensor) in product(plan.shares, range(layout.layers), enumerate("kv")):
        rows = plan.page_rows(share, layer, kv)
        assert rows.shape == (plan.blocks, len(share.heads), pool.tile_rows() * columns)
        for (index, block), (i, (_, head)) in product(enumerate(ids), enumerate(share.heads)):
            for tile, row in enumerate(rows[index, i].tolist()):
                where = pool.address(tensor, block, layer, head, tile // columns * 32, tile % columns * 32)  # type: ignore[arg-type]
                assert row not in found
                found[row] = (share.chip, where[:2])
    assert [found[row] for row in range(plan.rows)] == wanted


def test_a_parcel_of_llama_70b() -> None:
    """One 64-token block in bfp8 for four chips: 32 streams of 2 * 174,080 bytes; bf16 would be 1.88 times that."""
    shares = tuple(ChipShare(chip, ((2 * chip, 0), (2 * chip + 1, 1))) for chip in range(4))
    plan = ParcelPlan(KVPoolLayout("cross_layer", 80, 4, 2, 64, 128, "bfp8", 8, 64), shares, 1)
    assert [stream.length for stream in plan.streams()] == [2 * 174_080] * 32
    assert plan.nbytes == 80 * 2 * 8 * 64 * 128 * 17 // 16


def test_a_chip_that_is_not_fed_is_named() -> None:
    plan = ParcelPlan(KVPoolLayout("per_layer", 1, 2, 1, 32, 32, "bfp8", 8, 64), (ChipShare(0, ((0, 0),)),), 1)
    with pytest.raises(ValueError, match="chip 1 is not fed by this plan"):
        plan.first_row(ChipShare(1, ((0, 0),)))
