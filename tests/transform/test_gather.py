"""Re-blocking a request's tokens against plain indexing, a parcel at a time."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hawk_connector.layout.kv_pool import KVPoolLayout
from hawk_connector.transform.program import compile_program
from hawk_connector.transform.reference import gather_blocks, to_pages
from tests.oracle.scalar import k_order, tile_position

TABLE = [4, 1, 3]


@given(
    st.sampled_from([16, 32, 48]),
    st.sampled_from([16, 32, 64]),
    st.integers(0, 12),
    st.integers(1, 4),
    st.data(),
)
@settings(deadline=None)
def test_tokens_are_found_and_the_rest_is_zero(
    source_block: int, block_size: int, first_block: int, blocks: int, data: st.DataObject
) -> None:
    """A parcel may begin, and end, past the last token and past the last source block."""
    tokens = data.draw(st.integers(1, len(TABLE) * source_block))
    cache = torch.arange(1.0, 1 + 5 * 2 * source_block * 3).reshape(5, 2, source_block, 3)
    found = gather_blocks(cache, torch.tensor(TABLE), first_block * block_size, blocks, block_size, tokens)
    assert found.shape == (blocks, 2, block_size, 3)
    for block in range(blocks):
        for row in range(block_size):
            token = (first_block + block) * block_size + row
            if token < tokens:
                wanted = cache[TABLE[token // source_block], :, token % source_block].tolist()
            else:
                wanted = [[0.0] * 3] * 2
            assert found[block, :, row].tolist() == wanted


@pytest.mark.parametrize(("kv", "rotary"), [(0, 64), (1, 0)])
def test_pages_hold_the_oracles_elements(kv: int, rotary: int) -> None:
    """Three heads of 48 tokens by 64 dims: two tile rows, the second half padding; all of each page is checked."""
    layout = KVPoolLayout("per_layer", 1, 1, 3, 48, 64, "float32", 8, 64)
    values = torch.arange(1.0, 1 + 2 * 3 * 48 * 64).reshape(2, 3, 48, 64)
    pages = to_pages(values, compile_program(layout, kv, 3))
    assert pages.shape == (2, 3 * 2 * 2, 1024)
    plain, logical = pages.tolist(), values.tolist()
    for block in range(2):
        for head in range(3):
            for token in range(64):
                for dim in range(64):
                    page = (head * 2 + token // 32) * 2 + dim // 32
                    wanted = logical[block][head][token][k_order(dim, 64, rotary)] if token < 48 else 0.0
                    assert plain[block][page][tile_position(token % 32, dim % 32)] == wanted
