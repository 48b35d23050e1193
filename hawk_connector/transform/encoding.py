"""Codecs in torch: elements of a page to bytes, and bytes to elements.

Block floats follow TTNN's host packer and unpacker (ttnn 0.81.1), bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache

import torch

from ..layout.codec import Codec

__all__ = ["decode_pages", "encode_pages"]


def encode_pages(pages: torch.Tensor, codec: Codec) -> torch.Tensor:
    """Pages as bytes: uint8 ``[..., codec.page_bytes(page_elements)]`` from numbers ``[..., page_elements]``."""
    return _CODERS[codec.name][0](pages, codec)


def decode_pages(data: torch.Tensor, codec: Codec) -> torch.Tensor:
    """Bytes as elements: ``[..., page_elements]`` from uint8 ``[..., page bytes]``.

    Plain codecs give their own dtype, with all bits kept.  Block floats give float32, bit for bit what TTNN's
    ``unpack_bfp*`` gives: a float32 is put together from the shared exponent, less the magnitude's leading zeros, and
    the bits after its leading one.  That is exact but at both ends of the range: where the exponent comes out as 0 the
    value is a denormal that lacks the leading one, where it is negative a zero without sign, and 255 (the group held
    an infinity or NaN) is an infinity or NaN.
    """
    return _CODERS[codec.name][1](data, codec)


def _encode_float32(pages: torch.Tensor, _codec: Codec) -> torch.Tensor:
    return pages.to(torch.float32).contiguous().view(torch.uint8)


def _encode_bfloat16(pages: torch.Tensor, _codec: Codec) -> torch.Tensor:
    if pages.dtype == torch.bfloat16:
        return pages.contiguous().view(torch.uint8)
    wide = pages.to(torch.float32)
    narrow = wide.to(torch.bfloat16).contiguous().view(torch.int16)
    # TTNN's host packer keeps one NaN only; which ones torch makes depends on the processor.
    return narrow.masked_fill(wide.isnan(), 0x7FC0).view(torch.uint8)


def _encode_float16(pages: torch.Tensor, _codec: Codec) -> torch.Tensor:
    return pages.to(torch.float16).contiguous().view(torch.uint8)


def _encode_block_float(pages: torch.Tensor, codec: Codec) -> torch.Tensor:
    """TTNN's host packer: shared exponent, truncating alignment, round to nearest even, saturation."""
    pages = pages.to(torch.float32)
    width = codec.magnitude_bits
    groups = pages.contiguous().view(torch.int32).view(*pages.shape[:-1], -1, codec.group)
    exponent = (groups >> 23) & 0xFF
    magnitude = torch.where(exponent == 0, 0, (groups & 0x7FFFFF) | 0x800000)
    shared = exponent.amax(dim=-1, keepdim=True)
    aligned = magnitude >> (shared - exponent).clamp_(max=31)
    drop = 24 - width
    kept = aligned >> drop
    rest = aligned & ((1 << drop) - 1)
    half = 1 << (drop - 1)
    kept += ((rest > half) | ((rest == half) & ((kept & 1) == 1))).to(torch.int32)
    kept.clamp_(max=(1 << width) - 1)
    sign = torch.where((groups < 0) & (kept > 0), 1 << width, 0)
    codes = (sign | kept).view(*pages.shape[:-1], -1)
    per_byte = 8 // codec.bits
    if per_byte > 1:
        # The first element of a byte sits in its low bits.
        codes = (codes.view(*codes.shape[:-1], -1, per_byte) << _shifts(codec, codes.device)).sum(
            dim=-1, dtype=torch.int32
        )
    return torch.cat([shared.squeeze(-1).to(torch.uint8), codes.to(torch.uint8)], dim=-1)


def _shifts(codec: Codec, device: torch.device) -> torch.Tensor:
    return torch.arange(8 // codec.bits, dtype=torch.int32, device=device) * codec.bits


def _decode_plain(dtype: torch.dtype) -> Callable[[torch.Tensor, Codec], torch.Tensor]:
    def decode(data: torch.Tensor, _codec: Codec) -> torch.Tensor:
        return data.contiguous().view(dtype)

    return decode


def _decode_block_float(data: torch.Tensor, codec: Codec) -> torch.Tensor:
    elements = codec.page_elements(data.shape[-1])
    head = codec.exponent_bytes(elements)
    shared = data[..., :head].to(torch.int32)
    body = data[..., head:].to(torch.int32)
    if codec.bits < 8:
        body = (body.unsqueeze(-1) >> _shifts(codec, data.device)) & ((1 << codec.bits) - 1)
    codes = body.reshape(*data.shape[:-1], head, codec.group).to(torch.int64)
    zeros, fraction = (table.to(data.device) for table in _magnitudes(codec))
    exponent = shared.unsqueeze(-1) - zeros[codes]
    # The sign is the top bit of int32, hence the shift of a signed -1.
    sign = (-(codes >> codec.magnitude_bits)).to(torch.int32) << 31
    nothing = codes & ((1 << codec.magnitude_bits) - 1) == 0
    bits = sign | torch.where(nothing, 0, (exponent << 23) | fraction[codes])
    return bits.masked_fill(~nothing & (exponent < 0), 0).view(torch.float32).reshape(*data.shape[:-1], elements)


@lru_cache(maxsize=8)
def _magnitudes(codec: Codec) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each code: zeros before the magnitude's leading one, and the float32 fraction of the bits after it."""
    zeros, fraction = [], []
    for code in range(1 << codec.bits):
        magnitude = code & ((1 << codec.magnitude_bits) - 1)
        before = codec.magnitude_bits - magnitude.bit_length() if magnitude else 0
        zeros.append(before)
        fraction.append((magnitude << (24 - codec.magnitude_bits + before)) & 0x7FFFFF)
    return torch.tensor(zeros, dtype=torch.int32), torch.tensor(fraction, dtype=torch.int32)


_CODERS: Mapping[
    str, tuple[Callable[[torch.Tensor, Codec], torch.Tensor], Callable[[torch.Tensor, Codec], torch.Tensor]]
] = {
    "float32": (_encode_float32, _decode_plain(torch.float32)),
    "bfloat16": (_encode_bfloat16, _decode_plain(torch.bfloat16)),
    "float16": (_encode_float16, _decode_plain(torch.float16)),
    "bfp8": (_encode_block_float, _decode_block_float),
    "bfp4": (_encode_block_float, _decode_block_float),
    "bfp2": (_encode_block_float, _decode_block_float),
}
