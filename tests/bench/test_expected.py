"""What a benchmark believes has landed: the oracle's bytes pass, and one wrong byte does not."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from hawk_connector.bench.cache import CacheShape, SyntheticCache, value_table
from hawk_connector.bench.device import DEVICES, PoolRequest, bench_device
from hawk_connector.bench.expected import ExpectedPages, Landed
from hawk_connector.bench.face_rows import face_row_reads
from hawk_connector.errors import ConfigError, LocalError
from tests.oracle import scalar
from tests.tt_plugin.pools import oracle_pool
from tt_plugin.bench import SimulatedPools, simulated_pools

pytestmark = pytest.mark.slow

SEED = 9
SHAPE = CacheShape("gpu-nhd", layers=2, kv_heads=4, head_dim=64, block_size=16, blocks=9, dtype="bf16")
LANDED = Landed(tokens=75, table=(7, 0, 3, 8, 5), block_ids=(4, 1, 2))


def pools_of(codec: str, *, rope: bool = True, device: str = "blackhole-p100") -> SimulatedPools:
    return simulated_pools(PoolRequest(device, 2, "cross_layer", 2, 4, 64, 32, codec, 6, rope))


SOURCE = scalar.Source("LBNHC", SHAPE.blocks, SHAPE.kv_heads, SHAPE.block_size, SHAPE.head_dim, SHAPE.layers)
VALUES = value_table(SHAPE.torch_dtype, SEED).tolist()


def row(layer: int, tensor: scalar.Tensor, head: int, token: int) -> list[float]:
    """One token's values, element by element through the oracle's index of the cache."""
    block, at = LANDED.table[token // 16], token % 16
    places = [SOURCE.index(tensor, block, layer, head, at, d) for d in range(SHAPE.head_dim)]
    return [VALUES[place % len(VALUES)] for place in places]


def write_oracle(pools: SimulatedPools) -> None:
    """Puts the bytes where the oracle has them."""
    inner = pools._pools
    wanted = scalar.expected_banks(
        row,
        oracle_pool(inner),
        num_tokens=LANDED.tokens,
        block_ids=list(LANDED.block_ids),
        kv_heads=SHAPE.kv_heads,
        chips=2,
        rotary_dim=SHAPE.head_dim,
    )
    for (chip, bank), pages in wanted.items():
        for address, content in pages.items():
            data = np.frombuffer(content, dtype=np.uint8)
            inner.device.write(chip, bank, address - inner.device.table.bases[bank], data)


@pytest.mark.parametrize("codec", ["float32", "bfloat16", "bfp8"])
def test_the_oracles_bytes_are_believed_and_no_others(codec: str) -> None:
    pools = pools_of(codec)
    expected = ExpectedPages(SHAPE, SEED)
    write_oracle(pools)
    # 3 blocks x 2 layers x K and V x 2 chips x 2 heads x 1 x 2 tiles
    assert expected.check(pools, LANDED, samples=1000, seed=1) == 96
    last = pools.addresses(1, 1, np.array([LANDED.block_ids[-1] * pools.layout.pages_per_unit + 7]))
    ctypes.c_uint8.from_address(int(last[0]) + pools.layout.page_bytes - 1).value ^= 1
    with pytest.raises(LocalError, match="the reference's page 3 of block 2, layer 1, V, chip 1"):
        expected.check(pools, LANDED, samples=1, seed=1)


def test_a_transfer_that_moved_nothing_is_noticed() -> None:
    with pytest.raises(LocalError, match="a transfer landed other bytes"):
        ExpectedPages(SHAPE, SEED).check(pools_of("bfloat16"), LANDED, samples=16, seed=2)


def test_face_rows_are_every_row_of_every_face() -> None:
    cache, pools = SyntheticCache(SHAPE, SEED), pools_of("bfloat16", rope=False)
    reads = face_row_reads(SHAPE, cache.address, pools, LANDED)
    # 75 tokens x 2 layers x K and V x 4 heads x 64 dims in 16s
    assert reads.count == 75 * 2 * 2 * 4 * 4
    assert set(reads.length.tolist()) == {32}
    for remote, local in zip(reads.remote.tolist(), reads.local.tolist(), strict=True):
        ctypes.memmove(local, remote, 32)
    assert ExpectedPages(SHAPE, SEED).check(pools, LANDED, samples=1000, seed=1) == 96


@pytest.mark.parametrize("pools", [pools_of("bfp8", rope=False), pools_of("bfloat16")], ids=["bfp8", "rope order"])
def test_face_rows_need_pools_that_have_them(pools: SimulatedPools) -> None:
    with pytest.raises(ConfigError, match="face rows cannot be read one by one"):
        face_row_reads(SHAPE, 4096, pools, LANDED)


def test_the_device_is_found_by_its_entry_point() -> None:
    assert DEVICES == "hawk_connector.bench_devices"
    assert bench_device() is simulated_pools
