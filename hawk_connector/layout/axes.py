"""Mixed-radix axis orders: how the index of an element becomes an offset.

An axis order is a list of factors, outermost first.  Several factors may belong to one axis (a tiled axis has one
factor that counts tiles and one that counts rows inside a tile); the first of them is the most significant digit of
that axis' index.  Since every factor adds ``digit * stride``, an offset is a sum of one term per axis, and each
axis' terms fit in a table.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["AXES", "AxisOrder", "Factor"]

AXES = ("layer", "block", "head", "token", "dim")


@dataclass(frozen=True, slots=True)
class Factor:
    """One digit of an axis' index: ``extent`` values, ``stride`` elements apart."""

    axis: str
    extent: int
    stride: int

    def __post_init__(self) -> None:
        if self.axis not in AXES:
            raise ValueError(f"axis must be one of {', '.join(AXES)}; got {self.axis!r}")
        if self.extent < 1:
            raise ValueError(f"extent of {self.axis} must be at least 1; got {self.extent}")


@dataclass(frozen=True, slots=True)
class AxisOrder:
    """An order of factors, outermost first."""

    factors: tuple[Factor, ...]

    @classmethod
    def packed(cls, digits: Iterable[tuple[str, int]]) -> AxisOrder:
        """The dense order of ``(axis, extent)`` digits, outermost first: the last digit has stride 1."""
        pairs = list(digits)
        factors: list[Factor] = []
        stride = 1
        for axis, extent in reversed(pairs):
            factors.append(Factor(axis, extent, stride))
            stride *= extent
        return cls(tuple(reversed(factors)))

    @property
    def size(self) -> int:
        """Number of elements that the order addresses."""
        size = 1
        for factor in self.factors:
            size *= factor.extent
        return size

    def extent(self, axis: str) -> int:
        """Number of indices along ``axis`` (1 where the order does not have it)."""
        extent = 1
        for factor in self.factors:
            if factor.axis == axis:
                extent *= factor.extent
        return extent

    def terms(self, axis: str) -> NDArray[np.int64]:
        """Offset contributed by each index along ``axis``: int64 ``[extent(axis)]``, in elements."""
        index = np.arange(self.extent(axis), dtype=np.int64)
        terms = np.zeros_like(index)
        for factor in reversed([f for f in self.factors if f.axis == axis]):
            terms += (index % factor.extent) * factor.stride
            index //= factor.extent
        return terms

    def offsets(self, *axes: str) -> NDArray[np.int64]:
        """Offsets of all elements as an array whose dimensions are ``axes``, in elements."""
        total = np.zeros((1,) * len(axes), dtype=np.int64)
        for position, axis in enumerate(axes):
            shape = [1] * len(axes)
            shape[position] = -1
            total = total + self.terms(axis).reshape(shape)
        return total
