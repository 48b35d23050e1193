"""KVPoolLayout: how the decode side's paged cache is cut into pools, units and pages.

A *pool* is one device buffer.  Kind ``per_layer`` has one pool for each layer and K/V, in the order layer 0 K,
layer 0 V, layer 1 K ...; a moved unit is one block of one layer.  Kind ``cross_layer`` has two pools, K and V, of
shape ``[num_blocks * layers, heads, block_size, head_dim]``; a moved unit is one block's whole depth, layer ``l`` of
block ``b`` being pool row ``b * layers + l``.  A *row* of a pool is what one block has in one layer.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Literal

import msgspec

from .axes import AxisOrder
from .bases import BaseTable
from .channels import ChannelRule, HeightShardedRule, InterleavedRule, LinearRule, RoundRobinShardsRule
from .codec import Codec, codec_named
from .kv_shape import Extent
from .tensor_layout import TensorLayout, tiled
from .tilings import Tiling, tiling_named

__all__ = ["Channels", "KVPoolLayout", "PoolKind"]

PoolKind = Literal["per_layer", "cross_layer"]
Channels = Literal["interleaved", "nd_sharded", "height_sharded", "linear"]


class KVPoolLayout(msgspec.Struct, frozen=True, tag_field="form", tag="pools"):
    """The decode side's cache layout, equal on all chips but for the heads that each holds.

    ``heads``: KV heads on one chip.  ``chips``: chips of the mesh.  ``banks``: DRAM banks of a chip.
    ``alignment``: bytes (64 on Blackhole, 32 on Wormhole).  ``rope_interleaved``: K is stored in Meta order.
    ``rotary_dim``: leading dims of K that RoPE turns, None for all; only these are re-ordered.
    ``tiling``: name of the tiling of a row.  ``channels``: the rule that deals pages out to the banks; the sharded
    ones put ``shard_rows`` whole rows into a shard (HEIGHT: the rows of the pool divided by the banks).
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
    rotary_dim: Extent | None = None
    tiling: str = "ttnn"
    channels: Channels = "interleaved"
    shard_rows: Extent = 1

    @property
    def page_codec(self) -> Codec:
        return codec_named(self.codec)

    @property
    def page_tiling(self) -> Tiling:
        return tiling_named(self.tiling)

    @property
    def page_elements(self) -> int:
        """Elements of a page: 1024 for TTNN."""
        return self.page_tiling.page_elements(self.heads, self.block_size, self.head_dim)

    @property
    def page_bytes(self) -> int:
        """Bytes of an encoded page, without the gap that the alignment may leave after it."""
        return self.page_codec.page_bytes(self.page_elements)

    @property
    def page_pitch(self) -> int:
        """Bytes of a page in its bank: page bytes rounded up to the alignment."""
        return _derived(self).page_pitch

    @property
    def rule(self) -> ChannelRule:
        """The channel rule of every pool."""
        return _derived(self).rule

    @property
    def pages_per_block(self) -> int:
        """T: pages of one row, that is of one block, one layer, K or V, on one chip."""
        return _derived(self).pages_per_block

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

    @property
    def max_blocks(self) -> int | None:
        """Blocks that a pool can hold under its channel rule; None where the rule sets no limit."""
        if self.channels != "height_sharded":
            return None
        return self.shard_rows * self.banks * self.pages_per_block // self.pages_per_unit

    def pool_of(self, layer: int, kv: int) -> int:
        """Pool that holds ``layer``'s K (kv 0) or V (kv 1)."""
        return kv if self.kind == "cross_layer" else 2 * layer + kv

    def first_page_of(self, layer: int) -> int:
        """Page of a unit at which ``layer`` starts."""
        return layer * self.pages_per_block if self.kind == "cross_layer" else 0

    def tensor_layout(self, kv: int, heads: int | None = None) -> TensorLayout:
        """Layout of one row on one chip: K (kv 0) or V (kv 1); of ``heads`` of its heads where given."""
        return _tensor_layout(self, kv, self.heads if heads is None else heads)

    def pool_tensor(
        self, kv: int, num_blocks: int, bases: BaseTable | None = None, buffer_address: int = 0
    ) -> TensorLayout:
        """Layout of a whole pool of K (kv 0) or V (kv 1): axes block, layer (cross_layer alone), head, token, dim.

        ``bases``: base address of each bank, zeros where None.  ``buffer_address``: address of the pool.
        """
        row = self.tensor_layout(kv)
        digits = [("block", num_blocks), *([("layer", self.layers)] if self.kind == "cross_layer" else [])]
        digits += self.page_tiling.extents(self.heads, self.block_size, self.head_dim)
        return TensorLayout(
            AxisOrder.packed(digits),
            row.page_elements,
            row.codec,
            row.dim_order,
            row.shape,
            self.rule,
            bases or BaseTable((0,) * self.rule.banks),
            buffer_address,
        )

    def pool_pages(self, num_blocks: int) -> int:
        """Pages of one pool that holds ``num_blocks`` blocks."""
        return num_blocks * self.pages_per_unit


class _Derived(msgspec.Struct, frozen=True):
    """Numbers that follow from a layout, computed once."""

    page_pitch: int
    pages_per_block: int
    rule: ChannelRule


@lru_cache(maxsize=256)
def _derived(layout: KVPoolLayout) -> _Derived:
    pitch = -(-layout.page_bytes // layout.alignment) * layout.alignment
    pages = layout.heads * layout.page_tiling.pages_per_head(layout.block_size, layout.head_dim)
    shard = layout.shard_rows * pages
    rule: ChannelRule
    if layout.channels == "interleaved":
        rule = InterleavedRule(layout.banks, pitch)
    elif layout.channels == "nd_sharded":
        rule = RoundRobinShardsRule(layout.banks, pitch, shard)
    elif layout.channels == "height_sharded":
        rule = HeightShardedRule(layout.banks, pitch, shard * layout.banks)
    elif layout.banks != 1:
        raise ValueError(f"a linear pool has one bank; got {layout.banks}")
    else:
        rule = LinearRule(pitch)
    return _Derived(pitch, pages, rule)


@lru_cache(maxsize=256)
def _tensor_layout(layout: KVPoolLayout, kv: int, heads: int) -> TensorLayout:
    rotary = layout.rotary_dim if layout.rope_interleaved and kv == 0 else 0
    return tiled(layout.page_tiling, heads, layout.block_size, layout.head_dim, layout.page_codec, rotary)
