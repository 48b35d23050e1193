"""Tiles written, read and attended to by the kernels."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from hawk_connector.layout.kv_pool import PoolKind
from tests.oracle.scalar import decode_page, encode_page, expected_banks
from tests.tt_plugin.pools import device_bytes, make_pools, oracle_pool, random_kv
from tt_plugin.device.layer_tiles import ChipHeads, LayerTiles

CODECS = ("float32", "bfloat16", "bfp8")

# ---- one tile against the oracle's codec -----------------------------------------------------------------

_EXPONENTS = st.one_of(
    st.sampled_from([0, 1, 2, 7, 126, 127, 253, 254, 255]), st.integers(100, 140), st.integers(0, 255)
)
_MANTISSAS = st.one_of(
    # Ties of bf16 and of bfp8 at several alignments, one ulp beside them, and saturation.
    st.sampled_from([0, 1, 0x7FFF, 0x8000, 0x8001, 0x18000, 0x10000, 0x10001, 0x30000, 0x7E0000, 0x7F0000, 0x7FFFFF]),
    st.integers(0, 0x7FFFFF),
)


@st.composite
def _fp32_bits(draw: st.DrawFn) -> int:
    exponent, mantissa = draw(_EXPONENTS), draw(_MANTISSAS)
    if exponent == 255 and mantissa:
        mantissa |= 0x400000  # Python's own floats quiet signalling NaNs
    return draw(st.booleans()) << 31 | exponent << 23 | mantissa


@pytest.fixture(scope="module", params=CODECS)
def one_tile(request: pytest.FixtureRequest) -> LayerTiles:
    pools = make_pools(
        codec=request.param, layers=1, kv_heads=1, block_size=32, head_dim=32, num_blocks=1, rope_interleaved=False
    )
    return LayerTiles(pools, 0, 1, 1)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(row=st.lists(_fp32_bits(), min_size=16, max_size=16), token=st.integers(0, 31), right=st.booleans())
def test_a_face_row_is_encoded_and_decoded_as_the_oracle_does(
    one_tile: LayerTiles, row: list[int], token: int, right: bool
) -> None:
    pools = one_tile.pools
    bits = np.zeros((32, 1, 32), np.uint32)
    bits[token, 0, 16 * right : 16 * right + 16] = row
    values = bits.view(np.float32)
    one_tile.write(np.arange(32, dtype=np.int64), values, values)

    rows = [[struct.unpack("<f", struct.pack("<I", int(b)))[0] for b in bits[t, 0]] for t in range(32)]
    page = encode_page(rows, oracle_pool(pools).codec)
    for pool in range(2):
        assert pools.pages(0, pool)[0, 0].tobytes()[: len(page)] == page

    with np.errstate(over="ignore"):  # a block float's largest values are beyond fp32
        expected = np.array(decode_page(page, oracle_pool(pools).codec), dtype=np.float64).astype(np.float32)
    for found in one_tile.read(0, np.zeros(1, np.int32), 32):
        assert np.array_equal(found[0], expected, equal_nan=True)


def test_a_token_is_written_without_touching_its_neighbours(one_tile: LayerTiles) -> None:
    values = random_kv(3, 1, 1, 32, 32)[0, 0]
    one_tile.write(np.arange(32, dtype=np.int64), values, values)
    before = one_tile.read(0, np.zeros(1, np.int32), 32)[0].copy()
    one_tile.write(np.array([9], np.int64), values[:1] * 1e6, values[:1] * 1e6)
    after = one_tile.read(0, np.zeros(1, np.int32), 32)[0]
    others = np.arange(32) != 9
    assert np.array_equal(before[:, others], after[:, others])
    assert not np.array_equal(before[:, 9], after[:, 9])


# ---- whole requests against the oracle's banks -------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "banks", "chips", "kv_heads", "head_dim", "block_size", "codec"),
    [
        ("cross_layer", 8, 1, 3, 64, 64, "bfp8"),
        ("per_layer", 7, 1, 3, 64, 32, "bfloat16"),
        ("cross_layer", 7, 2, 4, 64, 64, "float32"),
        ("per_layer", 12, 4, 8, 32, 64, "bfp8"),
        ("cross_layer", 12, 4, 2, 128, 32, "bfp8"),
        ("per_layer", 8, 4, 1, 64, 16, "float32"),
    ],
)
@pytest.mark.parametrize("rope_interleaved", [True, False])
def test_banks_hold_what_the_oracle_expects(
    kind: PoolKind,
    banks: int,
    chips: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    codec: str,
    rope_interleaved: bool,
) -> None:
    tokens, layers = 70, 2
    pools = make_pools(
        banks=banks,
        chips=chips,
        kind=kind,
        codec=codec,
        layers=layers,
        kv_heads=kv_heads,
        block_size=block_size,
        head_dim=head_dim,
        num_blocks=8,
        rope_interleaved=rope_interleaved,
    )
    block_ids = [5, 1, 6, 0, 3][: -(-tokens // block_size)]
    kv = random_kv(1, layers, kv_heads, tokens, head_dim)
    slots = np.array([block_ids[t // block_size] * block_size + t % block_size for t in range(tokens)], np.int64)
    for layer in range(layers):
        tiles = LayerTiles(pools, layer, kv_heads, kv_heads * 2)
        # In two goes and out of order, with padding, as a scheduler would.
        for part in (np.arange(tokens - 1, 40, -1), np.arange(41)):
            chosen = np.concatenate([slots[part], [-1]])
            key, value = (np.concatenate([kv[i, layer][part], kv[i, layer][:1]]) for i in (0, 1))
            tiles.write(chosen, key, value)

    expected = expected_banks(
        lambda layer, tensor, head, token: kv["kv".index(tensor), layer, token, head],  # type: ignore[arg-type, return-value]
        oracle_pool(pools),
        num_tokens=tokens,
        block_ids=block_ids,
        kv_heads=kv_heads,
        chips=chips,
        rotary_dim=head_dim if rope_interleaved else 0,
    )
    for (chip, bank), pages in expected.items():
        for address, page in pages.items():
            assert device_bytes(pools, chip, bank, address, len(page)) == page
    # And nothing else was written: no other byte of the pools is set.
    for chip in range(chips):
        set_bytes = sum(int(np.count_nonzero(pools.pages(chip, pool))) for pool in range(pools.layout.pools))
        expected_bytes = sum(
            len(page) - page.count(0) for (c, _), pages in expected.items() if c == chip for page in pages.values()
        )
        assert set_bytes == expected_bytes
    pools.device.close()


# ---- attention against plain fp64 --------------------------------------------------------------------------


def plain_attention(
    queries: NDArray[np.float32], key: NDArray[np.float32], value: NDArray[np.float32], scale: float
) -> NDArray[np.float64]:
    """Causal attention in fp64: queries ``[count, heads, dims]`` are the last of ``[tokens, kv_heads, dims]``."""
    count, heads, dims = queries.shape
    tokens, kv_heads, _ = key.shape
    out = np.zeros((count, heads, dims))
    for head in range(heads):
        k, v = (rows[:, head // (heads // kv_heads)].astype(np.float64) for rows in (key, value))
        for i in range(count):
            seen = tokens - count + i + 1
            scores = k[:seen] @ queries[i, head].astype(np.float64) * scale
            weights = np.exp(scores - scores.max())
            out[i, head] = weights @ v[:seen] / weights.sum()
    return out


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(
    ("kind", "banks", "chips", "kv_heads", "query_heads"),
    [
        ("cross_layer", 8, 1, 3, 9),
        ("per_layer", 7, 2, 4, 4),
        ("cross_layer", 12, 4, 8, 16),
        ("cross_layer", 7, 4, 2, 6),  # each KV head on two chips, which share its three query heads out
        ("per_layer", 8, 4, 1, 2),  # more copies than query heads
    ],
)
@pytest.mark.parametrize("rope_interleaved", [True, False])
def test_attention_from_the_tiles_equals_plain_fp64(
    codec: str, kind: PoolKind, banks: int, chips: int, kv_heads: int, query_heads: int, rope_interleaved: bool
) -> None:
    layers, dims, block_size = 2, 64, 32
    pools = make_pools(
        banks=banks,
        chips=chips,
        kind=kind,
        codec=codec,
        layers=layers,
        kv_heads=kv_heads,
        block_size=block_size,
        head_dim=dims,
        num_blocks=32,
        rope_interleaved=rope_interleaved,
    )
    source = np.random.default_rng(5)
    lengths, counts = [1, 33, 150, 64, 96], [1, 1, 7, 64, 3]
    ids = source.permutation(32)
    tables = np.full((len(lengths), 6), -1, np.int32)
    taken = 0
    for request, length in enumerate(lengths):
        blocks = -(-length // block_size)
        tables[request, :blocks] = ids[taken : taken + blocks]
        taken += blocks
    # 64ths up to 127: exact in all three codecs, whatever exponents they share.
    kv = (source.integers(-127, 128, (2, len(lengths), 150, kv_heads, dims)) / 64).astype(np.float32)
    queries = source.standard_normal((sum(counts), query_heads, dims)).astype(np.float32)
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    scale = dims**-0.5
    for layer in range(layers):
        tiles = LayerTiles(pools, layer, kv_heads, query_heads)
        for request, length in enumerate(lengths):
            token = np.arange(length)
            slots = tables[request, token // block_size].astype(np.int64) * block_size + token % block_size
            tiles.write(slots, kv[0, request, :length] + layer, kv[1, request, :length] - layer)
            kept_key, kept_value = kv[0, request, :length] + layer, kv[1, request, :length] - layer
            if layer == 0:
                for chip, heads in enumerate(tiles.chips):
                    key, value = tiles.read(chip, tables[request], length)
                    held = slice(heads.kv_first, heads.kv_first + heads.kv_count)
                    assert np.array_equal(key, kept_key[:, held][..., tiles.dim_order].transpose(1, 0, 2))
                    assert np.array_equal(value, kept_value[:, held].transpose(1, 0, 2))
    tiles = LayerTiles(pools, 0, kv_heads, query_heads)
    out = np.full_like(queries, np.nan)
    chosen = np.array([0, 1, 2, 4], np.int64)
    tiles.attend(queries, starts, np.array(lengths, np.int32), tables, chosen, scale, out)
    for request, length in enumerate(lengths):
        rows = slice(starts[request], starts[request + 1])
        if request not in chosen:
            assert np.isnan(out[rows]).all()
            continue
        expected = plain_attention(queries[rows], kv[0, request, :length], kv[1, request, :length], scale)
        np.testing.assert_allclose(out[rows], expected, rtol=0, atol=2e-6)
    pools.device.close()


def test_rows_past_the_last_token_are_never_read() -> None:
    pools = make_pools(layers=1, kv_heads=1, block_size=64, head_dim=32)
    for pool in range(2):
        pools.pages(0, pool)[:] = 0xFF  # NaN everywhere
    tiles = LayerTiles(pools, 0, 1, 2)
    kv = random_kv(2, 1, 1, 40, 32)
    tiles.write(np.arange(40, dtype=np.int64) + 3 * 64, kv[0, 0], kv[1, 0])
    queries = random_kv(4, 1, 2, 1, 32)[0, 0]
    out = np.empty_like(queries)
    starts, lengths = np.array([0, 1], np.int32), np.array([40], np.int32)
    tiles.attend(queries, starts, lengths, np.array([[3]], np.int32), np.zeros(1, np.int64), 0.01, out)
    np.testing.assert_allclose(out, plain_attention(queries, kv[0, 0], kv[1, 0], 0.01), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("chips", "kv_heads", "query_heads"), [(1, 3, 9), (3, 3, 9), (9, 3, 9), (6, 3, 9), (4, 8, 32), (4, 1, 2)]
)
def test_every_query_head_is_computed_once_beside_its_kv_head(chips: int, kv_heads: int, query_heads: int) -> None:
    computed: list[tuple[int, int]] = []
    for chip in range(chips):
        heads = ChipHeads.of(chip, chips, kv_heads, query_heads)
        for i, (first, count) in enumerate(heads.query_table()):
            computed += [(query, heads.kv_first + i) for query in range(first, first + count)]
    assert sorted(computed) == [(query, query // (query_heads // kv_heads)) for query in range(query_heads)]
