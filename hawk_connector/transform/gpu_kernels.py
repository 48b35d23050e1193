"""The Triton kernel that packs TTNN pages.  Imported only where it is launched: Triton is not installed everywhere.

One program makes ``PAGES`` neighbouring 32x32 pages of one tile row, one head, one block and one layer.  Its tensors
are ``[groups, 16]``: a group is a face row, 16 elements that lie one after another in the page (and in the source,
where dims are not re-ordered), and that share an exponent in a block float.  Everything is done on bit patterns, so
that the bytes are those of ``encoding`` whatever a processor makes of NaNs and denormals; ``_codes_of_short`` says why
it may do otherwise.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["pack_pages"]

# 1.5 * 2^23: a float32 that is added to it is rounded to a whole number, which its low bits then hold.
_MAGIC: tl.constexpr = tl.constexpr(12582912.0)
_MAGIC_BITS: tl.constexpr = tl.constexpr(0x4B400000)


# Numbers that change from parcel to parcel must not make Triton compile again.
@triton.jit(do_not_specialize=["first_token", "tokens", "head_count", "block_count"])
def pack_pages(
    layers: tl.tensor,
    blocks: tl.tensor,
    heads: tl.tensor,
    rows: tl.tensor,
    dims: tl.tensor,
    out: tl.tensor,
    first_token: tl.tensor,
    tokens: tl.tensor,
    block_stride: tl.tensor,
    head_stride: tl.tensor,
    token_stride: tl.tensor,
    dim_stride: tl.tensor,
    pitch: tl.tensor,
    head_count: tl.tensor,
    block_count: tl.tensor,
    SOURCE: tl.constexpr,
    SOURCE_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ORDER: tl.constexpr,
    ALIGNED: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PAGES: tl.constexpr,
    CODEC: tl.constexpr,
    BITS: tl.constexpr,
) -> None:
    """Packs K, or V, of all layers of a parcel.

    Grid: (blocks * heads * tile rows * ceil(tile columns / PAGES), layers).
    ``layers``: int64 address of element 0 of each layer's ``[block, head, token, dim]`` view, whose strides, in
    elements, are ``block_stride`` and so on.  ``blocks``: int32 source blocks of the request.  ``heads``: int32 head of
    the rank for each head that is sent.  ``rows``: int32 ``[layer, block, head, tile row, tile column]``, the row of
    ``pitch`` bytes at which each page lies in ``out``.  ``dims``: int32, the source's dim for each stored one.
    ``first_token``: token of the request with which the parcel begins; ``tokens``: of the request, later rows are 0.
    ``SOURCE``: "bfloat16", "float16" or "float32".  ``ORDER``: "plain" (dims stand as in the source), "halves" (Meta's
    RoPE order of all dims) or "table" (``dims`` says).  ``ALIGNED``: addresses and strides are multiples of 16 bytes.
    ``CODEC``: "float32", "bfloat16" or "block", with ``BITS`` bits of an element.
    """
    GROUPS: tl.constexpr = PAGES * 64
    PARTS: tl.constexpr = (COLUMNS + PAGES - 1) // PAGES
    number = tl.program_id(0)
    layer = tl.program_id(1)
    part = number % PARTS
    number = number // PARTS
    tile_row = number % TILE_ROWS
    number = number // TILE_ROWS
    place = number % head_count
    block = number // head_count

    # Where each group stands: in the request, and in the head's dims as they are stored.
    group = tl.arange(0, GROUPS)
    column = part * PAGES + group // 64
    face = group % 64 // 16
    row = tile_row * 32 + face // 2 * 16 + group % 16
    dim = column * 32 + face % 2 * 16
    token = first_token + block * BLOCK + row
    written = column < COLUMNS
    there = written & (row < BLOCK) & (token < tokens)

    # In 64 bits: a cache may have more than 2^31 elements, and so may the distance of two heads of it.
    source_block = tl.load(blocks + token // SOURCE_BLOCK, mask=there, other=0).to(tl.int64)
    head = tl.load(heads + place).to(tl.int64)
    at = source_block * block_stride + head * head_stride + (token % SOURCE_BLOCK).to(tl.int64) * token_stride
    address = tl.load(layers + layer)
    RAW: tl.constexpr = tl.int32 if SOURCE == "float32" else tl.int16
    base = address.to(tl.pointer_type(RAW))
    if ALIGNED:
        base = tl.multiple_of(base, 16)
    if ORDER == "halves":
        # Place 2i + k holds dim i of half k: a group is 8 neighbours of either half.
        i = dim[:, None] // 2 + tl.arange(0, 8)[None, :]
        inside = there[:, None] & (i < HEAD_DIM // 2)
        left = base + at[:, None] + i.to(tl.int64) * dim_stride
        right = base + at[:, None] + (i + HEAD_DIM // 2).to(tl.int64) * dim_stride
        raw = tl.interleave(tl.load(left, mask=inside, other=0), tl.load(right, mask=inside, other=0))
    else:
        stored = dim[:, None] + tl.arange(0, 16)[None, :]
        inside = there[:, None] & (stored < HEAD_DIM)
        if ORDER == "table":
            stored = tl.load(dims + stored, mask=inside, other=0)
        raw = tl.load(base + at[:, None] + stored.to(tl.int64) * dim_stride, mask=inside, other=0)

    page = ((layer * block_count + block) * head_count + place) * (TILE_ROWS * COLUMNS) + tile_row * COLUMNS + column
    start = out + tl.load(rows + page, mask=written, other=0).to(tl.int64) * pitch
    start = tl.multiple_of(start, 16)
    first = group % 64 * 16
    keep = written[:, None]
    element = first[:, None] + tl.arange(0, 16)[None, :]
    if CODEC == "block":
        bits = _float32_bits(raw, SOURCE)
        shared = tl.max((bits >> 23) & 0xFF, axis=1)
        if SOURCE == "float32":
            codes = _codes(bits, shared, BITS - 1)
        else:
            # Block floats of 16-bit numbers are quicker in float32 arithmetic, exact but for exponents at the ends.
            if tl.max(((shared > 252) | ((shared > 0) & (shared < 8))).to(tl.int32), axis=0) > 0:
                codes = _codes(bits, shared, BITS - 1)
            else:
                codes = _codes_of_short(bits, shared, BITS - 1)
        tl.store(start + group % 64, shared.to(tl.uint8), mask=written)
        PER_BYTE: tl.constexpr = 8 // BITS
        if PER_BYTE > 1:
            # The first element of a byte sits in its low bits.
            parts = tl.reshape(codes, (GROUPS, 16 // PER_BYTE, PER_BYTE))
            codes = tl.sum(parts << (tl.arange(0, PER_BYTE) * BITS)[None, None, :], axis=2)
        byte = (first // PER_BYTE)[:, None] + tl.arange(0, 16 // PER_BYTE)[None, :]
        tl.store(start[:, None] + 64 + byte, codes.to(tl.uint8), mask=keep)
    elif CODEC == "float32":
        words = start.to(tl.pointer_type(tl.int32))
        tl.store(words[:, None] + element, _float32_bits(raw, SOURCE), mask=keep)
    else:
        halves = start.to(tl.pointer_type(tl.int16))
        tl.store(halves[:, None] + element, _bfloat16_bits(raw, SOURCE), mask=keep)


@triton.jit
def _float32_bits(raw: tl.tensor, SOURCE: tl.constexpr) -> tl.tensor:
    """The float32 of the same value, as int32.  A float16's NaN is quietened, as processors do."""
    if SOURCE == "float32":
        return raw
    wide = raw.to(tl.int32)
    if SOURCE == "bfloat16":
        return wide << 16
    fraction = wide & 0x3FF
    exponent = (wide >> 10) & 0x1F
    # A denormal is a whole number of 2^-24; any below 2^24 is an exact float32.
    whole = fraction.to(tl.float32).to(tl.int32, bitcast=True)
    denormal = tl.where(fraction == 0, 0, whole - (24 << 23))
    special = tl.where(fraction == 0, 0x7F800000, 0x7FC00000 | (fraction << 13))
    normal = ((exponent + 112) << 23) | (fraction << 13)
    size = tl.where(exponent == 0, denormal, tl.where(exponent == 31, special, normal))
    return (wide & -0x8000) << 16 | size


