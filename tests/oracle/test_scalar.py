"""The oracle against values worked out by hand, published figures and exact rational arithmetic."""

from __future__ import annotations

import hashlib
import math
import struct
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.oracle.scalar import (
    MAGNITUDE_BITS,
    PAGE_BYTES,
    Codec,
    Pool,
    Run,
    Source,
    Tensor,
    bf16_bits,
    decode_page,
    encode_face_row,
    encode_page,
    expected_banks,
    expected_runs,
    expected_segments,
    heads_of_chip,
    k_order,
    read_source,
    stream_pages,
    tile_position,
)

# Base addresses of the banks of real chips (DRAM bank tables of TTNN): Blackhole p150a, P100, Wormhole n150.
BLACKHOLE = [0] * 8
P100 = [0] * 7
WORMHOLE = [0, 0x40000000] * 6
FIRST_FREE = 0x100080

fp32_numbers = st.floats(width=32, allow_nan=False, allow_infinity=False)


def fp32(bits: int) -> float:
    value: float = struct.unpack("<f", struct.pack("<I", bits))[0]
    return value


def tile_of(elements: dict[tuple[int, int], float]) -> list[list[float]]:
    return [[elements.get((r, c), 0.0) for c in range(32)] for r in range(32)]


def cross(
    layers: int, heads: int, head_dim: int, codec: Codec, banks: list[int], block_size: int = 64
) -> Pool:
    """A cross_layer pool whose K and V lie far apart."""
    addresses = {"k": FIRST_FREE, "v": FIRST_FREE + 0x8000000}
    return Pool("cross_layer", layers, heads, block_size, head_dim, banks, addresses, codec, 64)


def per_layer(
    layers: int, heads: int, head_dim: int, codec: Codec, banks: list[int], block_size: int = 64
) -> Pool:
    """A per_layer pool whose 2 * layers buffers lie far apart."""
    addresses = [
        {"k": FIRST_FREE + 2 * layer * 0x800000, "v": FIRST_FREE + (2 * layer + 1) * 0x800000}
        for layer in range(layers)
    ]
    return Pool("per_layer", layers, heads, block_size, head_dim, banks, addresses, codec, 64)


# ---- tile ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("r", "c", "e"),
    [
        (0, 0, 0),
        (0, 15, 15),
        (0, 16, 256),
        (1, 0, 16),
        (15, 31, 511),
        (16, 0, 512),
        (16, 16, 768),
        (31, 31, 1023),
    ],
)
def test_tile_position_by_hand(r: int, c: int, e: int) -> None:
    assert tile_position(r, c) == e


def test_tile_positions_are_all_there_once() -> None:
    assert sorted(tile_position(r, c) for r in range(32) for c in range(32)) == list(range(1024))


@pytest.mark.parametrize(("r", "c"), [(32, 0), (0, 32), (-1, 0)])
def test_tile_position_refuses_what_is_outside(r: int, c: int) -> None:
    with pytest.raises(ValueError, match=r"0\.\.31"):
        tile_position(r, c)


# ---- plain codecs --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bits", "expected"),
    [
        (0x3F800000, 0x3F80),  # 1
        (0x3F807FFF, 0x3F80),  # below the tie
        (0x3F808000, 0x3F80),  # a tie goes to even: down
        (0x3F808001, 0x3F81),  # above the tie
        (0x3F818000, 0x3F82),  # a tie goes to even: up
        (0xBF818000, 0xBF82),
        (0x3FFFFFFF, 0x4000),  # carries into the exponent
        (0x7F7FFFFF, 0x7F80),  # the largest fp32 becomes infinity
        (0x7F800000, 0x7F80),
        (0xFF800000, 0xFF80),
        (0x80000000, 0x8000),  # -0 keeps its sign
        (0x00000001, 0x0000),  # the smallest denormal is below half of bf16's
        (0x00018000, 0x0002),  # a denormal tie goes to even
        (0x007F8000, 0x0080),  # a denormal becomes the smallest normal
        (0x7FC00000, 0x7FC0),  # every NaN becomes the one that TTNN makes of it
        (0xFFC12345, 0x7FC0),
        (0x7FFFFFFF, 0x7FC0),
        (0xFFFFFFFF, 0x7FC0),
    ],
)
def test_bf16_by_hand(bits: int, expected: int) -> None:
    assert bf16_bits(fp32(bits)) == expected


