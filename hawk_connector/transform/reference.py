"""Packing with torch: correct on every device that torch has, vectorised, one layer at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..layout.codec import Codec
from ..layout.tensor_layout import TILE
from ..plan.parcel import ChipShare, ParcelPlan
from .program import Program, compile_program

__all__ = ["LayerSource", "encode_pages", "gather_blocks", "pack_parcel", "to_pages"]


@dataclass(frozen=True)
class LayerSource:
    """One layer's cache as two strided views ``[blocks, heads, block_size, head_dim]``: K in HF order, and V."""

    k: torch.Tensor
    v: torch.Tensor

    def kind(self, kv: int) -> torch.Tensor:
        return self.k if kv == 0 else self.v


def pack_parcel(
    layers: Sequence[LayerSource],
    block_table: torch.Tensor,
    plan: ParcelPlan,
    first_block: int,
    tokens: int,
    out: torch.Tensor,
) -> None:
    """Writes a parcel's streams into ``out``, a uint8 ``[plan.nbytes]`` region.

    ``block_table``: int64 ids of the request's source blocks.  ``tokens``: tokens of the request; later rows are
    written as zeros whatever the cache holds.
    """
    pitch = plan.layout.page_pitch
    rows = out.view(plan.rows, pitch).view(torch.int64)
    page_bytes = plan.layout.page_codec.page_bytes(TILE * TILE)
    if page_bytes < pitch:
        rows[:, page_bytes // 8 :] = 0  # whole rows are read, and the region may hold another request's bytes
    for share in plan.shares:
        for layer, source in enumerate(layers):
            for kv in (0, 1):
                pages = _share_pages(source.kind(kv), block_table, plan, share, first_block, tokens, kv)
                where = torch.from_numpy(plan.page_rows(share, layer, kv).reshape(-1)).to(out.device)
                words = pages.reshape(len(where), -1).view(torch.int64)
                rows[:, : words.shape[1]].index_copy_(0, where, words)


def _share_pages(
    cache: torch.Tensor,
    block_table: torch.Tensor,
    plan: ParcelPlan,
    share: ChipShare,
    first_block: int,
    tokens: int,
    kv: int,
) -> torch.Tensor:
    """Encoded pages of one layer's K or V: uint8 ``[blocks, heads * tiles, page bytes]``."""
    block_size = plan.layout.block_size
    own = [rank_head for rank_head, _ in share.heads]
    if own != list(range(cache.shape[1])):
        # A run of heads is a view; any other choice costs a copy.
        cache = cache[:, own[0] : own[-1] + 1] if own == list(range(own[0], own[-1] + 1)) else cache[:, own]
    values = gather_blocks(cache, block_table, first_block * block_size, plan.blocks, block_size, tokens)
    program = compile_program(plan.layout, kv, len(own))
    return encode_pages(to_pages(values, program), program.codec)


def gather_blocks(
    cache: torch.Tensor,
    block_table: torch.Tensor,
    first_token: int,
    blocks: int,
    block_size: int,
    tokens: int,
) -> torch.Tensor:
    """A request's tokens as dense decode blocks: ``[blocks, heads, block_size, head_dim]``, zero past ``tokens``.

    The source's block size may be any; runs of their greatest common divisor are moved at once.
    """
    source_size = cache.shape[2]
    run = math.gcd(source_size, block_size)
    runs = blocks * block_size // run
    start = first_token + torch.arange(runs, device=block_table.device) * run
    # Runs that start past the request's last block are zeroed below; any block will do for them.
    index = (start // source_size).clamp_(max=len(block_table) - 1)
    picked = cache.unflatten(2, (source_size // run, run))[block_table[index], :, start % source_size // run]
    heads, head_dim = cache.shape[1], cache.shape[3]
    values = picked.view(blocks, block_size // run, heads, run, head_dim).transpose(1, 2)
    values = values.reshape(blocks, heads, block_size, head_dim)
    past = tokens - first_token
    if past < blocks * block_size:
        last, row = divmod(max(past, 0), block_size)
        values[last, :, row:] = 0
        values[last + 1 :] = 0
    return values


def to_pages(values: torch.Tensor, program: Program) -> torch.Tensor:
    """Elements in page order: ``[blocks, pages, page_elements]`` of the values' dtype."""
    if program.dim_order is not None:
        values = values[..., torch.tensor(program.dim_order, device=values.device)]
    blocks, _, tokens, _ = values.shape
    if tokens < program.rows:
        values = torch.nn.functional.pad(values, (0, 0, 0, program.rows - tokens))
    split = values.reshape(blocks, *program.digits)
    moved = split.permute(0, *(1 + i for i in program.order))
    return moved.reshape(blocks, program.pages, program.page_elements)


def encode_pages(pages: torch.Tensor, codec: Codec) -> torch.Tensor:
    """Pages as bytes: uint8 ``[blocks, pages, codec.page_bytes(page_elements)]``."""
    if codec.name == "float32":
        return pages.to(torch.float32).contiguous().view(torch.uint8)
    if codec.name == "bfloat16":
        if pages.dtype == torch.bfloat16:
            return pages.contiguous().view(torch.uint8)
        wide = pages.to(torch.float32)
        narrow = wide.to(torch.bfloat16).contiguous().view(torch.int16)
        # TTNN's host packer keeps one NaN only; which ones torch makes depends on the processor.
        return narrow.masked_fill(wide.isnan(), 0x7FC0).view(torch.uint8)
    return _encode_block_float(pages.to(torch.float32), codec)


def _encode_block_float(pages: torch.Tensor, codec: Codec) -> torch.Tensor:
    """TTNN's host packer: shared exponent, truncating alignment, round to nearest even, saturation."""
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
        shifts = torch.arange(per_byte, dtype=torch.int32, device=codes.device) * codec.bits
        codes = (codes.view(*codes.shape[:-1], -1, per_byte) << shifts).sum(dim=-1, dtype=torch.int32)
    return torch.cat([shared.squeeze(-1).to(torch.uint8), codes.to(torch.uint8)], dim=-1)
