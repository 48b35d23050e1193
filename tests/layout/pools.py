"""From a product's pool layout to the oracle's pool of the same shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hawk_connector.layout.kv_pool import KVPoolLayout
from tests.oracle.scalar import Pool

KINDS = ("per_layer", "cross_layer")


def pool_of(layout: KVPoolLayout, bases: Sequence[int], buffers: Sequence[int]) -> Pool:
    """The oracle's pool with the same shape; ``buffers`` in the layout's order of pools."""
    where: Any
    if layout.kind == "cross_layer":
        where = {"k": buffers[0], "v": buffers[1]}
    else:
        where = [{"k": buffers[2 * layer], "v": buffers[2 * layer + 1]} for layer in range(layout.layers)]
    return Pool(
        kind=layout.kind,
        layers=layout.layers,
        heads=layout.heads,
        block_size=layout.block_size,
        head_dim=layout.head_dim,
        banks=bases,
        buffer_address=where,
        codec=layout.codec,  # type: ignore[arg-type]
        alignment=layout.alignment,
    )
