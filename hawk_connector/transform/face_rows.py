"""Codelets of packing kernels: the 16 elements of a face row, from a cache's bits to a page's bytes.

TTNN's pages are rows of 16 elements, and each is encoded by itself, so these codelets and where their rows come from
and go to make up a kernel.  The bytes are those of ``encoding``, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from ..layout.codec import Codec
from ..layout.tilings import FACE
from .emitter import I8, Emitter, size_of, vector

__all__ = ["FaceRow", "encode_row", "load_row", "transposed", "zero_row"]

_WIDTH = {"float32": 32, "bfloat16": 16, "float16": 16}
"""Bits of an element of a cache, by its dtype."""


@dataclass(frozen=True)
class FaceRow:
    """Encoded: ``data`` as a vector, and the shared exponent of a block float."""

    data: Any
    exponent: Any | None

    def store(self, e: Emitter, page: Any, element: Any, codec: Codec, page_elements: int) -> None:
        """Into a page, as the elements from ``element`` on (an i64, a multiple of 16)."""
        head = codec.exponent_bytes(page_elements)
        nbytes = FACE * codec.bits // 8
        row = e.shr(element, 4)
        e.store(self.data, e.add(page, e.mul(row, nbytes), head))
        if self.exponent is not None:
            e.store(self.exponent, e.add(page, row))


def zero_row(e: Emitter, codec: Codec) -> FaceRow:
    data = e.number(0, vector(8, FACE * codec.bits // 8))
    return FaceRow(data, e.number(0, I8) if codec.is_block_float else None)


# ---- from the cache


def load_row(e: Emitter, row: Any, dims: Sequence[int], dtype: str, stride: int) -> Any:
    """16 elements of the token at address ``row``, as bit patterns: i16 or i32 lanes.

    ``dims``: which dim each is, -1 for a zero.  ``stride``: elements from dim to dim.
    """
    bits = _WIDTH[dtype]
    size = bits // 8

    def run(first: int, lanes: int) -> Any:
        return e.load("source", vector(bits, lanes), e.add(row, first * size), align=size)

    half = FACE // 2
    if stride == 1 and list(dims) == list(range(dims[0], dims[0] + FACE)):
        return run(dims[0], FACE)
    if stride == 1 and list(dims) == [first + i for i in range(half) for first in dims[:2]]:
        # RoPE's two halves, dim by dim.
        return e.interleave(run(dims[0], half), run(dims[1], half))
    found = e.number(0, vector(bits))
    for lane, dim in enumerate(dims):
        if dim >= 0:
            value = e.load("source", ir.IntType(bits), e.add(row, dim * stride * size), align=size)
            found = e.b.insert_element(found, value, e.number(lane, ir.IntType(32)))
    return found


def transposed(e: Emitter, columns: Sequence[Any]) -> list[Any]:
    """Vectors ``[lanes]``, one for each of 16 dims, to vectors ``[16]``, one for each lane."""
    lanes = columns[0].type.count
    parts = []
    for first in range(0, FACE, lanes):
        square = list(columns[first : first + lanes])
        half = lanes // 2
        # Interleaving the first half with the second, log2(lanes) times, brings each lane's elements together.
        for _ in range(lanes.bit_length() - 1):
            pairs = [(square[i], square[i + half]) for i in range(half)]
            square = []
            for one, other in pairs:
                for begin in (0, half):
                    square.append(e.shuffle(one, other, [k * lanes + begin + i for i in range(half) for k in (0, 1)]))
        parts.append(square)
    if len(parts) == 1:
        return parts[0]
    return [e.shuffle(low, high, range(2 * lanes)) for low, high in zip(*parts, strict=True)]


# ---- to bytes


def encode_row(e: Emitter, lanes: Any, dtype: str, codec: Codec) -> FaceRow:
    """``lanes``: bit patterns of a cache's ``dtype``."""
    if codec.is_block_float:
        if dtype == "bfloat16":
            return _block_float_of_16(e, lanes, codec)
        return _block_float_of_32(e, _as_float32(e, lanes, dtype), codec)
    if codec.name == dtype:
        return FaceRow(lanes, None)
    wide = _as_float32(e, lanes, dtype)
    if codec.name == "float32":
        return FaceRow(wide, None)
    if codec.name == "bfloat16":
        return FaceRow(_as_bfloat16(e, wide), None)
    raise ValueError(f"no kernel encodes {dtype} as {codec.name}")


