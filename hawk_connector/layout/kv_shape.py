"""KVShape: what both sides must agree on."""

from __future__ import annotations

from typing import Annotated

import msgspec

__all__ = ["Extent", "KVShape"]

Extent = Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]
"""A count that sizes our tables. msgspec checks it where it comes from the wire: a peer must not size them at will."""


class KVShape(msgspec.Struct, frozen=True):
    """Shape of the logical cache of a whole model: ``layers`` x ``kv_heads`` x tokens x ``head_dim``, twice (K, V).

    ``dtype``: the dtype in which the model computes K and V ("float32", "bfloat16", "float16").
    """

    layers: Extent
    kv_heads: Extent
    head_dim: Extent
    dtype: str
