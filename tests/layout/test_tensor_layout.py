"""TTNN's tiles and K's order of dims against the oracle, element by element."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hawk_connector.layout.codec import codec_named
from hawk_connector.layout.tensor_layout import interleaved_dims, ttnn_tiles
from tests.oracle.scalar import Pool, k_order, tile_position


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("tokens", [16, 32, 48, 64])
@pytest.mark.parametrize("head_dim", [32, 64, 128])
def test_every_element_has_the_oracles_page_and_place(heads: int, tokens: int, head_dim: int) -> None:
    """One bank and pages of one byte's pitch make the oracle's address the page number."""
    pool = Pool("per_layer", 1, heads, tokens, head_dim, [0], [{"k": 0, "v": 0}], "float32", 4096)
    layout = ttnn_tiles(heads, tokens, head_dim, codec_named("float32"), rope_interleaved=False)
    assert layout.pages == pool.tiles_per_block()
    rows = pool.tile_rows() * 32
    assert layout.page_of.shape == layout.element_of.shape == (heads, rows, head_dim)
    pages, elements = layout.page_of.tolist(), layout.element_of.tolist()
    for h, t, d in itertools.product(range(heads), range(rows), range(head_dim)):
        _, address, place = pool.address("k", 0, 0, h, t, d)
        assert pages[h][t][d] == address // 4096
        assert elements[h][t][d] == place


def test_one_tile_is_the_oracles_tile() -> None:
    layout = ttnn_tiles(1, 32, 32, codec_named("bfp8"), rope_interleaved=False)
    expected = [[tile_position(r, c) for c in range(32)] for r in range(32)]
    assert layout.element_of[0].tolist() == expected


@given(st.integers(1, 128).map(lambda half: 2 * half), st.data())
@settings(deadline=None)
def test_partial_rotary_permutes_the_rotary_dims_alone(head_dim: int, data: st.DataObject) -> None:
    rotary = data.draw(st.integers(0, head_dim // 2)) * 2
    expected = [k_order(d, head_dim, rotary) for d in range(head_dim)]
    assert interleaved_dims(head_dim, rotary).tolist() == expected


@pytest.mark.parametrize("head_dim", [32, 64, 128, 256])
def test_k_is_stored_in_the_oracles_order_and_v_in_its_own(head_dim: int) -> None:
    codec = codec_named("bfloat16")
    assert ttnn_tiles(1, 32, head_dim, codec, rope_interleaved=True).dim_order == tuple(
        k_order(d, head_dim, head_dim) for d in range(head_dim)
    )
    assert ttnn_tiles(1, 32, head_dim, codec, rope_interleaved=False).dim_order is None


@pytest.mark.parametrize("rotary", [3, -2, 66])
def test_rotary_dims_must_be_pairs_inside_the_head(rotary: int) -> None:
    with pytest.raises(ValueError, match=f"rotary dim must be even and at most head_dim 64; got {rotary}"):
        interleaved_dims(64, rotary)


@pytest.mark.parametrize("head_dim", [16, 80])
def test_a_head_dim_is_padded_to_whole_tiles(head_dim: int) -> None:
    """Its elements lie where those of the padded head_dim do; K's order is that of the unpadded head_dim."""
    padded = -(-head_dim // 32) * 32
    layout = ttnn_tiles(2, 32, head_dim, codec_named("bfp8"), rope_interleaved=True)
    wide = ttnn_tiles(2, 32, padded, codec_named("bfp8"), rope_interleaved=False)
    assert (layout.order, layout.page_elements) == (wide.order, wide.page_elements)
    assert layout.shape == {"token": 32, "dim": head_dim}
    assert layout.dim_order == tuple(k_order(d, head_dim, head_dim) for d in range(head_dim))