def _as_float32(e: Emitter, lanes: Any, dtype: str) -> Any:
    """Bits of float32: i32 lanes."""
    if dtype == "float32":
        return lanes
    if dtype == "bfloat16":
        return e.shl(e.b.zext(lanes, vector(32)), 16)
    halves = e.b.bitcast(lanes, ir.VectorType(ir.HalfType(), FACE))
    return e.b.bitcast(e.b.fpext(halves, ir.VectorType(ir.FloatType(), FACE)), vector(32))


def _as_bfloat16(e: Emitter, wide: Any) -> Any:
    """Bits of bfloat16 to nearest even, i16 lanes; TTNN knows one NaN only."""
    rounded = e.shr(e.add(wide, 0x7FFF, e.land(e.shr(wide, 16), 1)), 16)
    nan = e.compare(">", e.land(wide, 0x7FFFFFFF), 0x7F800000)
    return e.b.trunc(e.where(nan, 0x7FC0, rounded), vector(16))


def _block_float_of_16(e: Emitter, lanes: Any, codec: Codec) -> FaceRow:
    """From bfloat16, in 16-bit lanes.

    A magnitude of 8 bits (its leading one included) stands in the upper bits of 15: shifted by 0 to 7 it keeps all
    its bits, so rounding sees all of them; shifted further, less than half of the last kept bit is left, which is 0.
    The shift to the right by s is a product with ``2 ** (7 - s)``: bytes have no variable shift, but a look-up.
    """
    exponent = e.b.trunc(e.land(e.shr(lanes, 7), 0xFF), vector(8))
    shared = e.largest_lane(exponent)
    shift = e.b.sub(e.splat(shared, FACE), exponent)
    power = e.b.lshr(e.number(0x80, vector(8)), e.least(shift, 7))
    none = e.b.or_(e.compare("==", exponent, 0), e.compare(">", shift, 7))
    factor = e.b.zext(e.where(none, 0, power), vector(16))
    aligned = e.b.mul(e.lor(e.land(lanes, 0x7F), 0x80), factor)
    return _rounded(e, aligned, 15, e.b.icmp_signed("<", lanes, e.number(0, lanes.type)), shared, codec)


def _block_float_of_32(e: Emitter, lanes: Any, codec: Codec) -> FaceRow:
    """From float32: bits that the alignment shifts out are gone before rounding, as in TTNN's packer."""
    exponent = e.land(e.shr(lanes, 23), 0xFF)
    magnitude = e.where(e.compare("==", exponent, 0), 0, e.lor(e.land(lanes, 0x7FFFFF), 0x800000))
    shared = e.largest_lane(exponent)
    shift = e.b.sub(e.splat(shared, FACE), exponent)
    aligned = e.b.lshr(magnitude, e.least(shift, 31))
    return _rounded(e, aligned, 24, e.b.icmp_signed("<", lanes, e.number(0, lanes.type)), shared, codec)


def _rounded(e: Emitter, aligned: Any, bits: int, negative: Any, shared: Any, codec: Codec) -> FaceRow:
    """Codes of aligned magnitudes of ``bits`` bits: to nearest even, saturating, no sign on a zero."""
    width = codec.magnitude_bits
    drop = bits - width
    even = e.land(e.shr(aligned, drop), 1)
    kept = e.least(e.shr(e.add(aligned, (1 << drop - 1) - 1, even), drop), (1 << width) - 1)
    sign = e.b.and_(negative, e.compare("!=", kept, 0))
    codes = e.lor(kept, e.where(sign, e.number(1 << width, kept.type), 0))
    return FaceRow(_codes_in_bytes(e, codes, codec), shared if shared.type == I8 else e.b.trunc(shared, I8))


def _codes_in_bytes(e: Emitter, codes: Any, codec: Codec) -> Any:
    """Codes of 8, 4 or 2 bits side by side, the first in a byte's low bits: i8 lanes."""
    per_byte = 8 // codec.bits
    if per_byte > 1:
        narrow = e.b.trunc(codes, vector(8)) if size_of(codes.type) > 2 * FACE else codes
        width = narrow.type.element.width
        groups = e.b.bitcast(narrow, vector(width * per_byte, FACE // per_byte))
        codes = groups
        for place in range(1, per_byte):
            codes = e.b.or_(codes, e.shr(groups, place * (width - codec.bits)))
    return e.b.trunc(codes, vector(8, FACE // per_byte))
