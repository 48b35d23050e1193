"""Pools at TTNN's addresses."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hawk_connector.errors import CapacityError
from hawk_connector.layout.kv_pool import KVPoolLayout, PoolKind
from tests.oracle.scalar import heads_of_chip as oracle_heads
from tests.oracle.scalar import stream_pages
from tests.tt_plugin.pools import TABLES, make_pools, oracle_pool
from tt_plugin.device.banks import BankTable
from tt_plugin.device.kv_pool import KVPools, heads_of_chip, largest_num_blocks
from tt_plugin.device.simulated import SimulatedDevice

KINDS: tuple[PoolKind, ...] = ("cross_layer", "per_layer")


def pages_of(pools: KVPools, block_ids: list[int]) -> list[tuple[int, int]]:
    """(bank, address relative to the bank's base) of every page of the blocks, by the oracle, in stream order."""
    bases = pools.device.table.bases
    streams = stream_pages(oracle_pool(pools), block_ids)
    return [(bank, address - bases[bank]) for stream in streams for bank, address in stream]


@pytest.mark.parametrize("banks", [7, 8, 12])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("codec", "block_size"), [("bfp8", 64), ("float32", 32), ("bfloat16", 16)])
def test_zeroing_and_copying_blocks_touch_their_pages_and_no_other(
    banks: int, kind: PoolKind, codec: str, block_size: int
) -> None:
    pools = make_pools(banks=banks, kind=kind, codec=codec, block_size=block_size, kv_heads=3, num_blocks=6)
    pitch = pools.layout.page_pitch
    source = np.random.default_rng(0)
    # Two blocks' pages correspond in stream order.
    pages = {block: pages_of(pools, [block]) for block in range(6)}
    before: dict[int, list[bytes]] = {}
    for block, places in pages.items():
        before[block] = [source.integers(1, 256, pitch, dtype=np.uint8).tobytes() for _ in places]
        for (bank, address), page in zip(places, before[block], strict=True):
            pools.device.bank(0, bank)[address : address + pitch] = np.frombuffer(page, np.uint8)

    pools.zero_blocks([1, 4])
    pools.copy_blocks([0, 2], [5, 0])

    # Copies read before they write: 5 gets what 0 had, 0 what 2 has.
    holds = {0: before[2], 2: before[2], 3: before[3], 5: before[0]}
    for block, places in pages.items():
        now = [pools.device.bank(0, bank)[address : address + pitch].tobytes() for bank, address in places]
        assert now == holds.get(block, [bytes(pitch)] * len(places))
    # Every byte of four blocks is set, and none beside them.
    assert np.count_nonzero(pools.device.memory[0]) == 4 * len(pages[0]) * pitch


@settings(max_examples=40, deadline=None)
@given(
    banks=st.sampled_from([7, 8, 12]),
    kind=st.sampled_from(KINDS),
    codec=st.sampled_from(["float32", "bfloat16", "bfp8"]),
    layers=st.integers(1, 4),
    heads=st.integers(1, 4),
    block_size=st.sampled_from([16, 32, 64, 96]),
    head_dim=st.sampled_from([32, 64, 128]),
    num_blocks=st.integers(1, 9),
)
def test_pages_views_show_the_oracles_addresses(
    banks: int, kind: PoolKind, codec: str, layers: int, heads: int, block_size: int, head_dim: int, num_blocks: int
) -> None:
    pools = make_pools(
        banks=banks,
        kind=kind,
        codec=codec,
        layers=layers,
        kv_heads=heads,
        block_size=block_size,
        head_dim=head_dim,
        num_blocks=num_blocks,
    )
    found = {
        (bank, int(view[bank, slot].ctypes.data - pools.device.origins[0, bank]))
        for pool in range(pools.layout.pools)
        for view in [pools.pages(0, pool)]
        for bank in range(banks)
        for slot in range(view.shape[1])
        if slot * banks + bank < pools.layout.pool_pages(num_blocks)
    }
    expected = pages_of(pools, list(range(num_blocks)))
    assert found == set(expected) and len(found) == len(expected)
    covered = pools.regions()
    for bank, address in expected:
        host = int(pools.device.origins[0, bank]) + address
        assert any(start <= host and host + pools.layout.page_pitch <= start + size for start, size in covered)
    assert sum(size for _, size in covered) == pools.nbytes
    pools.device.close()


def test_neighbouring_pools_are_one_region_per_bank() -> None:
    pools = make_pools(kind="per_layer", layers=3, chips=2)
    assert len(pools.regions()) == 2 * 8


@pytest.mark.parametrize(("kv_heads", "chips"), [(1, 4), (3, 1), (3, 3), (4, 2), (8, 4), (2, 8), (3, 9)])
def test_heads_of_each_chip(kv_heads: int, chips: int) -> None:
    assert [list(heads_of_chip(c, kv_heads, chips)) for c in range(chips)] == [
        oracle_heads(c, chips, kv_heads) for c in range(chips)
    ]


def test_page_table_of_a_cross_layer_pool() -> None:
    pools = make_pools(layers=4)
    table = np.array([[3, 0, -1]], dtype=np.int32)
    assert pools.page_table(table, 2).tolist() == [[14, 2, -1]]
    assert make_pools(layers=4, kind="per_layer").page_table(table, 2).tolist() == [[3, 0, -1]]


def test_llama_70b_on_four_p150() -> None:
    # 80 layers, 8 KV heads, head_dim 128, blocks of 64: 2 heads a chip, 16 tiles a block and layer.
    layout = KVPoolLayout("cross_layer", 80, 4, 2, 64, 128, "bfp8", 8, 64)
    table = BankTable.named("blackhole-p150")
    most = largest_num_blocks(table, layout)
    # A block's run in a bank is 80 * 16 / 8 pages of 1088 bytes = 174,080 (published in the design).
    assert most == (0xFF000000 - 0x100080) // 2 // 1088 // 160
    device = SimulatedDevice(4, table)
    with pytest.raises(CapacityError, match=rf"An empty blackhole-p150 holds {most} blocks"):
        KVPools(device, layout, most + 1)
    assert device.allocator.free_bytes == 0xFF000000 - 0x100080
    pools = KVPools(device, layout, most)
    assert pools.buffer_addresses[1] - pools.buffer_addresses[0] == most * 174_080
    pools.free()
    assert device.allocator.free_bytes == 0xFF000000 - 0x100080


def test_blocks_that_do_not_exist_are_refused() -> None:
    pools = make_pools(num_blocks=4)
    with pytest.raises(ValueError, match=r"0\.\.3; got 1\.\.4"):
        pools.zero_blocks([1, 4])
    with pytest.raises(ValueError, match="got 2 and 1"):
        pools.copy_blocks([1, 2], [3])


def test_a_layout_of_another_device_is_refused() -> None:
    layout = make_pools(banks=7).layout
    with pytest.raises(ValueError, match="banks: the layout has 7, the device 8"):
        KVPools(SimulatedDevice(1, TABLES[8]), layout, 4)
