"""Tilings: how the ``[head, token, dim]`` tensor of one KV block is cut up on each kind of NPU.

A tiling is a list of digits, outermost first.  A digit with a number has that extent; a digit without one takes what
is left of its axis.  What the fixed digits of an axis multiply to is the tile along that axis, and so the pad rule:
an axis that may pad is filled up with zeros to whole tiles, another one must divide.  To add an NPU, add a tiling.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .axes import AxisOrder

__all__ = ["FACE", "TILE", "TILINGS", "Tiling", "TilingName", "tiling_named"]

TILE = 32
FACE = 16

TilingName = Literal["ttnn", "ascend-nz", "tpu-8x128", "linear-heads", "linear-tokens"]


@dataclass(frozen=True, slots=True)
class Tiling:
    """Axis factors, pad rule and page of one kind of memory.

    ``digits``: (axis, extent or None), outermost first.  ``page_digits``: how many of the last digits make a page;
    no digit of a head is among them, so a page never holds two heads.  ``padded``: axes that are zero-filled to
    whole tiles.  ``codecs``: element codecs that this memory knows.  ``source``: where the order is from.
    """

    name: TilingName
    digits: tuple[tuple[str, int | None], ...]
    page_digits: int
    padded: tuple[str, ...]
    codecs: tuple[str, ...]
    source: str

    def tile(self, axis: str) -> int:
        """Extent of a tile along ``axis``: the product of its fixed digits."""
        extent = 1
        for name, fixed in self.digits:
            if name == axis and fixed is not None:
                extent *= fixed
        return extent

    def padded_extent(self, axis: str, extent: int) -> int:
        """``extent`` filled up to whole tiles; ValueError where this memory does not pad ``axis``."""
        tile = self.tile(axis)
        if extent % tile and axis not in self.padded:
            raise ValueError(f"{axis} must be a multiple of {tile} for {self.name} tiles; got {extent}")
        return -(-extent // tile) * tile

    def order(self, heads: int, tokens: int, head_dim: int) -> AxisOrder:
        """The dense order of ``[heads, tokens, head_dim]``, padded.  ValueError where an axis does not fit."""
        return AxisOrder.packed(self.extents(heads, tokens, head_dim))

    def page_elements(self, heads: int, tokens: int, head_dim: int) -> int:
        """Elements of one page."""
        elements = 1
        for _, extent in self.extents(heads, tokens, head_dim)[len(self.digits) - self.page_digits :]:
            elements *= extent
        return elements

    def pages_per_head(self, tokens: int, head_dim: int) -> int:
        """Pages of one head of one block, one layer, K or V."""
        return self.order(1, tokens, head_dim).size // self.page_elements(1, tokens, head_dim)

    def extents(self, heads: int, tokens: int, head_dim: int) -> list[tuple[str, int]]:
        """The digits of ``[heads, tokens, head_dim]`` with all extents filled in, outermost first."""
        whole = {"head": heads, "token": tokens, "dim": head_dim}
        left = {axis: self.padded_extent(axis, extent) // self.tile(axis) for axis, extent in whole.items()}
        return [(axis, left[axis] if fixed is None else fixed) for axis, fixed in self.digits]


_PLAIN = ("float32", "bfloat16", "float16")

TILINGS: tuple[Tiling, ...] = (
    Tiling(
        "ttnn",
        digits=(
            ("head", None),
            ("token", None),
            ("dim", None),
            ("token", TILE // FACE),
            ("dim", TILE // FACE),
            ("token", FACE),
            ("dim", FACE),
        ),
        page_digits=4,
        padded=("token", "dim"),
        codecs=("float32", "bfloat16", "bfp8", "bfp4", "bfp2"),
        source="TTNN 0.81.1 TILE layout: 32x32 tiles of four 16x16 faces, a page for each tile",
    ),
    Tiling(
        "ascend-nz",
        digits=(("head", None), ("dim", None), ("token", None), ("token", 16), ("dim", 16)),
        page_digits=4,
        padded=(),
        codecs=("bfloat16", "float16"),
        source=(
            "CANN 'Data Layout Formats', FRACTAL_NZ [N1, M1, M0, N0] with M0 = 16 and N0 = 32 bytes; "
            "vllm-ascend get_kv_cache_shape for 310P: [2, blocks, heads*head_dim/16, block_size, 16]"
        ),
    ),
    Tiling(
        "tpu-8x128",
        digits=(("head", None), ("token", None), ("dim", None), ("token", 4), ("dim", 128), ("token", 2)),
        page_digits=3,
        padded=("token", "dim"),
        codecs=("bfloat16",),
        source="XLA 'Tiled layout', repeated tiling T(8,128)(2,1) of bf16: two rows to a 32-bit word",
    ),
    Tiling(
        "linear-heads",
        digits=(("head", None), ("token", None), ("dim", None)),
        page_digits=2,
        padded=(),
        codecs=_PLAIN,
        source="plain row-major [blocks, heads, block_size, head_dim]",
    ),
    Tiling(
        "linear-tokens",
        digits=(("token", None), ("head", None), ("dim", None)),
        page_digits=1,
        padded=(),
        codecs=_PLAIN,
        source="plain row-major [blocks, block_size, heads, head_dim], as vllm-ascend on 910B",
    ),
)


def tiling_named(name: str) -> Tiling:
    """The tiling called ``name``; ValueError names the known ones."""
    for tiling in TILINGS:
        if tiling.name == name:
            return tiling
    raise ValueError(f"tiling must be one of {', '.join(t.name for t in TILINGS)}; got {name!r}")
