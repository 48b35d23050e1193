"""What the two sides say of themselves when they pair."""

from __future__ import annotations

from typing import Literal

import msgspec

from ..layout.cache_layout import CacheLayout
from ..layout.kv_pool import KVPoolLayout
from ..layout.kv_shape import Extent, KVShape

__all__ = ["MAX_PARTS", "DecodeFacts", "Mode", "PrefillFacts"]

Mode = Literal["hawk", "direct", "host"]

# Prefill ranks, or chips of a decode side.
MAX_PARTS = 1024


class PrefillFacts(msgspec.Struct, frozen=True):
    """What one prefill rank says of itself.

    ``model``: fingerprint of the model.  ``ranks``/``rank``: tensor parallelism.  ``block_size``: tokens.
    ``send_buffer_bytes``: capacity for parcels.  ``rope_half_split``: K is cached in HF order.  ``cache``: how it keeps
    its KV, where that is known: modes direct and host need it.
    """

    shape: KVShape
    model: str
    ranks: Extent
    rank: int
    block_size: Extent
    send_buffer_bytes: int
    rope_half_split: bool = True
    cache: CacheLayout | None = None


class DecodeFacts(msgspec.Struct, frozen=True):
    """What a decode instance says of itself.

    ``layout``: of the device's pools, or in mode direct of vLLM's own cache.  ``mode``: how it wants its KV.
    """

    shape: KVShape
    model: str
    layout: KVPoolLayout | CacheLayout
    mode: Mode = "hawk"

    def __post_init__(self) -> None:
        if isinstance(self.layout, CacheLayout) != (self.mode == "direct"):
            raise ValueError(f"expected a layout of mode {self.mode}, got a {type(self.layout).__name__}")

    @property
    def block_size(self) -> int:
        """Tokens of the blocks that decode's vLLM hands out."""
        layout = self.layout
        return layout.block_tokens if isinstance(layout, CacheLayout) else layout.block_size

    @property
    def block_bytes(self) -> int:
        """Bytes of one such block, all layers, K and V, on all chips."""
        layout = self.layout
        return layout.bytes_per_block if isinstance(layout, CacheLayout) else layout.block_bytes * layout.chips
