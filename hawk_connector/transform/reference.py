"""Packing and unpacking with torch: correct on every device that torch has, vectorised, one layer at a time.

Forward, a request's tokens in a paged row cache become a parcel (``pack_parcel``); backward, a parcel that was read
out of the pools becomes tokens in a row cache again (``unpack_parcel``).  Both run the same ``Program``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..plan.parcel import ChipShare, ParcelPlan
from .encoding import decode_pages, encode_pages
from .program import Program, compile_program

__all__ = [
    "LayerSource",
    "decode_pages",
    "encode_pages",
    "from_pages",
    "gather_blocks",
    "pack_parcel",
    "scatter_blocks",
    "to_pages",
    "unpack_parcel",
]


@dataclass(frozen=True)
class LayerSource:
    """One layer's cache as two strided views ``[blocks, heads, block_size, head_dim]``: K in HF order, and V.

    The source of ``pack_parcel`` and the target of ``unpack_parcel``.
    """

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
    layout = plan.layout
    rows = out.view(plan.rows, layout.page_pitch)
    if layout.page_bytes < layout.page_pitch:
        rows[:, layout.page_bytes :] = 0  # whole rows are read, and the region may hold another request's bytes
    for share in plan.shares:
        for layer, source in enumerate(layers):
            for kv in (0, 1):
                pages = _share_pages(source.kind(kv), block_table, plan, share, first_block, tokens, kv)
                where = torch.from_numpy(plan.page_rows(share, layer, kv).reshape(-1)).to(out.device)
                pages = pages.reshape(len(where), -1)
                word = _word(rows.shape[1], pages.shape[1])
                words = pages.view(word)
                rows.view(word)[:, : words.shape[1]].index_copy_(0, where, words)


def _word(*sizes: int) -> torch.dtype:
    """The widest integer that divides all these numbers of bytes: rows move by words."""
    together = math.gcd(*sizes)
    widths = ((8, torch.int64), (4, torch.int32), (2, torch.int16))
    return next((dtype for width, dtype in widths if together % width == 0), torch.uint8)


def unpack_parcel(
    parcel: torch.Tensor,
    plan: ParcelPlan,
    layers: Sequence[LayerSource],
    block_table: torch.Tensor,
    first_block: int,
    tokens: int,
) -> None:
    """Writes a parcel's tokens into row caches: the reverse of ``pack_parcel``, with the same arguments.

    ``parcel``: uint8 ``[plan.nbytes]``, as the pools' pages were gathered by the plan's segments, reversed.
    Elements are cast to the caches' dtype; rows past ``tokens`` are left as they are.
    """
    rows = parcel.view(plan.rows, plan.layout.page_pitch)
    for share in plan.shares:
        own = [rank_head for rank_head, _ in share.heads]
        for layer, target in enumerate(layers):
            for kv in (0, 1):
                program = compile_program(plan.layout, kv, len(own))
                where = torch.from_numpy(plan.page_rows(share, layer, kv).reshape(-1)).to(parcel.device)
                data = rows[where, : plan.layout.page_bytes].view(plan.blocks, program.pages, -1)
                values = from_pages(decode_pages(data, program.codec), program)
                cache = target.kind(kv)
                first_token = first_block * plan.layout.block_size
                scatter_blocks(values, cache, own, block_table, first_token, tokens)


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


def scatter_blocks(
    values: torch.Tensor,
    cache: torch.Tensor,
    heads: Sequence[int],
    block_table: torch.Tensor,
    first_token: int,
    tokens: int,
) -> None:
    """Writes ``[blocks, heads, block_size, head_dim]`` into ``heads`` of a cache: the reverse of ``gather_blocks``.

    ``first_token``: token of the request with which ``values`` begin; rows past ``tokens`` are dropped.
    """
    blocks, count, block_size, head_dim = values.shape
    end = min(tokens, first_token + blocks * block_size)
    if end <= first_token:
        return
    source_size = cache.shape[2]
    token = torch.arange(first_token, end, device=block_table.device)
    rows = values.transpose(1, 2).reshape(blocks * block_size, count, head_dim)[: end - first_token]
    block = block_table[token // source_size][:, None]
    head = torch.tensor(heads, device=block_table.device)[None, :]
    cache[block, head, (token % source_size)[:, None]] = rows.to(cache.dtype)


def to_pages(values: torch.Tensor, program: Program) -> torch.Tensor:
    """Elements in page order, head by head: ``[blocks, pages, page_elements]`` of the values' dtype.

    ``values``: ``[blocks, heads, tokens, head_dim]``.
    """
    if program.dim_order is not None:
        values = values[..., torch.tensor(program.dim_order, device=values.device)]
    blocks, _, tokens, dims = values.shape
    if tokens < program.rows or dims < program.dims:
        values = torch.nn.functional.pad(values, (0, program.dims - dims, 0, program.rows - tokens))
    split = values.reshape(blocks, *program.digits)
    moved = split.permute(0, *(1 + i for i in program.order))
    return moved.reshape(blocks, program.pages, program.page_elements)


def from_pages(pages: torch.Tensor, program: Program) -> torch.Tensor:
    """``[blocks, heads, tokens, head_dim]`` from ``[blocks, pages, page_elements]``: the reverse of ``to_pages``."""
    blocks = len(pages)
    moved = pages.reshape(blocks, *(program.digits[i] for i in program.order))
    split = moved.permute(0, *(1 + i for i in program.inverse_order))
    values = split.reshape(blocks, program.heads, program.rows, program.dims)
    values = values[:, :, : program.tokens, : program.head_dim]
    if program.inverse_dims is not None:
        values = values[..., torch.tensor(program.inverse_dims, device=values.device)]
    return values
