"""TensorLayout: an axis order cut into pages, with a codec and an optional order of head_dim."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from .axes import AxisOrder, Factor
from .codec import Codec

__all__ = ["FACE", "TILE", "TensorLayout", "interleaved_dims", "strided", "ttnn_tiles"]

TILE = 32
FACE = 16


def interleaved_dims(head_dim: int, rotary_dim: int | None = None) -> NDArray[np.int64]:
    """Meta's (interleaved) RoPE order of K: int64 ``[head_dim]``, the half-split (HF) dim stored at each place.

    ``K_tt[2*i + k] = K_hf[k * rotary_dim/2 + i]`` for the rotary part; dims past it keep their place.
    Source: tt-metal ``models/tt_transformers/tt/load_checkpoints.py`` (``reverse_permute``).
    """
    rotary = head_dim if rotary_dim is None else rotary_dim
    if rotary % 2 or not 0 <= rotary <= head_dim:
        raise ValueError(f"rotary dim must be even and at most head_dim {head_dim}; got {rotary}")
    place = np.arange(head_dim, dtype=np.int64)
    place[:rotary] = np.arange(rotary, dtype=np.int64).reshape(2, rotary // 2).T.reshape(-1)
    return place


@dataclass(frozen=True)
class TensorLayout:
    """Where each element of a logical ``[head, token, dim]`` tensor of one block and layer lies.

    ``order``: offsets in elements; ``page_elements``: consecutive offsets that form one page.
    ``dim_order``: the logical dim stored at each place along dim, or None for the identity.
    """

    order: AxisOrder
    page_elements: int
    codec: Codec
    dim_order: tuple[int, ...] | None = None

    @property
    def pages(self) -> int:
        return self.order.size // self.page_elements

    @cached_property
    def page_of(self) -> NDArray[np.int64]:
        """Page of each element: int64 ``[head, token, dim]`` (dim as stored)."""
        return self.order.offsets("head", "token", "dim") // self.page_elements

    @cached_property
    def element_of(self) -> NDArray[np.int64]:
        """Element inside its page of each element: int64 ``[head, token, dim]`` (dim as stored)."""
        return self.order.offsets("head", "token", "dim") % self.page_elements


def ttnn_tiles(heads: int, tokens: int, head_dim: int, codec: Codec, rope_interleaved: bool) -> TensorLayout:
    """TTNN's TILE layout of one block's ``[heads, tokens, head_dim]``: 32x32 tiles of four 16x16 faces.

    ``tokens`` below 32 pads the tile row; head_dim must be a multiple of 32.
    """
    if head_dim % TILE:
        raise ValueError(f"head_dim must be a multiple of {TILE} for TTNN tiles; got {head_dim}")
    rows = -(-tokens // TILE)
    order = AxisOrder.packed(
        [
            ("head", heads),
            ("token", rows),
            ("dim", head_dim // TILE),
            ("token", TILE // FACE),
            ("dim", TILE // FACE),
            ("token", FACE),
            ("dim", FACE),
        ]
    )
    dims = tuple(int(d) for d in interleaved_dims(head_dim)) if rope_interleaved else None
    return TensorLayout(order, TILE * TILE, codec, dims)


def strided(blocks: int, heads: int, tokens: int, head_dim: int, strides: dict[str, int]) -> AxisOrder:
    """A plain strided ``[block, head, token, dim]`` order; ``strides`` in elements by axis."""
    extents = {"block": blocks, "head": heads, "token": tokens, "dim": head_dim}
    return AxisOrder(tuple(Factor(axis, extents[axis], strides[axis]) for axis in extents))