@triton.jit
def _bfloat16_bits(raw: tl.tensor, SOURCE: tl.constexpr) -> tl.tensor:
    """Rounded to nearest even, as int16; TTNN's one NaN for any, but a bfloat16 keeps all its bits."""
    if SOURCE == "bfloat16":
        return raw
    bits = _float32_bits(raw, SOURCE)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, rounded).to(tl.int16)


@triton.jit
def _codes(bits: tl.tensor, shared: tl.tensor, WIDTH: tl.constexpr) -> tl.tensor:
    """Sign and magnitude of ``WIDTH`` bits, as TTNN's host packer has them, of float32 bits: int32 ``[groups, 16]``.

    Mantissas are aligned to the ``shared`` exponents by cutting, then rounded to nearest even, and saturate.
    """
    DROP: tl.constexpr = 24 - WIDTH
    exponent = (bits >> 23) & 0xFF
    mantissa = tl.where(exponent == 0, 0, (bits & 0x7FFFFF) | 0x800000)
    aligned = mantissa >> tl.minimum(shared[:, None] - exponent, 31)
    rounded = (aligned + ((1 << (DROP - 1)) - 1) + ((aligned >> DROP) & 1)) >> DROP
    kept = tl.minimum(rounded, (1 << WIDTH) - 1)
    return tl.where((bits < 0) & (kept > 0), kept | (1 << WIDTH), kept)


@triton.jit
def _codes_of_short(bits: tl.tensor, shared: tl.tensor, WIDTH: tl.constexpr) -> tl.tensor:
    """``_codes`` of float32 bits that were 16-bit numbers, in half the instructions.

    Shared exponents must be 0 or 8 to 252.  Such a number has at most 11 bits, of which alignment cuts none before all
    of them are under half a unit.  So the magnitude is the value in units, rounded to nearest even, which is what
    adding 1.5 * 2^23 leaves in the low bits.  Exponent 0 is taken as 8, of which float32's denormals are no half unit.
    """
    scale = ((253 + WIDTH - tl.maximum(shared, 8)) << 23).to(tl.float32, bitcast=True)
    value = bits.to(tl.float32, bitcast=True)
    units = value * scale[:, None] + _MAGIC
    whole = units.to(tl.int32, bitcast=True) - _MAGIC_BITS
    kept = tl.minimum(tl.abs(whole), (1 << WIDTH) - 1)
    return kept | ((whole >> 31) & (1 << WIDTH))