@given(fp32_numbers)
def test_bf16_is_the_nearest_and_ties_go_to_even(value: float) -> None:
    def exact(bits: int) -> Fraction:  # infinity stands at 2^128, one step above the largest
        exponent, fraction = bits >> 7 & 0xFF, bits & 0x7F
        size = Fraction(fraction + (128 if exponent else 0)) * Fraction(2) ** (max(exponent, 1) - 134)
        return -size if bits >> 15 else size

    got = bf16_bits(value)
    distance = abs(exact(got) - Fraction(value))
    assert got >> 15 == (math.copysign(1.0, value) < 0)
    for neighbour in (got - 1, got + 1):
        if neighbour & 0x7FFF <= 0x7F80 and neighbour >> 15 == got >> 15:
            other = abs(exact(neighbour) - Fraction(value))
            assert distance < other or (distance == other and got % 2 == 0)


def test_float32_page_by_hand() -> None:
    denormal = fp32(1)
    page = encode_page(
        tile_of({(0, 1): 1.0, (0, 16): -2.0, (16, 0): math.inf, (31, 31): denormal}), "float32"
    )
    expected = bytearray(4096)
    expected[4:8] = b"\x00\x00\x80\x3f"
    expected[4 * 256 : 4 * 256 + 4] = b"\x00\x00\x00\xc0"
    expected[4 * 512 : 4 * 512 + 4] = b"\x00\x00\x80\x7f"
    expected[4092:] = b"\x01\x00\x00\x00"
    assert page == bytes(expected)


def test_bfloat16_page_by_hand() -> None:
    page = encode_page(tile_of({(0, 1): 1.0, (1, 17): -2.0, (17, 2): fp32(0x3F818000)}), "bfloat16")
    expected = bytearray(2048)
    expected[2:4] = b"\x80\x3f"
    expected[2 * (256 + 16 + 1) : 2 * (256 + 16 + 1) + 2] = b"\x00\xc0"
    expected[2 * (512 + 16 + 2) : 2 * (512 + 16 + 2) + 2] = b"\x82\x3f"
    assert page == bytes(expected)


def test_bfloat16_page_keeps_nan() -> None:
    assert math.isnan(decode_page(encode_page(tile_of({(5, 5): math.nan}), "bfloat16"), "bfloat16")[5][5])


# ---- block floats --------------------------------------------------------------------------------------


def row(*values: float) -> list[float]:
    return [*values, *[0.0] * (16 - len(values))]


@pytest.mark.parametrize(
    ("values", "magnitude_bits", "exponent", "codes"),
    [
        # 1 is 64 * 2^(127-127-6); 1.5 is 96; -0.5 is 32 with the sign; 1/64 is one step.
        ([1.0, 1.5, -0.5, 1 / 64], 7, 127, [64, 96, 128 + 32, 1]),
        # ties at half a step go to even: 64.5, 65.5, 0.5, 1.5, and -0.5 loses its sign.
        ([64.5 / 64, 65.5 / 64, 0.5 / 64, 1.5 / 64, -0.5 / 64], 7, 127, [64, 66, 0, 2, 0]),
        # 64.5 steps and one fp32 ulp, unshifted: more than a tie.
        ([fp32(0x3F810001)], 7, 127, [65]),
        # 32.5 steps and one fp32 ulp, shifted by one: the ulp is cut off first, so it is a tie, to even.
        ([1.0, fp32(0x3F020001)], 7, 127, [64, 32]),
        ([1.0, fp32(0x3F020002)], 7, 127, [64, 33]),  # this ulp survives the shift
        # 127.75 steps would round to 128: saturates.
        ([127.75 / 64, -127.5 / 64], 7, 127, [127, 255]),
        # an element 2^7 below the largest is half a step: a tie to zero; 2^7 * 1.5 below is more: one step.
        ([128.0, 1.0, 1.5], 7, 134, [64, 0, 1]),
        # a shift of 24 bits and more leaves nothing.
        ([2.0**100, 1.0, -1.0], 7, 227, [64, 0, 0]),
        # fp32 denormals count as zero, whatever their sign, alone and beside the smallest normal.
        ([fp32(0x007FFFFF), fp32(0x807FFFFF)], 7, 0, [0, 0]),
        ([fp32(0x00800000), fp32(0x007FFFFF)], 7, 1, [64, 0]),
        ([0.0, -0.0], 7, 0, [0, 0]),
        # infinity and NaN are mantissas with exponent 255; whatever is 2^7 times smaller is gone.
        ([math.inf, -math.inf, 1.0], 7, 255, [64, 128 + 64, 0]),
        ([fp32(0x7FC00000), 1.0], 7, 255, [96, 0]),
        # bfp4: 1 is 4 steps; ties 4.5 and 5.5; 7.5 saturates; -0.5 of a step loses its sign.
        ([1.0, 4.5 / 4, -5.5 / 4, 7.5 / 4, -0.5 / 4], 3, 127, [4, 4, 8 + 6, 7, 0]),
        # bfp2: 1 is one step; 1.5 would be 2 and saturates; 0.5 is a tie to zero; 0.75 is one.
        ([1.0, -1.5, -0.5, -0.75], 1, 127, [1, 2 + 1, 0, 2 + 1]),
    ],
)
def test_face_row_by_hand(values: list[float], magnitude_bits: int, exponent: int, codes: list[int]) -> None:
    assert encode_face_row(row(*values), magnitude_bits) == (exponent, codes + [0] * (16 - len(codes)))


