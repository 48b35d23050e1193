"""Bytes of encoded pages against the oracle, and against digests of what TTNN itself packed."""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hawk_connector.layout.codec import codec_named
from hawk_connector.transform.reference import encode_pages
from tests.oracle.scalar import Codec, encode_page, tile_position
from tests.oracle.test_scalar import golden_bits

BLOCK_FLOATS: tuple[Codec, ...] = ("bfp8", "bfp4", "bfp2")
CODECS: tuple[Codec, ...] = ("float32", "bfloat16", *BLOCK_FLOATS)
QUIET = 0x400000


def page_of(bits: Sequence[int]) -> torch.Tensor:
    """fp32 bit patterns, in page order and zeros after them, as one page ``[1, 1, 1024]``."""
    padded = np.zeros(1024, dtype=np.uint32)
    padded[: len(bits)] = bits
    return torch.from_numpy(padded.view(np.float32)).reshape(1, 1, 1024)


def oracle_page(values: Sequence[float], codec: Codec) -> bytes:
    """The oracle's page of 1024 values in page order."""
    return encode_page([[values[tile_position(r, c)] for c in range(32)] for r in range(32)], codec)


def encoded(pages: torch.Tensor, codec: Codec) -> bytes:
    found = encode_pages(pages, codec_named(codec))
    assert found.dtype == torch.uint8
    return found.numpy().tobytes()


def not_signalling(bits: int) -> int:
    """The oracle takes Python floats, and these quieten a signalling NaN."""
    return bits | QUIET if bits & 0x7F800000 == 0x7F800000 and bits & 0x7FFFFF else bits


def near_tie(sign: int, exponent: int, fraction: int, nudge: int) -> int:
    """Few fraction bits, then one fp32 ulp below, on or above: a tie at some shift of some codec."""
    return sign << 31 | exponent << 23 | max(0, min(0x7FFFFF, fraction + nudge))


wild = st.integers(0, (1 << 32) - 1).map(not_signalling)
ties = st.builds(
    near_tie,
    st.integers(0, 1),
    st.integers(118, 128),
    st.integers(0, 1023).map(lambda top: top << 13),
    st.integers(-2, 2),
)
special = st.sampled_from(
    [
        0x00000000,  # 0, -0
        0x80000000,
        0x00000001,  # denormals, the smallest and the largest; the smallest normal
        0x807FFFFF,
        0x00800000,
        0x7F7FFFFF,  # the largest fp32: saturates, and becomes infinity as bf16
        0xFF7FFFFF,
        0x3F7FFFFF,  # just below 1: rounds up into the next power of two
        0x7F800000,  # infinities, NaNs
        0xFF800000,
        0x7FC00000,
        0xFFC12345,
        0x7FFFFFFF,
    ]
)
small = st.builds(near_tie, st.integers(0, 1), st.integers(0, 3), st.integers(0, 0x7FFFFF), st.just(0))
face_row = st.one_of(
    *(st.lists(kind, min_size=16, max_size=16) for kind in (wild, ties, small, special, ties | special))
)
several_rows = st.lists(face_row, min_size=4, max_size=4).map(lambda rows: [bits for row in rows for bits in row])


@pytest.mark.slow
@given(several_rows, st.sampled_from(CODECS))
@settings(max_examples=200, deadline=None)
def test_any_bit_patterns(bits: list[int], codec: Codec) -> None:
    page = page_of(bits)
    assert encoded(page, codec) == oracle_page(page.flatten().tolist(), codec)


