"""The send buffer's allocator: never overlaps, loses nothing, and joins what comes back."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hawk_connector.errors import LocalError
from hawk_connector.protocol.regions import REGION_ALIGNMENT, RegionAllocator

steps = st.lists(st.one_of(st.integers(0, 3000), st.integers(0, 30).map(lambda i: -1 - i)), max_size=60)
"""Zero and more: allocate that many bytes; less: release one of those held."""


@given(st.integers(0, 20_000), steps)
@settings(deadline=None, max_examples=200)
def test_ranges_never_overlap_and_all_join_again(capacity: int, todo: list[int]) -> None:
    """A byte map, one entry for each 256 bytes, says what is free."""
    regions = RegionAllocator(capacity)
    granules = capacity // 256
    owner: list[int | None] = [None] * granules
    held: list[int] = []
    for step in todo:
        if step >= 0:
            size = max(1, -(-step // 256))
            offset = regions.allocate(step)
            runs = "".join("x" if owned is None else " " for owned in owner).split()
            # First fit finds room exactly where there is room: what was released has been joined.
            assert (offset is not None) == any(len(run) >= size for run in runs)
            if offset is None:
                continue
            assert offset % REGION_ALIGNMENT == 0
            mine = range(offset // 256, offset // 256 + size)
            assert mine.stop <= granules and all(owner[i] is None for i in mine)
            for i in mine:
                owner[i] = offset
            held.append(offset)
        elif held:
            offset = held.pop(step % len(held))
            regions.release(offset)
            owner = [None if owned == offset else owned for owned in owner]
        assert regions.held_regions == len(held)
        assert regions.held_bytes == 256 * sum(owned is not None for owned in owner)
    for offset in held:
        regions.release(offset)
    assert (regions.held_regions, regions.held_bytes) == (0, 0)
    if granules:
        assert regions.allocate(granules * 256) == 0


@given(st.permutations(range(6)))
@settings(deadline=None)
def test_any_order_of_release_gives_one_free_range(order: list[int]) -> None:
    regions = RegionAllocator(6 * 512)
    offsets = [regions.allocate(512) for _ in range(6)]
    assert offsets == [0, 512, 1024, 1536, 2048, 2560]
    assert regions.allocate(1) is None
    for i in order:
        regions.release(512 * i)
    assert regions.allocate(6 * 512) == 0


def test_a_region_is_released_once() -> None:
    regions = RegionAllocator(1024)
    assert regions.allocate(100) == 0
    regions.release(0)
    with pytest.raises(LocalError, match="no region is held at offset 0"):
        regions.release(0)
    with pytest.raises(LocalError, match="no region is held at offset 256"):
        regions.release(256)


def test_capacity_is_whole_granules() -> None:
    assert RegionAllocator(1000).capacity == 768
    assert RegionAllocator(255).allocate(1) is None