@given(st.lists(fp32_numbers, min_size=16, max_size=16), st.sampled_from([7, 3, 1]))
def test_face_row_in_exact_arithmetic(values: list[float], magnitude_bits: int) -> None:
    """The same rule in rationals: cut to the largest element's fp32 step, round to nearest even."""
    normal = [value if abs(value) >= 2.0**-126 else 0.0 for value in values]
    largest = max(abs(value) for value in normal)
    exponent, codes = encode_face_row(values, magnitude_bits)
    if largest == 0:
        assert (exponent, codes) == (0, [0] * 16)
        return
    power = exponent - 127
    assert Fraction(2) ** power <= Fraction(largest) < Fraction(2) ** (power + 1)
    for value, code in zip(normal, codes, strict=True):
        steps = math.floor(abs(Fraction(value)) / Fraction(2) ** (power - 23))
        magnitude = min(round(Fraction(steps, 2 ** (24 - magnitude_bits))), 2**magnitude_bits - 1)
        negative = value < 0 and magnitude > 0
        assert code == magnitude + (2**magnitude_bits if negative else 0)


def test_bfp8_page_by_hand() -> None:
    page = encode_page(tile_of({(0, 0): 1.0, (0, 1): -1.5, (2, 20): 4.0, (31, 31): -0.25}), "bfp8")
    expected = bytearray(1088)
    expected[0] = 127  # face 0, row 0
    expected[16 + 2] = 129  # face 1, row 2
    expected[48 + 15] = 125  # face 3, row 15
    expected[64 + 0] = 64
    expected[64 + 1] = 128 + 96
    expected[64 + 256 + 2 * 16 + 4] = 64
    expected[64 + 1023] = 128 + 64
    assert page == bytes(expected)


