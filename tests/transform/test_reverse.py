"""Banks back into row caches: what lies in the banks is the oracle's, what comes out must be what went in."""

from __future__ import annotations

import ctypes
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hawk_connector.plan.segments import pool_segments
from hawk_connector.transform.reference import unpack_parcel
from tests.oracle.scalar import PAGE_BYTES, Tensor, decode_page, k_order
from tests.transform.crossing import Banks, Crossing, Prefill, carry, oracle_banks, pairing_of, parcels
from tests.transform.test_crossing import crossings

pytestmark = pytest.mark.slow

LOSSLESS = [("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "float32"), ("float16", "float32")]
SEVEN = 7.0
"""What the caches hold before anything comes back."""


def bring_back(crossing: Crossing, prefill: Prefill, banks: Banks, each: int | None = None) -> list[torch.Tensor]:
    """Each rank's cache after every parcel was read out of the banks: flat, in memory order."""
    flats = [torch.full_like(flat, SEVEN) for flat in prefill.flat]
    empty = replace(prefill, flat=tuple(flats))
    ids = crossing.block_ids()
    for rank in range(crossing.ranks):
        pairing = pairing_of(crossing, rank)
        layers = empty.layers(rank, crossing)
        for first, blocks in parcels(crossing.blocks, each):
            plan = pairing.plan(blocks)
            parcel = torch.full((plan.nbytes,), 0xA5, dtype=torch.uint8)
            forward = pool_segments(plan, parcel.data_ptr(), ids[first : first + blocks], banks.placement)
            back = forward.reversed()
            for source, target, length in zip(
                back.remote.tolist(), back.local.tolist(), back.length.tolist(), strict=True
            ):
                ctypes.memmove(target, source, length)
            unpack_parcel(parcel, plan, layers, torch.tensor(prefill.table), first, crossing.tokens)
    return flats


def bits_of(flat: torch.Tensor) -> torch.Tensor:
    return flat.view(torch.int32 if flat.dtype == torch.float32 else torch.int16)


def assert_returned(crossing: Crossing, each: int | None = None, *, by_oracle: bool = True) -> None:
    """Every element of the request is back where it was, bit for bit, and no other element was touched."""
    prefill, banks = Prefill.of(crossing), Banks(crossing)
    if by_oracle:
        banks.memory[:] = banks.with_pages(oracle_banks(crossing, prefill, banks))
    else:
        carry(crossing, prefill, banks)
    # The poison of the forward way marks the rows that are not the request's.
    for rank, (before, after) in enumerate(zip(prefill.flat, bring_back(crossing, prefill, banks, each), strict=True)):
        if not pairing_of(crossing, rank).shares:
            assert (after == SEVEN).all()  # a rank with copies of heads that another one sends
            continue
        poisoned = before.isnan()
        assert torch.equal(bits_of(after)[~poisoned], bits_of(before)[~poisoned])
        assert (after[poisoned] == SEVEN).all()


@pytest.mark.parametrize(("dtype", "codec"), LOSSLESS)
@pytest.mark.parametrize("family", ["LBHNC", "LBNHC", "cpu"])
def test_lossless_numbers_come_back(family: Any, dtype: str, codec: Any) -> None:
    dtype = "float32" if family == "cpu" else dtype
    codec = "float32" if family == "cpu" else codec
    crossing = Crossing(family=family, dtype=dtype, codec=codec, kv_heads=2, layers=2, source_block=32, tokens=70)
    assert_returned(crossing)


@pytest.mark.parametrize("chips", [1, 2, 4, 8])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_any_tensor_parallelism(ranks: int, chips: int) -> None:
    crossing = Crossing(kv_heads=4, ranks=ranks, chips=chips, head_dim=32, block_size=32, tokens=40, layers=1)
    assert_returned(crossing, by_oracle=chips <= 2)


@pytest.mark.parametrize("each", [1, 2])
def test_parcel_by_parcel(each: int) -> None:
    assert_returned(Crossing(block_size=32, tokens=111, layers=2, source_block=48), each)


@given(crossings(), st.sampled_from(LOSSLESS), st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_reverse_of_forward_is_nothing(crossing: Crossing, numbers: tuple[str, Any], data: st.DataObject) -> None:
    """Any crossing with a codec that keeps its numbers; the product's own bytes, which ``test_any_crossing`` checks."""
    dtype, codec = ("float32", "float32") if crossing.family == "cpu" else numbers
    crossing = replace(crossing, dtype=dtype, codec=codec, poison=math.nan)
    assert_returned(crossing, data.draw(st.none() | st.integers(1, crossing.blocks)), by_oracle=False)


@pytest.mark.parametrize("codec", ["bfp8", "bfp4", "bfp2"])
def test_block_floats_come_back_as_the_oracle_reads_them(codec: Any) -> None:
    crossing = Crossing(codec=codec, kv_heads=2, layers=2, block_size=32, tokens=40, source_block=16, head_dim=80)
    prefill, banks = Prefill.of(crossing), Banks(crossing)
    pages = oracle_banks(crossing, prefill, banks)
    banks.memory[:] = banks.with_pages(pages)
    (after,) = bring_back(crossing, prefill, banks)
    back = Prefill(prefill.source, (after,), prefill.table, prefill.heads).kv()
    values = {
        (bank, address): decode_page(page, codec)
        for (_, bank), of_bank in pages.items()
        for address, page in of_bank.items()
    }
    assert all(len(page) == PAGE_BYTES[codec] for of_bank in pages.values() for page in of_bank.values())
    tensors: tuple[Tensor, ...] = ("k", "v")
    for tensor in tensors:
        for layer in range(2):
            for head in range(2):
                for token in range(40):
                    row = back(layer, tensor, head, token)
                    for place in range(80):
                        block, row_of_block = crossing.block_ids()[token // 32], token % 32
                        bank, address, _ = banks.pool.address(tensor, block, layer, head, row_of_block, place)
                        wanted = values[bank, address][row_of_block][place % 32]
                        assert row[k_order(place, 80, 80 if tensor == "k" else 0)] == wanted
