"""A layout compiled to what a kernel does: which digits to split the axes into, in which order to write them.

A program moves the ``[head, token, dim]`` tensor of one block and layer into pages, or back.  It knows nothing of any
array library; ``reference`` runs it with torch, other backends may compile it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from ..layout.codec import Codec
from ..layout.kv_pool import KVPoolLayout

__all__ = ["Program", "compile_program"]


@dataclass(frozen=True, slots=True)
class Program:
    """Split ``[heads, rows, dims]`` into ``digits``, move them by ``order``, cut into pages, encode.

    ``tokens``, ``head_dim``: logical extents.  ``rows``, ``dims``: the extents that the layout pads these to, with
    zeros.  ``order``: which digit stands at each place of the result; those of the head come first, whatever the
    layout, since a page holds one head and its place in the parcel is the plan's affair.
    ``dim_order``: logical dim stored at each place, or None.  ``pages``: of all heads, head by head.
    """

    heads: int
    tokens: int
    head_dim: int
    rows: int
    dims: int
    digits: tuple[int, ...]
    order: tuple[int, ...]
    dim_order: tuple[int, ...] | None
    pages: int
    page_elements: int
    codec: Codec

    @property
    def inverse_order(self) -> tuple[int, ...]:
        """Which place of the moved digits each digit of the logical tensor stands at."""
        return tuple(self.order.index(i) for i in range(len(self.order)))

    @property
    def inverse_dims(self) -> tuple[int, ...] | None:
        """Place at which each logical dim is stored, or None."""
        return None if self.dim_order is None else tuple(self.dim_order.index(d) for d in range(len(self.dim_order)))


@lru_cache(maxsize=256)
def compile_program(layout: KVPoolLayout, kv: int, heads: int) -> Program:
    """The program for ``heads`` heads of K (kv 0) or V (kv 1) of one block and layer of ``layout``."""
    tensor = layout.tensor_layout(kv, heads)
    factors = tensor.order.factors
    # An axis' digits stand next to each other in the logical tensor, most significant first.
    logical = [i for axis in ("head", "token", "dim") for i, f in enumerate(factors) if f.axis == axis]
    # A stable sort: the head's digits move to the front, the others keep the layout's order.
    stored = sorted(range(len(factors)), key=lambda i: factors[i].axis != "head")
    return Program(
        heads=heads,
        tokens=layout.block_size,
        head_dim=layout.head_dim,
        rows=tensor.order.extent("token"),
        dims=tensor.order.extent("dim"),
        digits=tuple(factors[i].extent for i in logical),
        order=tuple(logical.index(i) for i in stored),
        dim_order=tensor.dim_order,
        pages=tensor.pages,
        page_elements=tensor.page_elements,
        codec=tensor.codec,
    )
