"""Mode direct's reads: every byte of every wanted block once, from where it lies to where it belongs, in few reads."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hawk_connector.layout.cache_layout import CacheLayout, CacheMemory, ElementPlace
from hawk_connector.plan.block_plan import BlockPlan, block_segments

K, V = ElementPlace(0, 64, 16, 1), ElementPlace(8, 64, 16, 1)


def layout(*, layers: int = 2, split: int = 1, gap: int = 0) -> CacheLayout:
    """Blocks of 4 tokens of 2 heads of 8 elements: 256 bytes of float16, ``gap`` bytes apart."""
    return CacheLayout("kernels", layers, 2, 8, 4, "float16", 256, 256 + gap, K, V, split)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_every_byte_goes_to_its_place_and_neighbours_go_together(data: st.DataObject) -> None:
    split = data.draw(st.sampled_from([1, 4]))
    gap = data.draw(st.sampled_from([0, 64]))
    cache = layout(layers=data.draw(st.integers(1, 3)), split=split, gap=gap)
    blocks = data.draw(st.integers(1, 8))
    ids = st.permutations(range(12)).map(lambda order: order[:blocks])
    consecutive = st.integers(0, 12 - blocks).map(lambda first: list(range(first, first + blocks)))
    theirs, ours = data.draw(ids | consecutive), data.draw(ids | consecutive)
    skip = data.draw(st.integers(0, blocks))
    named = ours[: data.draw(st.integers(skip, blocks))]
    remote_bases = tuple(0x100000 * (n + 1) for n in range(cache.layers))
    local_bases = tuple(0x900000 + 0x100000 * n for n in range(cache.layers))
    plan = BlockPlan(cache, blocks).at(remote_bases, tuple(theirs))
    found = block_segments(plan, CacheMemory(cache, local_bases, 12 * split), named, skip)
    # Byte by byte, from the ids alone.
    wanted, starts = {}, []
    for layer in range(cache.layers):
        for block in range(skip, len(named)):
            for part in range(split):
                source, target = theirs[block] * split + part, named[block] * split + part
                starts.append((layer, source, target))
                for byte in range(256):
                    there = remote_bases[layer] + source * (256 + gap) + byte
                    wanted[there] = local_bases[layer] + target * (256 + gap) + byte
    moved = {}
    for remote, local, length in zip(found.remote.tolist(), found.local.tolist(), found.length.tolist(), strict=True):
        for byte in range(length):
            assert remote + byte not in moved, "read twice"
            moved[remote + byte] = local + byte
    assert moved == wanted
    follows = [b == (a[0], a[1] + 1, a[2] + 1) for a, b in pairwise(starts)]
    assert found.count == len(starts) - (sum(follows) if gap == 0 else 0)


def test_what_no_cache_has_is_an_error() -> None:
    cache = layout()
    plan = BlockPlan(cache, 2)
    memory = CacheMemory(cache, (0x1000, 0x9000), 4)
    with pytest.raises(ValueError, match="has not said where"):
        block_segments(plan, memory, [0, 1])
    for bases, ids in (((1,), (0, 1)), ((1, 2), (0,)), ((1, 2), (0, 1, 2)), ((), ())):
        with pytest.raises(ValueError, match="need as many ids and addresses"):
            plan.at(bases, ids)
    for bases, ids in (((1 << 62, 1 << 63), (0, 1)), ((1, 2), (0, 1 << 56))):
        with pytest.raises(ValueError, match="past every address"):
            plan.at(bases, ids)
    placed = plan.at((1, 2), (0, 1))
    for ours in ([0, 4], [-1, 0]):
        with pytest.raises(ValueError, match=r"0\.\.3"):
            block_segments(placed, memory, ours)
    with pytest.raises(ValueError, match="got 3 block ids"):
        block_segments(placed, memory, [0, 1, 2])
    with pytest.raises(ValueError, match="another cache"):
        block_segments(placed, CacheMemory(layout(gap=64), (0x1000, 0x9000), 4), [0, 1])


def test_memory_of_layers_that_lie_one_in_another_is_one_region() -> None:
    apart = CacheMemory(layout(), (0x1000, 0x9000), 4)
    assert apart.regions == [(0x1000, 1024), (0x9000, 1024)]
    within = CacheMemory(layout(gap=256), (0x1000, 0x1100), 4)
    assert within.regions == [(0x1000, 0x100 + 3 * 512 + 256)]


@pytest.mark.parametrize(
    ("change", "sound"),
    [
        ({}, True),
        ({"codec": "int4"}, False),
        ({"block_stride": 255}, False),
        ({"block_bytes": 254}, False),
        ({"v": ElementPlace(9, 64, 16, 1)}, False),
        ({"k": ElementPlace(0, 64, 1 << 40, 1)}, False),
        ({"k": None, "v": None}, True),
    ],
)
def test_a_layout_whose_elements_leave_their_block_is_not_sound(change: dict[str, object], sound: bool) -> None:
    import msgspec

    assert msgspec.structs.replace(layout(), **change).sound is sound
