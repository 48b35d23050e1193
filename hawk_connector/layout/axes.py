"""Mixed-radix axis orders: how the index of an element becomes an offset.

An axis order is a list of factors, outermost first.  Several factors may belong to one axis (a tiled axis has one
factor that counts tiles and one that counts rows inside a tile); the first of them is the most significant digit of
that axis' index.  Since every factor adds ``digit * stride``, an offset is a sum of one term per axis, and each
axis' terms fit in a table.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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

    def offset(self, index: Mapping[str, int]) -> int:
        """Offset of one element, in elements; axes that ``index`` lacks are 0.

        ValueError where an index is out of its axis, or names an axis that the order does not have.
        """
        total = 0
        left = {}
        for axis, value in index.items():
            extent = self.extent(axis)
            if not any(factor.axis == axis for factor in self.factors):
                raise ValueError(f"this order has no axis {axis!r}; it has {', '.join(self.axes)}")
            if not 0 <= value < extent:
                raise ValueError(f"{axis} must lie in 0..{extent - 1}; got {value}")
            left[axis] = value
        for factor in reversed(self.factors):
            value = left.get(factor.axis, 0)
            left[factor.axis], digit = divmod(value, factor.extent)
            total += digit * factor.stride
        return total

    def index(self, offset: int) -> dict[str, int]:
        """Index of the element at ``offset``, by axis: the inverse of ``offset``.

        ValueError where no element lies there.
        """
        digits: dict[int, int] = {}
        rest = offset
        for place in sorted(range(len(self.factors)), key=lambda i: -self.factors[i].stride):
            factor = self.factors[place]
            # A factor of one value adds nothing, whatever its stride.
            digits[place] = min(rest // factor.stride, factor.extent - 1) if factor.extent > 1 else 0
            rest -= digits[place] * factor.stride
        if rest or offset < 0:
            raise ValueError(f"no element lies at offset {offset} of an order of {self.size} elements")
        index = dict.fromkeys(self.axes, 0)
        for place, factor in enumerate(self.factors):
            index[factor.axis] = index[factor.axis] * factor.extent + digits[place]
        return index

    @property
    def axes(self) -> tuple[str, ...]:
        """Axes of the order, each once, in the order of their first factors."""
        return tuple(dict.fromkeys(factor.axis for factor in self.factors))
