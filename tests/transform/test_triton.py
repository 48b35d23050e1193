"""The Triton kernels bit for bit: in Triton's interpreter on the CPU, and on an NVIDIA GPU where there is one."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from hawk_connector.layout.codec import codec_named
from hawk_connector.plan.segments import pool_segments
from hawk_connector.transform.reference import encode_pages, pack_parcel
from tests.oracle.scalar import Codec, encode_page, tile_position
from tests.transform.crossing import Banks, Crossing, Prefill, oracle_banks, pairing_of, parcels
from tests.transform.test_codec import several_rows
from tests.transform.test_crossing import crossings
from tests.transform.triton_lane import Far, Lane, crossing_parcel, far_parcel, gpu, interpreter, pack, value_pages

pytestmark = pytest.mark.slow

CODECS: tuple[Codec, ...] = ("float32", "bfloat16", "bfp8", "bfp4", "bfp2")
BLOCK_FLOATS: tuple[Codec, ...] = ("bfp8", "bfp4", "bfp2")


LANES = ["interpreter", *(["gpu"] if torch.cuda.is_available() else [])]


@pytest.fixture(scope="module", params=LANES)
def lane(request: pytest.FixtureRequest) -> Iterator[Lane]:
    if request.param == "gpu":
        yield gpu
    else:
        with interpreter() as found:
            yield found


def test_the_kernels_have_run_on_a_gpu() -> None:
    """One skip for all tests of this file that a machine without a GPU lacks."""
    if not torch.cuda.is_available():
        pytest.skip("no NVIDIA GPU here: each test of this file ran in Triton's interpreter only")
    crossing = Crossing(codec="bfp8", dtype="bfloat16")
    assert gpu(crossing_parcel, crossing, 0, 0, 1) == reference(crossing, 0, 0, 1)


def assert_oracle(lane: Lane, crossing: Crossing, each: int | None = None) -> None:
    """Parcels that the kernels packed, read into banks: all memory is, byte for byte, the oracle's."""
    prefill, banks = Prefill.of(crossing), Banks(crossing)
    wanted = banks.with_pages(oracle_banks(crossing, prefill, banks))
    ids = crossing.block_ids()
    for rank in range(crossing.ranks):
        for first, blocks in parcels(crossing.blocks, each):
            plan = pairing_of(crossing, rank).plan(blocks)
            parcel = torch.frombuffer(
                bytearray(lane(crossing_parcel, crossing, rank, first, blocks)), dtype=torch.uint8
            )
            mine = ids[first : first + blocks]
            banks.land(pool_segments(plan, parcel.data_ptr(), mine, banks.placement), parcel)
    wrong = np.flatnonzero(banks.memory != wanted)
    assert not len(wrong), f"{len(wrong)} of {len(wanted)} bytes differ, the first at {wrong[0]}; {crossing}"


@pytest.mark.parametrize("kind", ["per_layer", "cross_layer"])
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_codecs(lane: Lane, codec: Codec, dtype: str, kind: Any) -> None:
    """Two layers, two heads, two programs to a row of pages; 75 tokens end inside a tile of the second block."""
    crossing = Crossing(kind=kind, codec=codec, dtype=dtype, layers=2, kv_heads=2, tokens=75, block_size=64)
    assert_oracle(lane, replace(crossing, poison=math.nan if kind == "per_layer" else 6e4))


@pytest.mark.parametrize(
    ("head_dim", "rotary_dim", "rope_interleaved"),
    [
        (32, None, True),
        (96, None, True),
        (80, None, True),
        (40, None, True),
        (160, None, True),
        (256, None, False),
        (128, 64, True),
        (80, 20, True),
        (64, 6, True),
    ],
)
def test_orders_of_dims(lane: Lane, head_dim: int, rotary_dim: int | None, rope_interleaved: bool) -> None:
    """Columns of tiles that are no power of two, dims that are no whole tile, RoPE over a part of them."""
    crossing = Crossing(head_dim=head_dim, rotary_dim=rotary_dim, rope_interleaved=rope_interleaved, tokens=40)
    assert_oracle(lane, replace(crossing, codec="bfp8", dtype="bfloat16", block_size=32))


