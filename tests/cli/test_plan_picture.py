"""`hawk plan --picture`: the tiles that are drawn lie where the oracle has them, and a picture is written."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hawk_connector.cli.plan_picture import block_tiles
from hawk_connector.layout.kv_pool import KVPoolLayout
from tests.layout.pools import KINDS, pool_of
from tests.oracle.scalar import k_order

pytestmark = pytest.mark.slow


def hawk(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hawk_connector.cli.main", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def numbers(text: str) -> list[int]:
    """ "0-15, 64-79" as numbers."""
    ranges = [[int(end) for end in part.split("-")] for part in text.split(", ")]
    return [number for ends in ranges for number in range(ends[0], ends[-1] + 1)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("banks", [7, 8])
@pytest.mark.parametrize("block_size", [16, 64])
def test_tiles_lie_where_the_oracle_has_them(kind: str, banks: int, block_size: int) -> None:
    layout = KVPoolLayout(kind, 3, 1, 2, block_size, 64, "bfp8", banks, 64)  # type: ignore[arg-type]
    pool = pool_of(layout, [0] * banks, [0] * layout.pools)
    for kv, layer in ((0, 2), (1, 1)):
        tiles = block_tiles(layout, 5, layer, kv)
        drawn = {}
        for i, head in enumerate(tiles.head.tolist()):
            where = (int(tiles.bank[i]), int(tiles.slot[i]))
            for token in numbers(tiles.tokens[i]):
                for dim in numbers(tiles.dims[i]):
                    drawn[head, token, dim] = where
        wanted = {}
        for head, token, place in np.ndindex(2, block_size, 64):
            bank, page, _ = pool.address("kv"[kv], 5, layer, head, token, place)  # type: ignore[arg-type]
            wanted[head, token, k_order(place, 64, 64) if kv == 0 else place] = (bank, page // 1088)
        assert drawn == wanted


@pytest.mark.parametrize(("file", "starts"), [("block.png", b"\x89PNG"), ("block.svg", b"<?xml")])
@pytest.mark.parametrize("layout", ["ttnn-interleaved", "ttnn-nd-sharded", "ascend-910b"])
def test_a_picture_is_written(tmp_path: Path, file: str, starts: bytes, layout: str) -> None:
    words = ("--model", "smollm2-135m", "--layout", layout, "--pool", "per_layer", "--picture", str(tmp_path / file))
    done = hawk("plan", *words)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / file).read_bytes().startswith(starts)


@pytest.mark.parametrize(
    ("file", "text"), [("block.xyz", "End the file's name in .png or .svg"), ("no/block.png", "cannot write")]
)
def test_a_picture_that_cannot_be_written_is_said(tmp_path: Path, file: str, text: str) -> None:
    done = hawk("plan", "--model", "smollm2-135m", "--picture", str(tmp_path / file))
    assert done.returncode == 2
    assert text in done.stderr
