"""From a product's pool layout to the oracle's pool of the same shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hawk_connector.layout.kv_pool import KVPoolLayout
from tests.oracle.scalar import Pool
from tests.oracle.sharded import ShardedPool

KINDS = ("per_layer", "cross_layer")


def pool_of(layout: KVPoolLayout, bases: Sequence[int], buffers: Sequence[int]) -> Pool:
    """The oracle's pool with the same shape, head_dim in whole tiles; ``buffers`` in the layout's order of pools."""
    where: Any
    if layout.kind == "cross_layer":
        where = {"k": buffers[0], "v": buffers[1]}
    else:
        where = [{"k": buffers[2 * layer], "v": buffers[2 * layer + 1]} for layer in range(layout.layers)]
    same: dict[str, Any] = {
        "kind": layout.kind,
        "layers": layout.layers,
        "heads": layout.heads,
        "block_size": layout.block_size,
        "head_dim": -(-layout.head_dim // 32) * 32,
        "banks": bases,
        "buffer_address": where,
        "codec": layout.codec,
        "alignment": layout.alignment,
    }
    if layout.channels == "interleaved":
        return Pool(**same)
    return ShardedPool(**same, shard_rows=layout.shard_rows)
