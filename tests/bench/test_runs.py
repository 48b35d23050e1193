"""Whole runs on small shapes: what moved is counted by hand, times are not looked at."""

from __future__ import annotations

from typing import Any

import pytest

from hawk_connector.bench.contestants import TransferOptions
from hawk_connector.bench.transfer import TransferRun, run_transfer
from hawk_connector.bench.transform import TransformOptions, run_transform

pytestmark = pytest.mark.slow

# K and V of a token take 2 x 4 layers x 2 heads x 64 x 2 = 2,048 bytes in bf16, so 1 MB is 512 tokens.
SHAPE: dict[str, Any] = {"layers": 4, "kv_heads": 2, "head_dim": 64}
MB = 1 << 20
TRANSFER_KEYS = {
    *("mode", "dtype", "size_bytes", "seconds_median", "seconds_min", "seconds_max", "segments", "packing"),
    *("bytes_per_segment", "pack_s", "pull_s", "land_s"),
}
TRANSFORM_KEYS = {"dtype", "threads", "gb_per_s", "memcpy_gb_per_s"}


@pytest.fixture(scope="module")
def run() -> TransferRun:
    return run_transfer(TransferOptions(dtypes=("bf16", "bfp8"), sizes_mb=(1,), runs=3, chips=1, **SHAPE))


def rows(run: TransferRun, mode: str, dtype: str | None = None) -> list[dict[str, Any]]:
    return [row for row in run.rows if row["mode"] == mode and dtype in (None, row["dtype"])]


def test_every_contestant_has_a_row_with_all_that_is_promised(run: TransferRun) -> None:
    found = [(row["mode"], row["dtype"], row["packing"]) for row in run.rows]
    packed = [(m, d, p) for m in ("hawk", "host") for d in ("bf16", "bfp8") for p in ("cold", "eager")]
    assert sorted(found) == sorted([("direct", "bf16", "eager"), ("face-rows", "bf16", "eager"), *packed])
    for row in run.rows:
        assert row.keys() >= TRANSFER_KEYS
        assert row["size_bytes"] == MB
        assert 0 < row["seconds_min"] <= row["seconds_median"] <= row["seconds_max"]
        assert row["verified_pages"] > 0


def test_direct_reads_whole_blocks_of_16_tokens_in_each_layer(run: TransferRun) -> None:
    (row,) = rows(run, "direct")
    assert row["wire_bytes"] == MB
    # 32 blocks in 4 layers, fewer where two shuffled ones happen to be neighbours on both sides.
    assert 100 < row["segments"] <= 32 * 4


def test_hawk_moves_the_pools_own_bytes(run: TransferRun) -> None:
    """16 blocks of 32 tokens; K's and V's 16 pages of each (4 layers, 2 heads, 2 columns of tiles) in 8 banks."""
    for row in rows(run, "hawk", "bf16"):
        assert row["wire_bytes"] == MB
        assert 200 < row["segments"] <= 16 * 2 * 8
    for row in rows(run, "hawk", "bfp8"):
        assert row["wire_bytes"] == MB * 1088 // 2048
        assert 200 < row["segments"] <= 16 * 2 * 8


def test_host_reads_the_raw_blocks_at_once(run: TransferRun) -> None:
    for row in rows(run, "host"):
        assert (row["wire_bytes"], row["segments"], row["parcels"]) == (MB, 1, 1)


def test_face_rows_are_32_bytes_each(run: TransferRun) -> None:
    (row,) = rows(run, "face-rows")
    assert (row["wire_bytes"], row["segments"], row["bytes_per_segment"]) == (MB, MB // 32, 32)


def test_transform_measures_every_crossing() -> None:
    options = TransformOptions(
        sources=("gpu-nhd", "cpu"),
        source_dtypes=("bf16",),
        dtypes=("bf16", "bfp8"),
        threads=(1, 2),
        tokens=64,
        runs=3,
        **SHAPE,
    )
    found = run_transform(options)
    assert [(r["source"], r["dtype"], r["threads"]) for r in found.rows] == [
        (source, dtype, threads) for source in ("gpu-nhd", "cpu") for threads in (1, 2) for dtype in ("bf16", "bfp8")
    ]
    for row in found.rows:
        assert row.keys() >= TRANSFORM_KEYS
        assert row["size_bytes"] == 64 * 2048
