"""The digest of a parcel: the same on both sides whatever blocks decode has, and another for any other byte."""

from __future__ import annotations

import random
import subprocess
import sys

import numpy as np
import pytest

from hawk_connector.layout.kv_pool import KVPoolLayout, PoolKind
from hawk_connector.plan.parcel import ChipShare, ParcelPlan
from hawk_connector.plan.parcel_digest import landed_digest, parcel_digest, wanted_ranges
from hawk_connector.plan.segments import PoolPlacement, Segments, pool_segments

BLOCKS = 3


def plan(kind: PoolKind = "cross_layer", banks: int = 7, blocks: int = BLOCKS) -> ParcelPlan:
    layout = KVPoolLayout(kind, 3, 2, 2, 32, 64, "bfp8", banks, 64)
    return ParcelPlan(layout, (ChipShare(0, ((0, 0), (1, 1))), ChipShare(1, ((2, 0),))), blocks)


def rows_of_block(parcel: ParcelPlan, block: int) -> set[int]:
    """Rows of the parcel that hold a block, page by page, through the map by which it is packed."""
    layout = parcel.layout
    rows: set[int] = set()
    for share in parcel.shares:
        for layer in range(layout.layers):
            for kv in (0, 1):
                rows |= set(parcel.page_rows(share, layer, kv)[block].reshape(-1).tolist())
    return rows


@pytest.mark.parametrize("kind", ["cross_layer", "per_layer"])
@pytest.mark.parametrize("banks", [1, 7, 8])
@pytest.mark.parametrize("skip", range(BLOCKS + 1))
def test_the_ranges_are_the_rows_of_the_wanted_blocks_and_no_others(kind: PoolKind, banks: int, skip: int) -> None:
    parcel = plan(kind, banks)
    pitch = parcel.layout.page_pitch
    wanted = set().union(*(rows_of_block(parcel, block) for block in range(skip, BLOCKS)))
    found: list[int] = []
    for offset, length in wanted_ranges(parcel, skip):
        assert offset % pitch == 0 and length % pitch == 0
        found += range(offset // pitch, (offset + length) // pitch)
    assert found == sorted(found) and len(found) == len(set(found))
    assert set(found) == wanted


def packed(parcel: ParcelPlan, seed: int = 1) -> np.ndarray:
    return np.frombuffer(random.Random(seed).randbytes(parcel.nbytes), dtype=np.uint8).copy()


def digest_of(parcel: ParcelPlan, skip: int, content: np.ndarray) -> str:
    return parcel_digest(parcel, skip, lambda offset, length: memoryview(content[offset : offset + length]))


def test_it_is_xxh3_128_of_the_whole_parcel() -> None:
    """Judged by the library's own command-line-free entry point, in a process of its own."""
    parcel = plan()
    content = packed(parcel)
    program = "import sys, xxhash; print(xxhash.xxh3_128_hexdigest(sys.stdin.buffer.read()))"
    told = subprocess.run([sys.executable, "-c", program], input=content.tobytes(), capture_output=True, check=True)
    assert digest_of(parcel, 0, content) == told.stdout.decode().strip()


def landed(parcel: ParcelPlan, content: np.ndarray, skip: int) -> tuple[np.ndarray, Segments, int]:
    """The parcel read into pools of its layout, as the engine would: memory, segments, region."""
    layout = parcel.layout
    num_blocks = 11
    bank = layout.pools * -(-layout.pool_pages(num_blocks) // layout.banks) * layout.page_pitch
    memory = np.zeros(layout.chips * layout.banks * bank, dtype=np.uint8)
    origins = memory.ctypes.data + np.arange(layout.chips * layout.banks, dtype=np.int64) * bank
    buffers = tuple(p * (bank // layout.pools) for p in range(layout.pools))
    placement = PoolPlacement(origins.reshape(layout.chips, layout.banks), buffers, num_blocks)
    region = content.ctypes.data
    segments = pool_segments(parcel, region, [9, 2, 5], placement, skip)
    for remote, local, length in zip(segments.remote, segments.local, segments.length, strict=True):
        at, source = int(local) - memory.ctypes.data, int(remote) - region
        memory[at : at + int(length)] = content[source : source + int(length)]
    return memory, segments, region


@pytest.mark.parametrize("kind", ["cross_layer", "per_layer"])
@pytest.mark.parametrize("skip", range(BLOCKS))
def test_both_sides_agree_and_one_changed_byte_is_seen(kind: PoolKind, skip: int) -> None:
    parcel = plan(kind)
    content = packed(parcel)
    memory, segments, region = landed(parcel, content, skip)
    expected = digest_of(parcel, skip, content)
    assert landed_digest(parcel, skip, region, segments) == expected
    rng = random.Random(skip)
    for _ in range(8):
        which = rng.randrange(segments.count)
        at = int(segments.local[which]) - memory.ctypes.data + rng.randrange(int(segments.length[which]))
        memory[at] ^= 1
        assert landed_digest(parcel, skip, region, segments) != expected
        memory[at] ^= 1


def test_skipped_blocks_may_hold_anything() -> None:
    parcel = plan()
    content = packed(parcel)
    before = digest_of(parcel, 2, content)
    pitch = parcel.layout.page_pitch
    for row in rows_of_block(parcel, 0) | rows_of_block(parcel, 1):
        content[row * pitch : (row + 1) * pitch] = 0
    assert digest_of(parcel, 2, content) == before


def test_reads_that_bring_more_than_is_wanted_are_fine_and_a_gap_is_not() -> None:
    """A landing may read whole streams; what it must not do is leave something out."""
    parcel = plan()
    content = packed(parcel)
    cuts = sorted({0, parcel.nbytes, *random.Random(3).sample(range(1, parcel.nbytes), 20)})
    starts, ends = np.array(cuts[:-1], dtype=np.int64), np.array(cuts[1:], dtype=np.int64)
    order = np.array([*random.Random(4).sample(range(20), 20), 20])
    region = 1 << 20
    segments = Segments((region + starts)[order], (content.ctypes.data + starts)[order], (ends - starts)[order])
    assert landed_digest(parcel, 1, region, segments) == digest_of(parcel, 1, content)
    missing = Segments(segments.remote[1:], segments.local[1:], segments.length[1:])
    with pytest.raises(ValueError, match="no read covers byte"):
        landed_digest(parcel, 0, region, missing)