@pytest.mark.parametrize("codec", CODECS)
def test_whole_pages_of_random_bits(codec: Codec) -> None:
    """Several blocks and pages at once: each is encoded by itself, in its place."""
    bits = np.random.default_rng(7).integers(0, 1 << 32, (2, 3, 1024), dtype=np.uint32)
    nan = (bits & 0x7F800000 == 0x7F800000) & (bits & 0x7FFFFF != 0)
    pages = torch.from_numpy(np.where(nan, bits | QUIET, bits).view(np.float32))
    found = encode_pages(pages, codec_named(codec))
    for block in range(2):
        for page in range(3):
            assert found[block, page].numpy().tobytes() == oracle_page(pages[block, page].tolist(), codec)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_number(codec: Codec, dtype: torch.dtype) -> None:
    """Magnitudes 1024 neighbours at a time; NaNs are below."""
    every = torch.from_numpy(np.arange(1 << 16, dtype=np.uint16).view(np.int16)).view(dtype)
    pages = torch.where(every.isnan(), torch.zeros((), dtype=dtype), every).reshape(1, 64, 1024)
    if codec in BLOCK_FLOATS:
        # Neighbours share an exponent; a stride brings different ones together.
        pages = pages.reshape(1, 1024, 64).transpose(1, 2)
    pages = pages[:, ::8]
    found = encode_pages(pages, codec_named(codec))
    for page in range(pages.shape[1]):
        assert found[0, page].numpy().tobytes() == oracle_page(pages[0, page].float().tolist(), codec)


def test_bfloat16_caches_keep_their_bits() -> None:
    """No conversion at all, so NaN payloads too."""
    every = np.arange(1 << 16, dtype=np.uint16)
    pages = torch.from_numpy(every.view(np.int16)).view(torch.bfloat16).reshape(1, 64, 1024)
    assert encoded(pages, "bfloat16") == b"".join(struct.pack("<H", bits) for bits in range(1 << 16))


def test_float32_caches_keep_their_bits() -> None:
    """Signalling NaNs too."""
    bits = [0x7F800001, 0xFFBFFFFF, 0x7FC00001, 0x00000001, 0x80000000]
    assert encoded(page_of(bits), "float32") == struct.pack("<1024I", *bits, *[0] * 1019)


@pytest.mark.parametrize("bits", [0x7F800001, 0xFF800001, 0x7FFFFFFF])
def test_every_nan_becomes_ttnns_one_bf16_nan(bits: int) -> None:
    """Signalling ones included, which the oracle cannot be given."""
    assert encoded(page_of([bits]), "bfloat16")[:4] == b"\xc0\x7f\x00\x00"
    half = torch.full((1, 1, 1024), math.nan, dtype=torch.float16)
    assert encoded(half, "bfloat16") == b"\xc0\x7f" * 1024


def test_pages_need_not_be_contiguous() -> None:
    values = torch.randn((1024, 2, 1), generator=torch.Generator().manual_seed(3))
    pages = values.permute(2, 1, 0)
    assert not pages.is_contiguous()
    for codec in CODECS:
        wanted = b"".join(oracle_page(pages[0, page].tolist(), codec) for page in range(2))
        assert encoded(pages, codec) == wanted


@pytest.mark.parametrize(
    ("codec", "digest"),
    [
        ("bfp8", "1413349d31f9cf875ef9bddc5abd613c35b8d15cb4d4c35e1b5736dfc709232a"),
        ("bfp4", "aff4fb96c69b1227585c3f4b5a1cfa0857360af2e2a8f26699566591a2d2e8d0"),
        ("bfp2", "e99af28518b5c08aaea014f7fd308c6c01baa885bbdecbde044266be73bb484f"),
        ("bfloat16", "6531d5fa9b8bd0f8f5ed987ef3931f004163fe30f076d93d41f653c2b1583bbd"),
    ],
)
def test_pages_are_those_of_ttnn(codec: Codec, digest: str) -> None:
    """SHA-256 of eight tiles (``golden_bits``) that ttnn 0.81.1 packed on the host; the oracle's test has them too."""
    pages = torch.from_numpy(np.array(golden_bits(), dtype=np.uint32).view(np.float32)).reshape(1, 8, 1024)
    assert hashlib.sha256(encoded(pages, codec)).hexdigest() == digest
