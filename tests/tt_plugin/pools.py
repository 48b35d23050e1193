"""Pools on small simulated devices, and the oracle's idea of the same pools."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from hawk_connector.layout.kv_pool import KVPoolLayout, PoolKind
from tests.oracle.scalar import Pool
from tt_plugin.device.banks import BankTable
from tt_plugin.device.kv_pool import KVPools, heads_per_chip
from tt_plugin.device.simulated import SimulatedDevice

MIB = 1 << 20
TABLES = {
    7: BankTable("seven", (0,) * 7, 64 * MIB, 64, 0x100080),
    8: BankTable("eight", (0,) * 8, 64 * MIB, 64, 0x100080),
    12: BankTable("twelve", (0, 0x40000000) * 6, 64 * MIB, 32, 0x100040),
}


def make_pools(
    *,
    banks: int = 8,
    chips: int = 1,
    kind: PoolKind = "cross_layer",
    codec: str = "float32",
    layers: int = 2,
    kv_heads: int = 2,
    block_size: int = 64,
    head_dim: int = 64,
    num_blocks: int = 8,
    rope_interleaved: bool = True,
) -> KVPools:
    table = TABLES[banks]
    layout = KVPoolLayout(
        kind=kind,
        layers=layers,
        chips=chips,
        heads=heads_per_chip(kv_heads, chips),
        block_size=block_size,
        head_dim=head_dim,
        codec=codec,
        banks=banks,
        alignment=table.alignment,
        rope_interleaved=rope_interleaved,
    )
    return KVPools(SimulatedDevice(chips, table), layout, num_blocks)


def oracle_pool(pools: KVPools) -> Pool:
    layout, addresses = pools.layout, pools.buffer_addresses
    buffers: Any
    if layout.kind == "cross_layer":
        buffers = {"k": addresses[0], "v": addresses[1]}
    else:
        buffers = [{"k": addresses[2 * i], "v": addresses[2 * i + 1]} for i in range(layout.layers)]
    return Pool(
        layout.kind,
        layout.layers,
        layout.heads,
        layout.block_size,
        layout.head_dim,
        pools.device.table.bases,
        buffers,
        cast(Any, layout.codec),
        layout.alignment,
    )


def device_bytes(pools: KVPools, chip: int, bank: int, address: int, length: int) -> bytes:
    """What lies at a device address (with the bank's base, as the oracle counts)."""
    start = address - pools.device.table.bases[bank]
    return pools.device.bank(chip, bank)[start : start + length].tobytes()


def random_kv(seed: int, layers: int, heads: int, tokens: int, dims: int) -> NDArray[np.float32]:
    """fp32 ``[2, layers, tokens, heads, dims]`` with magnitudes over many binades."""
    source = np.random.default_rng(seed)
    shape = (2, layers, tokens, heads, dims)
    values = source.standard_normal(shape) * np.exp2(source.integers(-9, 9, shape))
    return values.astype(np.float32)
