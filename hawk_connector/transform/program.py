"""A layout compiled to what a kernel does: which digits to split the axes into, in which order to write them.

A program moves the ``[head, token, dim]`` tensor of one block and layer into pages.  It knows nothing of any array
library; ``reference`` runs it with torch, other backends may compile it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from ..layout.codec import Codec
from ..layout.kv_pool import KVPoolLayout
from ..layout.tensor_layout import TILE, ttnn_tiles

__all__ = ["Program", "compile_program"]


@dataclass(frozen=True, slots=True)
class Program:
    """Split ``[heads, rows, head_dim]`` into ``digits``, move them by ``order``, cut into pages, encode.

    ``rows``: token rows of the layout, the block size padded to whole tiles with zeros.
    ``dim_order``: logical dim stored at each place, or None.
    """

    heads: int
    rows: int
    digits: tuple[int, ...]
    order: tuple[int, ...]
    dim_order: tuple[int, ...] | None
    pages: int
    page_elements: int
    codec: Codec


@lru_cache(maxsize=256)
def compile_program(layout: KVPoolLayout, kv: int, heads: int) -> Program:
    """The program for ``heads`` heads of K (kv 0) or V (kv 1) of one block and layer of ``layout``."""
    tensor = ttnn_tiles(
        heads,
        layout.block_size,
        layout.head_dim,
        layout.page_codec,
        rope_interleaved=layout.rope_interleaved and kv == 0,
    )
    factors = tensor.order.factors
    # An axis' digits stand next to each other in the logical tensor, most significant first.
    logical = [i for axis in ("head", "token", "dim") for i, f in enumerate(factors) if f.axis == axis]
    return Program(
        heads=heads,
        rows=-(-layout.block_size // TILE) * TILE,
        digits=tuple(factors[i].extent for i in logical),
        order=tuple(logical.index(i) for i in range(len(factors))),
        dim_order=tensor.dim_order,
        pages=tensor.pages,
        page_elements=tensor.page_elements,
        codec=tensor.codec,
    )
