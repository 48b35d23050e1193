"""TensorLayout: where each element of a KV tensor lies, from its index to (bank, address) and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from .axes import AxisOrder, Factor
from .bases import BaseTable
from .channels import ChannelRule, LinearRule
from .codec import Codec
from .tilings import FACE, TILE, Tiling, tiling_named

__all__ = [
    "FACE",
    "TILE",
    "Found",
    "Location",
    "TensorLayout",
    "interleaved_dims",
    "strided",
    "tiled",
    "ttnn_tiles",
]


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


@dataclass(frozen=True, slots=True)
class Location:
    """Where an element lies: bit ``bit`` (0 is the lowest) of the byte at ``address`` in ``bank``.

    ``page``: page of the buffer.  ``element``: place in the page.  ``exponent_address``: byte of the exponent that
    the element shares, None for plain codecs.
    """

    bank: int
    address: int
    bit: int
    page: int
    element: int
    exponent_address: int | None


@dataclass(frozen=True, slots=True)
class Found:
    """What lies at an address: an element's byte, or an exponent, ``index`` being the first element that has it.

    ``index``: by axis, the dim as the model counts it.  ``padding``: the element is outside the logical tensor.
    """

    index: Mapping[str, int]
    part: Literal["element", "exponent"]
    padding: bool


@dataclass(frozen=True)
class TensorLayout:
    """Where each element of a logical tensor over the axes block, layer, head, token, dim lies (some may be absent).

    ``order``: offsets in elements; ``page_elements``: consecutive offsets that form one page.
    ``dim_order``: the logical dim stored at each place along dim, or None for the identity.
    ``shape``: the logical extents of padded axes; what lies past them is zeros.
    ``rule``: the channel rule of pages, one region with no gaps where None.  ``bases``: the banks' base addresses.
    ``buffer_address``: address of the buffer, relative to the base of every bank.
    """

    order: AxisOrder
    page_elements: int
    codec: Codec
    dim_order: tuple[int, ...] | None = None
    shape: Mapping[str, int] = field(default_factory=dict, hash=False)
    rule: ChannelRule | None = None
    bases: BaseTable = field(default_factory=lambda: BaseTable((0,)))
    buffer_address: int = 0

    def __post_init__(self) -> None:
        if self.rule is not None and self.bases.banks != self.rule.banks:
            raise ValueError(f"the channel rule has {self.rule.banks} banks, the base table {self.bases.banks}")

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

    @cached_property
    def head_pages(self) -> NDArray[np.int64]:
        """Pages of each head in ascending order: int64 ``[head, pages per head]``."""
        heads = self.order.extent("head")
        return np.stack([np.unique(self.page_of[head]) for head in range(heads)])

    @property
    def channel_rule(self) -> ChannelRule:
        """``rule``, or the linear one with no gaps between pages."""
        return self.rule or LinearRule(self.codec.page_bytes(self.page_elements))

    def locate(self, index: Mapping[str, int]) -> Location:
        """Where the element at ``index`` lies; axes that ``index`` lacks are 0, its dim is the model's.

        ValueError where an index is out of its axis.
        """
        stored = dict(index)
        if self.dim_order is not None and 0 <= stored.get("dim", 0) < len(self.dim_order):
            stored["dim"] = self.dim_order.index(stored.get("dim", 0))
        page, element = divmod(self.order.offset(stored), self.page_elements)
        rule, codec = self.channel_rule, self.codec
        bank = rule.bank(page)
        first = self.bases.bases[bank] + self.buffer_address + rule.offset(page)
        byte, bit = divmod(codec.element_bit(element, self.page_elements), 8)
        exponent = first + element // codec.group if codec.group else None
        return Location(bank, first + byte, bit, page, element, exponent)

    def at(self, bank: int, address: int) -> Found:
        """What lies at ``address`` in ``bank``: the inverse of ``locate``, for any byte of the tensor.

        ValueError where the byte is none of the tensor's (before it, past it, or between two pages).
        """
        rule, codec = self.channel_rule, self.codec
        if not 0 <= bank < rule.banks:
            raise ValueError(f"bank must lie in 0..{rule.banks - 1}; got {bank}")
        page, byte = rule.page_at(bank, address - self.bases.bases[bank] - self.buffer_address)
        if page >= self.pages:
            raise ValueError(f"address {address:#x} of bank {bank} lies past the tensor's {self.pages} pages")
        if byte >= codec.page_bytes(self.page_elements):
            raise ValueError(f"address {address:#x} of bank {bank} lies between two pages")
        exponents = codec.exponent_bytes(self.page_elements)
        element = byte * codec.group if byte < exponents else (byte - exponents) * 8 // codec.bits
        index = self.order.index(page * self.page_elements + element)
        padding = any(index[axis] >= extent for axis, extent in self.shape.items())
        if self.dim_order is not None and index["dim"] < len(self.dim_order):
            index["dim"] = self.dim_order[index["dim"]]
        return Found(index, "exponent" if byte < exponents else "element", padding)


def tiled(
    tiling: Tiling, heads: int, tokens: int, head_dim: int, codec: Codec, rotary_dim: int | None = 0
) -> TensorLayout:
    """One block's ``[heads, tokens, head_dim]`` in a tiling.

    ``rotary_dim``: leading dims that are stored in Meta's (interleaved) RoPE order; None for all, 0 for none.
    ValueError where an axis that the tiling does not pad has no whole tiles, or the codec is not one of its own.
    """
    if codec.name not in tiling.codecs:
        raise ValueError(f"{tiling.name} stores {', '.join(tiling.codecs)}; got {codec.name}")
    dims = None if rotary_dim == 0 else tuple(int(d) for d in interleaved_dims(head_dim, rotary_dim))
    return TensorLayout(
        tiling.order(heads, tokens, head_dim),
        tiling.page_elements(heads, tokens, head_dim),
        codec,
        dims,
        {"token": tokens, "dim": head_dim},
    )


def ttnn_tiles(heads: int, tokens: int, head_dim: int, codec: Codec, rope_interleaved: bool) -> TensorLayout:
    """TTNN's TILE layout of one block's ``[heads, tokens, head_dim]``: 32x32 tiles of four 16x16 faces.

    Both tokens and head_dim are padded to whole tiles with zeros, as TTNN pads the last two dims of a tensor.
    """
    return tiled(tiling_named("ttnn"), heads, tokens, head_dim, codec, None if rope_interleaved else 0)


def strided(blocks: int, heads: int, tokens: int, head_dim: int, strides: dict[str, int]) -> AxisOrder:
    """A plain strided ``[block, head, token, dim]`` order; ``strides`` in elements by axis."""
    extents = {"block": blocks, "head": heads, "token": tokens, "dim": head_dim}
    return AxisOrder(tuple(Factor(axis, extents[axis], strides[axis]) for axis in extents))
