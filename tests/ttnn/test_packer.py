"""Our codecs against TTNN's host packer and unpacker: every byte, every bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hawk_connector.layout.codec import codec_named
from hawk_connector.transform.encoding import decode_pages, encode_pages
from tests.ttnn.bit_patterns import numbers_for_bfloat16, numbers_for_block_float
from tests.ttnn.conftest import Opener

pytestmark = pytest.mark.ttnn

BLOCK_FLOATS = ("bfp8", "bfp4", "bfp2")
ENOUGH = 2_000_000
TILE = 1024


def report(wrong: np.ndarray, total: int) -> str:
    return f"{len(wrong)} of {total} differ, the first at {wrong[:5].tolist()}"


@pytest.mark.parametrize("codec", BLOCK_FLOATS)
def test_packed_bytes(ttnn_device: Opener, codec: str) -> None:
    ours = codec_named(codec)
    values = numbers_for_block_float(ours.magnitude_bits, seed=1)
    assert len(values) >= ENOUGH
    wanted = ttnn_device("mock-p150").ask("pack", codec=codec, values=values)
    found = encode_pages(torch.from_numpy(values).view(-1, TILE), ours).numpy().reshape(-1)
    assert found.shape == wanted.shape
    wrong = np.flatnonzero(found != wanted)
    assert not len(wrong), report(wrong, len(wanted))


def test_packed_bfloat16(ttnn_device: Opener) -> None:
    values = numbers_for_bfloat16(seed=2)
    assert len(values) >= ENOUGH
    # One tile below the other, each of four faces of 16 rows and columns.
    faces = values.reshape(-1, 2, 2, 16, 16).transpose(0, 1, 3, 2, 4)
    rows = np.ascontiguousarray(faces).reshape(1, 1, -1, 32)
    wanted = ttnn_device("mock-p150").ask("tiles", values=rows, dtype="bfloat16").view("<u2")
    found = encode_pages(torch.from_numpy(values).view(-1, TILE), codec_named("bfloat16")).numpy().view("<u2")
    wrong = np.flatnonzero(found.reshape(-1) != wanted)
    assert not len(wrong), report(wrong, len(wanted))


@pytest.mark.parametrize("codec", BLOCK_FLOATS)
def test_unpacked_numbers(ttnn_device: Opener, codec: str) -> None:
    """Pages of random bytes: every code under every exponent, codes that no packer makes among them."""
    ours = codec_named(codec)
    pages = np.random.default_rng(3).integers(0, 256, (2048, ours.page_bytes(TILE)), dtype=np.uint8)
    assert len(pages) * TILE >= ENOUGH
    wanted = ttnn_device("mock-p150").ask("unpack", codec=codec, pages=pages).view(np.uint32)
    found = decode_pages(torch.from_numpy(pages), ours).numpy().reshape(-1).view(np.uint32)
    wrong = np.flatnonzero(found != wanted)
    assert not len(wrong), report(wrong, len(wanted))
