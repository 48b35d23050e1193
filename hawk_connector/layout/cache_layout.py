"""CacheLayout: how vLLM itself keeps one rank's paged cache, and CacheMemory: where such a cache lies.

A layer's cache is a row of *blocks*, each ``block_bytes`` in one piece and ``block_stride`` bytes after the one before
it.  Where K and V lie inside a block is known (``k``, ``v``), or the block is *opaque*: packed by an attention kernel
in an order of its own, so that only the same kernel can read it.

vLLM hands out blocks of ``split`` of these, one after another: some attention kernels want smaller blocks than its
``--block-size``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec

from .kv_shape import Extent

__all__ = ["SOURCE_CODECS", "CacheLayout", "CacheMemory", "ElementPlace"]

# Bytes of an element of the caches that are known.
SOURCE_CODECS = {"float32": 4, "bfloat16": 2, "float16": 2}

# Far more than any cache has, and so small that sums of some of them stay within 64 bits.
Offset = Annotated[int, msgspec.Meta(ge=0, le=1 << 48)]
Length = Annotated[int, msgspec.Meta(ge=1, le=1 << 48)]
Name = Annotated[str, msgspec.Meta(max_length=64)]


class ElementPlace(msgspec.Struct, frozen=True):
    """Element (head, token, dim) of a block lies ``offset + head * .. + token * .. + dim * ..`` elements from its
    first."""

    offset: Offset
    head: Offset
    token: Offset
    dim: Offset

    def end(self, heads: int, tokens: int, dims: int) -> int:
        """Elements up to and with the last one."""
        return self.offset + (heads - 1) * self.head + (tokens - 1) * self.token + (dims - 1) * self.dim + 1


class CacheLayout(msgspec.Struct, frozen=True, tag_field="form", tag="cache"):
    """One rank's cache.  ``heads``: of this rank.  ``block_size``: tokens of a block (vLLM's own have ``split`` times
    as many).  ``codec``: dtype of the elements.  ``backend``: the kernels that keep it so; they matter where ``k`` and
    ``v`` are None."""

    backend: Name
    layers: Extent
    heads: Extent
    head_dim: Extent
    block_size: Extent
    codec: Name
    block_bytes: Length
    block_stride: Length
    k: ElementPlace | None
    v: ElementPlace | None
    split: Extent = 1

    @property
    def opaque(self) -> bool:
        """Whether the order of the elements is the kernels' own affair."""
        return self.k is None or self.v is None

    @property
    def block_tokens(self) -> int:
        """Tokens of one of vLLM's blocks."""
        return self.block_size * self.split

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one of vLLM's blocks in all layers."""
        return self.layers * self.split * self.block_bytes

    @property
    def dense(self) -> bool:
        """Whether blocks touch."""
        return self.block_stride == self.block_bytes

    @property
    def sound(self) -> bool:
        """Whether K and V lie inside a block.  A peer's layout is not to be used before this was asked."""
        size = SOURCE_CODECS.get(self.codec)
        if size is None or self.block_stride < self.block_bytes or self.block_bytes % size:
            return False
        elements = self.block_bytes // size
        places = [place for place in (self.k, self.v) if place is not None]
        return all(place.end(self.heads, self.block_size, self.head_dim) <= elements for place in places)


@dataclass(frozen=True)
class CacheMemory:
    """A cache of ``layout`` in this process.

    ``bases``: address of each layer's first block.  ``num_blocks``: blocks of a layer, in units of ``layout``.
    """

    layout: CacheLayout
    bases: tuple[int, ...]
    num_blocks: int

    @property
    def regions(self) -> Sequence[tuple[int, int]]:
        """(address, length) of the memory that holds it.  Layers that lie one in another are one region."""
        length = (self.num_blocks - 1) * self.layout.block_stride + self.layout.block_bytes
        spans: list[tuple[int, int]] = []
        for base in sorted(self.bases):
            if spans and base < spans[-1][0] + spans[-1][1]:
                spans[-1] = (spans[-1][0], base + length - spans[-1][0])
            else:
                spans.append((base, length))
        return spans