@pytest.mark.parametrize("family", ["LBHNC", "LBNHC", "cpu"])
@pytest.mark.parametrize(("source_block", "block_size"), [(32, 64), (96, 16), (64, 48)])
def test_sources(lane: Lane, family: Any, source_block: int, block_size: int) -> None:
    """Blocks cut and joined; blocks shorter than a tile; K by columns, as a CPU keeps it."""
    crossing = Crossing(family=family, source_block=source_block, block_size=block_size, tokens=77, kv_heads=3)
    assert_oracle(lane, replace(crossing, codec="bfp4"), each=2)


@pytest.mark.parametrize(("ranks", "chips"), [(1, 4), (4, 1), (2, 4)])
def test_heads_of_ranks_and_chips(lane: Lane, ranks: int, chips: int) -> None:
    crossing = Crossing(kv_heads=4, ranks=ranks, chips=chips, layers=2, block_size=32, tokens=33, codec="bfp2")
    assert_oracle(lane, replace(crossing, bases=(0,) * 7, dtype="bfloat16"))


def test_gaps_between_pages(lane: Lane) -> None:
    """Zeros, since whole rows are read."""
    crossing = Crossing(alignment=128, codec="bfp8", kv_heads=2, tokens=70)
    assert lane(crossing_parcel, crossing, 0, 0, 2) == reference(crossing, 0, 0, 2)


@given(crossing=crossings(), data=st.data())
@settings(
    max_examples=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
def test_any_crossing(lane: Lane, crossing: Crossing, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, crossing.ranks - 1))
    first = data.draw(st.integers(0, crossing.blocks - 1))
    blocks = data.draw(st.integers(1, min(3, crossing.blocks - first)))
    if pairing_of(crossing, rank).shares:
        assert lane(crossing_parcel, crossing, rank, first, blocks) == reference(crossing, rank, first, blocks)


def reference(crossing: Crossing, rank: int, first: int, blocks: int) -> bytes:
    """Judged against the oracle in ``test_crossing``."""
    prefill, plan = Prefill.of(crossing), pairing_of(crossing, rank).plan(blocks)
    out = torch.full((plan.nbytes,), 0x5A, dtype=torch.uint8)
    pack_parcel(prefill.layers(rank, crossing), torch.tensor(prefill.table), plan, first, crossing.tokens, out)
    return out.numpy().tobytes()


# --- numbers


def oracle_pages(values: torch.Tensor, codec: Codec) -> list[bytes]:
    """Of ``[pages, 1024]`` in page order."""
    at = [[tile_position(r, c) for c in range(32)] for r in range(32)]
    return [encode_page([[page[e] for e in row] for row in at], codec) for page in values.tolist()]


