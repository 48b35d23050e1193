"""Decoding pages: against the oracle, and against digests of what TTNN itself unpacked."""

from __future__ import annotations

import hashlib
import math
import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hawk_connector.layout.codec import codec_named
from hawk_connector.transform.reference import decode_pages, encode_pages
from tests.oracle.scalar import Codec, decode_page, tile_position

BLOCK_FLOATS: tuple[Codec, ...] = ("bfp8", "bfp4", "bfp2")
CODECS: tuple[Codec, ...] = ("float32", "bfloat16", *BLOCK_FLOATS)
BITS = {"bfp8": 8, "bfp4": 4, "bfp2": 2}


def in_page_order(rows: list[list[float]]) -> list[float]:
    """The oracle's 32 rows of 32 values as the 1024 elements of a page."""
    values = [0.0] * 1024
    for r in range(32):
        for c in range(32):
            values[tile_position(r, c)] = rows[r][c]
    return values


def pages_of_every_code(codec: Codec) -> torch.Tensor:
    """256 pages: page E has all its shared exponents E, and the codes 0, 1, 2 ... over and over."""
    bits = BITS[codec]
    packed = 0
    for e in range(1024):
        packed |= e % (1 << bits) << e * bits
    body = packed.to_bytes(1024 * bits // 8, "little")
    return torch.tensor([list(bytes([exponent]) * 64 + body) for exponent in range(256)], dtype=torch.uint8)


@pytest.mark.parametrize("codec", CODECS)
def test_random_pages_by_the_oracle(codec: Codec) -> None:
    """Any bytes with shared exponents in the middle of the range; several blocks and pages at once."""
    rng = np.random.default_rng(11)
    size = codec_named(codec).page_bytes(1024)
    data = rng.integers(0, 256, (2, 3, size), dtype=np.uint8)
    if codec in BLOCK_FLOATS:
        data[..., :64] = rng.integers(8, 255, (2, 3, 64), dtype=np.uint8)
    found = decode_pages(torch.from_numpy(data), codec_named(codec)).to(torch.float32)
    assert found.shape == (2, 3, 1024)
    for block in range(2):
        for page in range(3):
            wanted = in_page_order(decode_page(data[block, page].tobytes(), codec))
            for got, want in zip(found[block, page].tolist(), wanted, strict=True):
                assert got == want or (math.isnan(got) and math.isnan(want))
                assert math.copysign(1, got) == math.copysign(1, want) or math.isnan(want)


@pytest.mark.parametrize("codec", BLOCK_FLOATS)
def test_every_code_with_every_exponent_by_the_oracle(codec: Codec) -> None:
    """Exact wherever float32 has the value as a normal number (or zero)."""
    found = decode_pages(pages_of_every_code(codec), codec_named(codec))
    compared = 0
    for exponent, page in enumerate(pages_of_every_code(codec)):
        wanted = in_page_order(decode_page(bytes(page.tolist()), codec))
        for e in range(1 << BITS[codec]):
            if wanted[e] and not 2.0**-126 <= abs(wanted[e]) < 2.0**128:
                continue
            assert found[exponent, e].item() == wanted[e]
            compared += 1
    assert compared > 0.95 * 256 * (1 << BITS[codec])


@pytest.mark.parametrize(
    ("codec", "digest"),
    [
        ("bfp8", "1896d42cdf106c232e98240adfbe1149a25475b13b6e035c00f2f4d91f063d41"),
        ("bfp4", "a0e21ed2a20dfc855d8fbe788a575e707c4613a505f4cfc0778e7f5e7aa02929"),
        ("bfp2", "33af2cfae3356d0ef8df292a7be87eaffceec157dc9a2c1a51639b7c89a95f82"),
    ],
)
def test_numbers_are_those_of_ttnn(codec: Codec, digest: str) -> None:
    """SHA-256 of what ttnn 0.81.1 unpacks from every code with every exponent, denormals, infinities, NaNs included."""
    found = decode_pages(pages_of_every_code(codec), codec_named(codec))[:, : 1 << BITS[codec]]
    bits = found.contiguous().view(torch.int32).numpy().astype("<u4")
    assert hashlib.sha256(bits.tobytes()).hexdigest() == digest


@given(st.integers(0, 1 << 32), st.sampled_from(BLOCK_FLOATS))
@settings(deadline=None, max_examples=40)
def test_what_a_codec_holds_it_holds_again(seed: int, codec: Codec) -> None:
    """Decoded numbers encode to the bytes that they came from: nothing is lost on the second way."""
    bits = np.random.default_rng(seed).integers(0, 1 << 32, (1, 2, 1024), dtype=np.uint32)
    bits = np.where(bits & 0x7F800000 == 0x7F800000, bits & 0x3FFFFFFF, bits)  # infinities and NaNs do not come back
    bits = np.where(bits & 0x7F800000 < 0x08000000, bits | 0x08000000, bits)
    wide = torch.from_numpy(bits.view(np.float32))
    data = encode_pages(wide, codec_named(codec))
    numbers = decode_pages(data, codec_named(codec))
    again = decode_pages(encode_pages(numbers, codec_named(codec)), codec_named(codec))
    assert torch.equal(again, numbers)


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_sixteen_bits_are_kept(name: str) -> None:
    every = struct.pack("<65536H", *range(1 << 16))
    data = torch.frombuffer(bytearray(every), dtype=torch.uint8).reshape(64, 2048)
    numbers = decode_pages(data, codec_named(name))
    assert numbers.dtype == getattr(torch, name)
    assert encode_pages(numbers, codec_named(name)).numpy().tobytes() == every


def test_a_page_must_have_a_size_that_the_codec_makes() -> None:
    with pytest.raises(ValueError, match="no page of bfp8 has 1087 bytes"):
        decode_pages(torch.zeros(1, 1087, dtype=torch.uint8), codec_named("bfp8"))