def test_bfp4_page_puts_the_even_element_in_the_low_nibble() -> None:
    page = encode_page(tile_of({(0, 0): 1.0, (0, 1): -1.5, (16, 3): 2.0}), "bfp4")
    expected = bytearray(576)
    expected[0], expected[32] = 127, 128
    expected[64] = 0x4 | 0xE << 4
    expected[64 + (512 + 3) // 2] = 0x4 << 4
    assert page == bytes(expected)


def test_bfp2_page_puts_four_elements_in_a_byte() -> None:
    page = encode_page(tile_of({(0, 0): 1.0, (0, 1): -1.0, (0, 3): 1.5, (1, 4): -1.0}), "bfp2")
    expected = bytearray(320)
    expected[0], expected[1] = 127, 127
    expected[64] = 0b01_00_11_01
    expected[64 + (16 + 4) // 4] = 0b11
    assert page == bytes(expected)


@given(st.integers(0, 2**32), st.sampled_from(["float32", "bfloat16", "bfp8", "bfp4", "bfp2"]))
@settings(max_examples=20, deadline=None)
def test_codes_survive_decoding(seed: int, codec: Codec) -> None:
    """A page's own values are coded as that page again, and no value moves by more than its codec's step."""
    values = [
        [math.ldexp((seed * (r * 32 + c + 1)) % 509 - 254, c % 7) for c in range(32)] for r in range(32)
    ]
    page = encode_page(values, codec)
    decoded = decode_page(page, codec)
    assert encode_page(decoded, codec) == page
    for r in range(32):
        for c in range(32):
            if codec in MAGNITUDE_BITS:
                group = [abs(values[r][c // 16 * 16 + i]) for i in range(16)]
                step = math.ldexp(2.0, math.frexp(max(group))[1] - 1 - MAGNITUDE_BITS[codec])
                assert abs(decoded[r][c] - values[r][c]) <= step / (
                    1 if abs(values[r][c]) > max(group) - step else 2
                )
            else:  # 9-bit integers times powers of two: bf16 keeps 8 bits, fp32 all
                step = 0.0 if codec == "float32" else math.ldexp(1.0, c % 7)
                assert abs(decoded[r][c] - values[r][c]) <= step


def test_wrong_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="32 rows of 32"):
        encode_page([[0.0] * 32] * 31, "float32")
    with pytest.raises(ValueError, match="1088 bytes, got 1087"):
        decode_page(bytes(1087), "bfp8")
    with pytest.raises(OverflowError):
        encode_page(tile_of({(0, 0): 1e39}), "bfp8")


# ---- pages that TTNN packed -----------------------------------------------------------------------------


def golden_bits() -> list[int]:
    """fp32 bits of eight tiles in element order: any (no signalling NaN), near 1, near ties, tiny, sparse."""
    state, bits = 1, []
    for i in range(8 * 1024):
        state = (1664525 * state + 1013904223) % 2**32
        sign, exponent, fraction = state >> 31, state >> 23 & 0xFF, state & 0x7FFFFF
        tile = i // 1024
        if tile in (2, 3):
            exponent = 120 + exponent % 8
        elif tile in (4, 5):
            exponent = 120 + exponent % 8
            fraction = max(0, (fraction & 0x7FC000) + (state >> 5) % 3 - 1)
        elif tile == 6:
            exponent = exponent % 4
        elif tile == 7 and state >> 4 & 3:
            sign, exponent, fraction = 0, 0, 0
        elif tile == 7 and state >> 6 & 15 == 0:
            exponent, fraction = 255, 0
        if exponent == 255 and fraction:
            fraction |= 0x400000
        bits.append(sign << 31 | exponent << 23 | fraction)
    return bits


@pytest.mark.parametrize(
    ("codec", "digest"),
    [
        ("bfp8", "1413349d31f9cf875ef9bddc5abd613c35b8d15cb4d4c35e1b5736dfc709232a"),
        ("bfp4", "aff4fb96c69b1227585c3f4b5a1cfa0857360af2e2a8f26699566591a2d2e8d0"),
        ("bfp2", "e99af28518b5c08aaea014f7fd308c6c01baa885bbdecbde044266be73bb484f"),
    ],
)
def test_block_float_pages_are_those_of_ttnn(codec: Codec, digest: str) -> None:
    """SHA-256 of ``golden_bits`` packed by ttnn 0.81.1 on the host (``bfp_utils.pack_bfp8/4/2``)."""
    numbers_in_order = [fp32(bits) for bits in golden_bits()]
    packed = b""
    for tile in range(8):
        first = tile * 1024
        values = [[numbers_in_order[first + tile_position(r, c)] for c in range(32)] for r in range(32)]
        packed += encode_page(values, codec)
    assert hashlib.sha256(packed).hexdigest() == digest


def test_bf16_values_are_those_of_ttnn() -> None:
    """SHA-256 of the bf16 values in a ttnn 0.81.1 tensor made from ``golden_bits``, in order."""
    values = b"".join(struct.pack("<H", bf16_bits(fp32(bits))) for bits in golden_bits())
    assert (
        hashlib.sha256(values).hexdigest()
        == "6531d5fa9b8bd0f8f5ed987ef3931f004163fe30f076d93d41f653c2b1583bbd"
    )


# ---- order of K's dims and heads -----------------------------------------------------------------------


def test_k_order_by_hand() -> None:
    assert [k_order(d, 8, 8) for d in range(8)] == [0, 4, 1, 5, 2, 6, 3, 7]
    assert [k_order(d, 8, 4) for d in range(8)] == [0, 2, 1, 3, 4, 5, 6, 7]
    assert [k_order(d, 8, 0) for d in range(8)] == list(range(8))
    assert [k_order(d, 128, 128) for d in (0, 1, 2, 63, 126, 127)] == [0, 64, 1, 95, 63, 127]


def test_heads_of_chips() -> None:
    assert [heads_of_chip(c, 4, 8) for c in range(4)] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert [heads_of_chip(c, 1, 3) for c in range(1)] == [[0, 1, 2]]
    assert [heads_of_chip(c, 4, 2) for c in range(4)] == [[0], [0], [1], [1]]
    with pytest.raises(ValueError, match="3 KV heads do not divide among 2 chips"):
        heads_of_chip(0, 2, 3)


# ---- pool addresses ------------------------------------------------------------------------------------


def test_per_layer_address_by_hand() -> None:
    """Llama-3.1-8B on four p150a: T = 2 * 2 * 4 = 16 tiles."""
    pool = per_layer(32, 2, 128, "bfp8", BLACKHOLE)
    # page = 5*16 + 1*8 + 1*4 + 3 = 95: bank 7, slot 11; row 37 % 32 = 5, column 100 % 32 = 4.
    buffer = FIRST_FREE + (2 * 3 + 1) * 0x800000
    assert pool.address("v", 5, 3, 1, 37, 100) == (7, buffer + 11 * 1088, 5 * 16 + 4)


def test_cross_layer_address_by_hand() -> None:
    """3 layers, 3 heads of 64, 64-token blocks: T = 12; row of the pool 4*3 + 2 = 14."""
    pool = cross(3, 3, 64, "bfloat16", P100)
    # page = 14*12 + 2*4 + 1*2 + 1 = 179 = 7*25 + 4; row 63 % 32 = 31, column 40 % 32 = 8.
    assert pool.address("k", 4, 2, 2, 63, 40) == (4, FIRST_FREE + 25 * 2048, 512 + 15 * 16 + 8)


def test_bank_bases_and_alignment_come_from_the_pool() -> None:
    addresses = [{"k": 0x1000, "v": 0x2000}]
    pool = Pool("per_layer", 1, 1, 32, 64, WORMHOLE, addresses, "bfp8", 128)
    # page = 6*2 + 1 = 13: bank 1 (base 1 GiB), slot 1; 1088 aligned to 128 is 1152.
    assert pool.address("v", 6, 0, 0, 0, 32) == (1, 0x40000000 + 0x2000 + 1152, 0)


@pytest.mark.parametrize("head_dim", [0, 16, 80])
def test_head_dim_must_fill_tiles(head_dim: int) -> None:
    with pytest.raises(ValueError, match="multiple of 32"):
        cross(1, 1, head_dim, "bfp8", BLACKHOLE)


def test_address_refuses_what_is_outside() -> None:
    pool = cross(2, 2, 64, "bfp8", BLACKHOLE)
    for index, name in enumerate(["layer", "head", "token", "dim"]):
        where = [0, 0, 0, 0]
        where[index] = 64
        with pytest.raises(ValueError, match=f"{name} 64 is not in"):
            pool.address("k", 0, *where)


# ---- expected banks ------------------------------------------------------------------------------------


def number(layer: int, tensor: Tensor, head: int, token: int, dim: int) -> float:
    """A different, fp32-exact number for each element of the small caches below; never 0."""
    return float((((layer * 2 + (tensor == "v")) * 4 + head) * 256 + token) * 64 + dim + 1)


def numbers(layer: int, tensor: Tensor, head: int, token: int) -> list[float]:
    return [number(layer, tensor, head, token, dim) for dim in range(64)]


@pytest.mark.parametrize("banks", [BLACKHOLE, P100, WORMHOLE], ids=["8", "7", "12"])
@pytest.mark.parametrize("make", [cross, per_layer])
@pytest.mark.parametrize("block_size", [16, 32, 64])
def test_every_element_is_where_its_address_says(make: Any, banks: list[int], block_size: int) -> None:
    tokens, ids = 70, {16: [9, 2, 3, 4, 0], 32: [5, 1, 2], 64: [3, 1]}[block_size]
    pool = make(2, 2, 64, "float32", banks, block_size)
    found = expected_banks(
        numbers, pool, num_tokens=tokens, block_ids=ids, kv_heads=4, chips=2, rotary_dim=64
    )
    nonzero = 0
    for pages in found.values():
        for page in pages.values():
            nonzero += sum(struct.unpack_from("<f", page, 4 * e)[0] != 0 for e in range(1024))
    assert nonzero == 2 * 2 * 4 * tokens * 64  # layers, K and V, heads: each element once, all else zero
    tensors: tuple[Tensor, ...] = ("k", "v")
    for tensor in tensors:
        for layer in range(2):
            for head in range(4):
                for token in range(0, tokens, 3):
                    for dim in range(0, 64, 5):
                        hf_dim = dim // 2 + dim % 2 * 32 if tensor == "k" else dim
                        block, place = ids[token // block_size], token % block_size
                        bank, address, e = pool.address(tensor, block, layer, head % 2, place, dim)
                        page = found[head // 2, bank][address]
                        value = struct.unpack_from("<f", page, 4 * e)[0]
                        assert value == number(layer, tensor, head, token, hf_dim)


def test_pages_are_exactly_those_of_the_blocks() -> None:
    """T = 8 pages over 8 banks: a page per bank, layer and tensor at slot block*L + l."""
    pool = cross(2, 2, 64, "bfp8", BLACKHOLE)
    found = expected_banks(numbers, pool, num_tokens=65, block_ids=[7, 2], kv_heads=2, rotary_dim=0)
    slots = [7 * 2, 7 * 2 + 1, 2 * 2, 2 * 2 + 1]
    addresses = {base + slot * 1088 for base in (FIRST_FREE, FIRST_FREE + 0x8000000) for slot in slots}
    assert {key: set(pages) for key, pages in found.items()} == {(0, bank): addresses for bank in range(8)}


def test_page_bytes_are_the_codec_of_its_rows() -> None:
    pool = cross(1, 1, 32, "bfp8", BLACKHOLE, 16)
    found = expected_banks(
        lambda layer, tensor, head, token: [float(d == 0) * (token + 1) for d in range(32)],
        pool,
        num_tokens=3,
        block_ids=[1],
        kv_heads=1,
        rotary_dim=32,
    )
    expected = bytearray(1088)
    expected[0:3] = bytes([127, 128, 128])  # tokens 0..2 hold 1, 2, 3
    expected[64], expected[64 + 16], expected[64 + 32] = 64, 64, 96
    assert found[0, 1] == {FIRST_FREE: bytes(expected), FIRST_FREE + 0x8000000: bytes(expected)}
    assert found[0, 0] == {}


def test_replicated_heads_give_equal_chips() -> None:
    pool = cross(1, 1, 64, "float32", BLACKHOLE, 32)
    found = expected_banks(numbers, pool, num_tokens=2, block_ids=[0], kv_heads=2, chips=4, rotary_dim=0)
    for bank in range(8):
        assert found[0, bank] == found[1, bank]
        assert found[2, bank] == found[3, bank]
    assert decode_page(found[0, 0][FIRST_FREE], "float32")[1][:2] == [number(0, "k", 0, 1, d) for d in (0, 1)]
    assert decode_page(found[2, 0][FIRST_FREE], "float32")[1][:2] == [number(0, "k", 1, 1, d) for d in (0, 1)]


@pytest.mark.parametrize(("tokens", "ids"), [(64, [1, 2]), (65, [1]), (0, [])])
def test_block_ids_must_fit_the_tokens(tokens: int, ids: list[int]) -> None:
    pool = cross(1, 1, 64, "bfp8", BLACKHOLE)
    with pytest.raises(ValueError, match=f"{tokens} tokens in blocks of 64"):
        expected_banks(numbers, pool, num_tokens=tokens, block_ids=ids, kv_heads=1, rotary_dim=0)


# ---- runs and segments ---------------------------------------------------------------------------------


def test_llama_70b_on_four_chips_cross_layer() -> None:
    """The published figure: 80 layers, 8 heads of 128, 64-token blocks: 174,080 B per bank and pool."""
    runs = expected_runs(cross(80, 2, 128, "bfp8", BLACKHOLE), [11])
    assert [run.length for run in runs] == [174_080] * 16
    assert sorted((run.page_class, run.bank) for run in runs) == [(c, c) for c in range(8) for _ in "kv"]
    assert runs[0] == Run(0, 0, FIRST_FREE + 11 * 174_080, 174_080)


@pytest.mark.parametrize(("codec", "length"), [("bfp8", 2176), ("bfloat16", 4096)])
def test_llama_70b_on_four_chips_per_layer(codec: Codec, length: int) -> None:
    """80 layers, K and V, 8 banks: 1280 runs of two pages."""
    assert [run.length for run in expected_runs(per_layer(80, 2, 128, codec, BLACKHOLE), [11])] == [
        length
    ] * 1280


@pytest.mark.parametrize(
    ("layers", "heads", "head_dim", "pages"),
    [(3, 2, 64, {3}), (3, 3, 64, {4, 5}), (2, 3, 64, {3}), (4, 3, 64, {6}), (3, 2, 128, {6})],
)
@pytest.mark.parametrize("codec", ["bfloat16", "bfp8"])
def test_runs_seen_in_ttnn(layers: int, heads: int, head_dim: int, pages: set[int], codec: Codec) -> None:
    """Pages per bank and block that TTNN's own pools showed with the blocks [4, 1, 5]."""
    pool = cross(layers, heads, head_dim, codec, BLACKHOLE)
    runs = expected_runs(pool, [4, 1, 5])
    assert {run.length for run in runs} == {count * PAGE_BYTES[codec] for count in pages}
    assert len(runs) == 3 * 2 * 8


@pytest.mark.parametrize("block", [0, 1, 4, 5])
def test_seven_banks_start_where_the_published_rule_says(block: int) -> None:
    """L*T = 36 pages on 7 banks: bank k's first slot is ceil((36 b - k) / 7); six pages there or five."""
    runs = expected_runs(cross(3, 3, 64, "bfloat16", P100), [block])
    k_runs = {run.bank: run for run in runs if run.address < FIRST_FREE + 0x8000000}
    assert len(runs) == 14 and sorted(k_runs) == list(range(7))
    for bank, run in k_runs.items():
        assert run.bank == (36 * block + run.page_class) % 7
        assert run.address == FIRST_FREE + math.ceil((36 * block - bank) / 7) * 2048
        assert run.length == (6 if run.page_class == 0 else 5) * 2048


def test_consecutive_blocks_merge_where_the_unit_fills_the_banks() -> None:
    pool = cross(2, 2, 64, "bfp8", BLACKHOLE)  # U = 16
    assert expected_segments(pool, [3, 4, 5, 6]) == 16  # a run per class and pool
    assert [run.length for run in expected_runs(pool, [3, 4, 5, 6])] == [4 * 2 * 1088] * 16
    assert expected_segments(pool, [6, 5, 4, 3]) == 64  # descending: nothing merges
    assert expected_segments(pool, [3, 9, 5, 1]) == 64
    assert expected_segments(pool, [3, 4, 9, 10]) == 32
    assert expected_segments(pool, [3, 4, 5, 6], chips=4) == 64
    assert expected_segments(pool, [3, 4, 5, 6, 7], blocks_per_parcel=2) == 3 * 16


@pytest.mark.parametrize(
    "pool",
    [
        cross(3, 3, 64, "bfp8", P100),  # U = 36 on 7
        cross(30, 3, 64, "bfp8", BLACKHOLE, 32),  # SmolLM2-135M with 32-token blocks: U = 180 on 8
    ],
    ids=["7 banks", "SmolLM2, 32 tokens"],
)
def test_consecutive_blocks_do_not_merge_elsewhere(pool: Pool) -> None:
    assert expected_segments(pool, [3, 4, 5]) == 3 * 2 * len(pool.banks)


def test_a_unit_smaller_than_the_banks_touches_only_its_pages() -> None:
    """One head of 64 and 32 tokens is two pages: two classes, the others are empty."""
    pool = per_layer(1, 1, 64, "bfp8", BLACKHOLE, 32)
    assert [len(stream) for stream in stream_pages(pool, [1])] == [2, 2, 0, 0, 0, 0, 0, 0]
    assert {run.bank for run in expected_runs(pool, [1])} == {2, 3}


def test_adjoining_pools_merge_where_one_ends_and_the_next_begins() -> None:
    """K ends with the request's last block, and V begins right after it with the first."""
    addresses = {"k": 0, "v": 2 * 2 * 1088}  # two blocks of two pages per bank
    pool = Pool("cross_layer", 2, 2, 64, 64, BLACKHOLE, addresses, "bfp8", 64)
    assert [run.length for run in expected_runs(pool, [0, 1])] == [8 * 1088] * 8


def test_padding_between_pages_cuts_runs() -> None:
    pool = Pool("cross_layer", 2, 2, 64, 64, BLACKHOLE, {"k": 0, "v": 0x100000}, "bfp8", 128)
    assert expected_segments(pool, [0]) == 2 * 16


# ---- source caches -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "tensor", "index"),
    [
        # 4 blocks, 3 heads, 16 tokens, D 8: a layer is 3072; block 2, layer 1, head 1, token 5, dim 7
        ("LBHNC", "k", 3072 + ((2 * 3 + 1) * 16 + 5) * 16 + 7),
        ("LBHNC", "v", 3072 + ((2 * 3 + 1) * 16 + 5) * 16 + 8 + 7),
        ("LBNHC", "k", 3072 + ((2 * 16 + 5) * 3 + 1) * 16 + 7),
        ("LBNHC", "v", 3072 + ((2 * 16 + 5) * 3 + 1) * 16 + 8 + 7),
        ("cpu", "k", 3072 + (2 * 3 + 1) * 256 + 7 * 16 + 5),
        ("cpu", "v", 3072 + (2 * 3 + 1) * 256 + 128 + 5 * 8 + 7),
    ],
)
def test_source_index_by_hand(family: Any, tensor: Tensor, index: int) -> None:
    source = Source(family, blocks=4, heads=3, block_size=16, head_dim=8, layers=2)
    assert source.index(tensor, 2, 1, 1, 5, 7) == index
    values = read_source(range(2 * 3072), source, [3, 2], layer=1, tensor=tensor, head=1, token=16 + 5)
    assert values[7] == index and len(values) == 8


@pytest.mark.parametrize("family", ["LBHNC", "LBNHC", "cpu"])
def test_source_places_are_all_there_once(family: Any) -> None:
    source = Source(family, blocks=2, heads=3, block_size=4, head_dim=2, layers=2)
    tensors: tuple[Tensor, ...] = ("k", "v")
    places = [
        source.index(tensor, b, layer, h, n, d)
        for tensor in tensors
        for b in range(2)
        for layer in range(2)
        for h in range(3)
        for n in range(4)
        for d in range(2)
    ]
    assert sorted(places) == list(range(2 * 2 * 3 * 4 * 2 * 2))


def test_source_refuses_what_is_outside() -> None:
    source = Source("LBHNC", blocks=2, heads=1, block_size=4, head_dim=2)
    flat = [0.0] * 32
    with pytest.raises(ValueError, match="32 elements, got 31"):
        read_source(flat[1:], source, [0], layer=0, tensor="k", head=0, token=0)
    with pytest.raises(ValueError, match="token 4 is not in the 1 blocks"):
        read_source(flat, source, [0], layer=0, tensor="k", head=0, token=4)
    with pytest.raises(ValueError, match="block 2 is not in"):
        read_source(flat, source, [2], layer=0, tensor="k", head=0, token=0)


@pytest.mark.vllm
def test_cpu_source_reads_what_vllm_wrote() -> None:
    """What vLLM's own CPU cache writer stored (format 'vec': fp32's), read back by the index formula."""
    import torch
    from vllm._custom_ops import cpu_attn_reshape_and_cache

    blocks, heads, block_size, head_dim, tokens, table = 5, 3, 32, 64, 70, [4, 0, 2]
    cache = torch.full((blocks, heads, block_size, 2 * head_dim), math.nan)
    key_cache, value_cache = cache.view(blocks, heads, 2 * block_size, head_dim).chunk(2, dim=2)
    numbered = torch.arange(2.0 * tokens * heads * head_dim).reshape(2, tokens, heads, head_dim)
    slots = torch.tensor([table[t // block_size] * block_size + t % block_size for t in range(tokens)])
    cpu_attn_reshape_and_cache(numbered[0], numbered[1], key_cache, value_cache, slots, "vec")
    source = Source("cpu", blocks, heads, block_size, head_dim)
    flat = cache.flatten().tolist()
    tensors: tuple[Tensor, ...] = ("k", "v")
    for token in range(tokens):
        for head in range(heads):
            for half, tensor in enumerate(tensors):
                found = read_source(flat, source, table, layer=0, tensor=tensor, head=head, token=token)
                assert found == numbered[half, token, head].tolist()