def short_values(bits: NDArray[Any], dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(bits.view(np.int16)).view(dtype)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_16_bit_number(lane: Lane, codec: Codec, dtype: str) -> None:
    """Neighbours of a group are far from each other; infinities and NaNs, payloads and all, are among them."""
    bits = np.arange(1 << 16, dtype=np.uint16).reshape(1024, 64).T.copy()
    values = short_values(bits, torch.bfloat16 if dtype == "bfloat16" else torch.float16)
    found = lane(value_pages, bits, dtype, codec)
    wanted = encode_pages(values.reshape(1, 64, 1024), codec_named(codec))[0]
    for page in range(64):
        assert found[page] == wanted[page].numpy().tobytes(), f"page {page}"


@pytest.mark.parametrize("codec", BLOCK_FLOATS)
@pytest.mark.parametrize(("low", "high"), [(8, 252), (1, 9), (250, 255)])
def test_shared_exponents(lane: Lane, codec: Codec, low: int, high: int) -> None:
    """Groups of every exponent, of neighbours up to 12 smaller, denormals and zeros; where arithmetic is used, and
    where it would be wrong."""
    rng = np.random.default_rng(low)
    shared = rng.integers(low, high + 1, (16 * 64, 1))
    exponent = np.maximum(shared - rng.integers(0, 13, (16 * 64, 16)), 0)
    exponent[:, 5] = shared[:, 0]
    exponent[::9, 3] = 0
    exponent[::17] = 0  # groups of denormals and zeros alone
    fraction = np.where(rng.random(exponent.shape) < 0.5, rng.choice([0, 1, 0x40, 0x7F], exponent.shape), 0x55)
    fraction[exponent == 255] &= 0x40  # infinities and quiet NaNs
    bits = (rng.integers(0, 2, exponent.shape) << 15 | exponent << 7 | fraction).astype(np.uint16).reshape(16, 1024)
    wanted = oracle_pages(short_values(bits, torch.bfloat16).float(), codec)
    assert lane(value_pages, bits, "bfloat16", codec) == wanted


@pytest.mark.parametrize("codec", CODECS)
def test_any_float32(lane: Lane, codec: Codec) -> None:
    """Ties, denormals, numbers that saturate, NaNs: hypothesis draws them, the kernels take all of them in one go."""
    rows: list[list[int]] = []

    @given(several_rows)
    @settings(max_examples=64, deadline=None, database=None, derandomize=True)
    def draw(bits: list[int]) -> None:
        rows.append(bits)

    draw()
    bits = np.array([bit for row in rows[:64] for bit in row], dtype=np.uint32).reshape(-1, 1024)
    assert len(bits) == 4
    values = torch.from_numpy(bits.view(np.float32))
    assert lane(value_pages, bits, "float32", codec) == oracle_pages(values, codec)


@pytest.mark.parametrize("codec", ["float32", "bfloat16"])
def test_signalling_nans_of_float32(lane: Lane, codec: Codec) -> None:
    """Kept as they are, or TTNN's one NaN."""
    bits = np.zeros((4, 1024), dtype=np.uint32)
    bits[:, :3] = [0x7F800001, 0xFFBFFFFF, 0x7F800000]
    page = lane(value_pages, bits, "float32", codec)[0]
    if codec == "float32":
        assert page[:12] == bits[0, :3].tobytes()
    else:
        assert page[:6] == b"\xc0\x7f\xc0\x7f\x80\x7f"


# --- addresses


@pytest.mark.parametrize(
    "far",
    [
        # Blocks that lie 2^31 elements and more apart, as in a cache of 4 GiB and more.
        Far(6, 2, 16, (1 << 29, 16 * 64, 64), (5, 0, 4), 40),
        # Heads outermost: a distance that has 32 bits, but not times the head; and one that has more.
        Far(4, 4, 16, (16 * 64, (1 << 30) + 64, 64), (3, 1, 2), 48),
        Far(4, 2, 16, (16 * 64, (1 << 31) + 64, 64), (3, 1, 2), 48),
        # Tokens outermost.
        Far(4, 1, 16, (64, 4 * 64, 1 << 28), (3, 1), 32),
        # Rows that begin at no multiple of 16 bytes, or of 4.
        Far(4, 2, 16, (2 * 16 * 66, 16 * 66, 66), (3, 1), 20),
        Far(4, 2, 16, (2 * 16 * 67, 16 * 67, 67), (3, 1), 20),
        # Pages that do.
        Far(4, 2, 16, (2 * 16 * 64, 16 * 64, 64), (3, 1), 20, alignment=36),
    ],
    ids=["blocks", "heads", "farther", "tokens", "even", "odd", "pages"],
)
def test_where_rows_and_pages_may_lie(lane: Lane, far: Far) -> None:
    out = torch.empty(far.plan.nbytes, dtype=torch.uint8)
    pack_parcel([far.source("cpu")], torch.tensor(far.table), far.plan, 0, far.tokens, out)
    assert lane(far_parcel, far) == out.numpy().tobytes()


@pytest.mark.parametrize(("table", "message"), [((3,), r"40 tokens need 3 .* got 1"), ((0, 6, 1), r"0\.\.5; got 6")])
def test_a_wrong_table_never_reaches_a_kernel(lane: Lane, table: tuple[int, ...], message: str) -> None:
    far = Far(6, 1, 16, (16 * 64, 16 * 64, 64), (0, 1, 2), 40)
    with pytest.raises(ValueError, match=message):
        lane(wrong_table, far, table)


def wrong_table(device: str, far: Far, table: tuple[int, ...]) -> bytes:
    return pack(device, [far.source(device)], table, far.plan, 0, far.tokens)
