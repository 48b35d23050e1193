"""KVPoolLayout: how the decode side's paged cache is cut into pools, units and pages.

A *pool* is one device buffer.  Kind ``per_layer`` has one pool for each layer and K/V, in the order layer 0 K,
layer 0 V, layer 1 K ...; a moved unit is one block of one layer.  Kind ``cross_layer`` has two pools, K and V, of
shape ``[num_blocks * layers, heads, block_size, head_dim]``; a moved unit is one block's whole depth, layer ``l`` of
block ``b`` being pool block ``b * layers + l``.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Literal

import msgspec

from .channels import InterleavedRule
from .codec import Codec, codec_named
from .kv_shape import Extent
from .tensor_layout import TILE, TensorLayout, ttnn_tiles

__all__ = ["KVPoolLayout", "PoolKind"]

PoolKind = Literal["per_layer", "cross_layer"]


class KVPoolLayout(msgspec.Struct, frozen=True):
    """The decode side's cache layout, equal on all chips but for the heads that each holds.

    ``heads``: KV heads on one chip.  ``chips``: chips of the mesh.  ``banks``: DRAM banks of a chip.
    ``alignment``: bytes (64 on Blackhole, 32 on Wormhole).  ``rope_interleaved``: K is stored in Meta order.
    """

    kind: PoolKind
    layers: Extent
    chips: Extent
    heads: Extent
    block_size: Extent
    head_dim: Extent
    codec: str
    banks: Extent
    alignment: Extent
    rope_interleaved: bool = True

    @property
    def page_codec(self) -> Codec:
        return codec_named(self.codec)

    @property
    def page_pitch(self) -> int:
        """Bytes of a page in its bank: page bytes rounded up to the alignment."""
        return -(-self.page_codec.page_bytes(TILE * TILE) // self.alignment) * self.alignment

    @property
    def rule(self) -> InterleavedRule:
        return InterleavedRule(self.banks, self.page_pitch)

    @property
    def pages_per_block(self) -> int:
        """T: tiles of one block, one layer, K or V, on one chip."""
        return self.heads * -(-self.block_size // TILE) * (self.head_dim // TILE)

    @property
    def pages_per_unit(self) -> int:
        """U: pages of a moved unit, ``layers * T`` for cross_layer and ``T`` for per_layer."""
        return self.pages_per_block * (self.layers if self.kind == "cross_layer" else 1)

    @property
    def pools(self) -> int:
        """Device buffers of one chip."""
        return 2 if self.kind == "cross_layer" else 2 * self.layers

    @property
    def unit_bytes(self) -> int:
        return self.pages_per_unit * self.page_pitch

    @property
    def block_bytes(self) -> int:
        """Bytes of one block on one chip, all layers, K and V."""
        return self.pools * self.unit_bytes

    def pool_of(self, layer: int, kv: int) -> int:
        """Pool that holds ``layer``'s K (kv 0) or V (kv 1)."""
        return kv if self.kind == "cross_layer" else 2 * layer + kv

    def first_page_of(self, layer: int) -> int:
        """Page of a unit at which ``layer`` starts."""
        return layer * self.pages_per_block if self.kind == "cross_layer" else 0

    def tensor_layout(self, kv: int) -> TensorLayout:
        """Layout of one block of one layer on one chip: K (kv 0) or V (kv 1)."""
        return _tensor_layout(self, kv)

    def pool_pages(self, num_blocks: int) -> int:
        """Pages of one pool that holds ``num_blocks`` blocks."""
        return num_blocks * self.pages_per_unit


@lru_cache(maxsize=64)
def _tensor_layout(layout: KVPoolLayout, kv: int) -> TensorLayout:
    return ttnn_tiles(
        layout.heads,
        layout.block_size,
        layout.head_dim,
        layout.page_codec,
        rope_interleaved=layout.rope_interleaved and kv == 0,
    )
