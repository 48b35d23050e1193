"""Axis orders against nested loops, and plain strides against the oracle's index formulas."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hawk_connector.layout.axes import AXES, AxisOrder, Factor
from hawk_connector.layout.tensor_layout import strided
from tests.oracle.scalar import Source

digits = st.lists(st.tuples(st.sampled_from(AXES), st.integers(1, 4)), min_size=1, max_size=6)


@given(digits)
@settings(deadline=None)
def test_packed_counts_in_the_order_of_its_digits(pairs: list[tuple[str, int]]) -> None:
    """An odometer over the digits, last one fastest, shows 0, 1, 2 ...: each axis reads its own digits from it."""
    order = AxisOrder.packed(pairs)
    terms = {axis: order.terms(axis).tolist() for axis in AXES}
    count = 0
    for offset, reading in enumerate(itertools.product(*(range(extent) for _, extent in pairs))):
        index = dict.fromkeys(AXES, 0)
        for (axis, extent), digit in zip(pairs, reading, strict=True):
            index[axis] = index[axis] * extent + digit
        assert sum(terms[axis][index[axis]] for axis in AXES) == offset
        count += 1
    assert order.size == count


@given(digits)
@settings(deadline=None)
def test_extent_is_the_product_of_an_axis_digits(pairs: list[tuple[str, int]]) -> None:
    order = AxisOrder.packed(pairs)
    for axis in AXES:
        assert order.extent(axis) == math.prod(extent for name, extent in pairs if name == axis)


def test_offsets_have_the_axes_asked_for() -> None:
    order = AxisOrder((Factor("head", 2, 100), Factor("token", 3, 7)))
    assert order.offsets("token", "head").tolist() == [[0, 100], [7, 107], [14, 114]]
    assert order.offsets("dim").tolist() == [0]  # an axis that the order does not have


@pytest.mark.parametrize("family", ["LBHNC", "LBNHC"])
@pytest.mark.parametrize("tensor", ["k", "v"])
def test_strides_of_vllms_caches(family: str, tensor: str) -> None:
    blocks, heads, tokens, dims = 3, 4, 5, 6
    source = Source(family, blocks, heads, tokens, dims)  # type: ignore[arg-type]
    row = 2 * dims
    strides = {"block": heads * tokens * row, "dim": 1}
    strides |= {"head": tokens * row, "token": row} if family == "LBHNC" else {"head": row, "token": heads * row}
    offsets = strided(blocks, heads, tokens, dims, strides).offsets("block", "head", "token", "dim")
    half = dims if tensor == "v" else 0
    for b, h, n, d in itertools.product(range(blocks), range(heads), range(tokens), range(dims)):
        assert half + offsets[b, h, n, d] == source.index(tensor, b, 0, h, n, d)  # type: ignore[arg-type]


def test_a_factor_refuses_what_it_cannot_count() -> None:
    with pytest.raises(ValueError, match=r"axis must be one of layer, block, head, token, dim; got 'row'"):
        Factor("row", 2, 1)
    with pytest.raises(ValueError, match="extent of head must be at least 1; got 0"):
        Factor("head", 0, 1)
