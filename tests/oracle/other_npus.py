"""The scalar oracle for NPUs other than Tenstorrent's: plain formulas, one element at a time.

Shares no code with the product.  Every function gives the index of an element in the flat memory of a whole cache
(K and V each by themselves), counted in elements; H heads, BS tokens in a block, D dims.

* FRACTAL_NZ: CANN "Data Layout Formats": a matrix [M, N] becomes [N1, M1, M0, N0] with M0 = 16 and N0 = 16 for
  16-bit elements; vllm-ascend's cache for 310P is [2, blocks, H*D/16, BS, 16].
* TPU: XLA "Tiled layout": the element at e of an array with extents d, tiled by t, lies at
  linear_index((e div t, e mod t), (ceil(d / t), t)), and a second tiling is applied to what the first one gave.
"""

from __future__ import annotations

from collections.abc import Sequence


def row_major(index: Sequence[int], extents: Sequence[int]) -> int:
    """Linear index of an element of an array without tiling."""
    flat = 0
    for i, extent in zip(index, extents, strict=True):
        if not 0 <= i < extent:
            raise ValueError(f"index {i} is not in 0..{extent - 1}")
        flat = flat * extent + i
    return flat


def ascend_nz(block: int, head: int, token: int, dim: int, *, blocks: int, heads: int, size: int, dims: int) -> int:
    """[blocks, H*D/16, BS, 16]: the heads' dims side by side are the columns of the matrix."""
    column = head * dims + dim
    return row_major([block, column // 16, token, column % 16], [blocks, heads * dims // 16, size, 16])


def ascend_nz_by_blocks_of_16(token: int, column: int, *, tokens: int, columns: int) -> int:
    """FRACTAL_NZ of one matrix by its definition: reshape to (M1, M0, N1, N0), then order N1, M1, M0, N0."""
    return row_major(
        [column // 16, token // 16, token % 16, column % 16],
        [columns // 16, tokens // 16, 16, 16],
    )


def tiled_index(index: Sequence[int], extents: Sequence[int], tilings: Sequence[Sequence[int]]) -> int:
    """XLA's repeated tiling: every tiling splits the last dims of what the tilings before it left."""
    at, shape = list(index), list(extents)
    for tile in tilings:
        first = len(shape) - len(tile)
        outer_at, outer_shape = at[:first], shape[:first]
        inner_at, inner_shape = [], []
        for i, extent, t in zip(at[first:], shape[first:], tile, strict=True):
            outer_at.append(i // t)
            outer_shape.append((extent + t - 1) // t)
            inner_at.append(i % t)
            inner_shape.append(t)
        at, shape = outer_at + inner_at, outer_shape + inner_shape
    return row_major(at, shape)


def tpu_bf16(block: int, head: int, token: int, dim: int, *, blocks: int, heads: int, size: int, dims: int) -> int:
    """bf16[blocks, H, BS, D] with T(8,128)(2,1)."""
    return tiled_index([block, head, token, dim], [blocks, heads, size, dims], [(8, 128), (2, 1)])


def linear_heads(block: int, head: int, token: int, dim: int, *, blocks: int, heads: int, size: int, dims: int) -> int:
    """[blocks, H, BS, D]."""
    return row_major([block, head, token, dim], [blocks, heads, size, dims])


def linear_tokens(block: int, head: int, token: int, dim: int, *, blocks: int, heads: int, size: int, dims: int) -> int:
    """[blocks, BS, H, D]."""
    return row_major([block, token, head, dim], [blocks, size, heads, dims])
