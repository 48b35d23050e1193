"""Mode host: a parcel's blocks as they are, from the cache into the send buffer."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..plan.raw_plan import RawPlan

__all__ = ["copy_blocks"]


def copy_blocks(
    blocks: Sequence[torch.Tensor], block_table: torch.Tensor, plan: RawPlan, first_block: int, out: torch.Tensor
) -> None:
    """Writes the parcel into ``out``, a uint8 ``[plan.nbytes]`` region: block after block, of each all layers.

    ``blocks``: of each layer, uint8 ``[blocks, block bytes]``.  ``block_table``: int64 ids of the request's blocks in
    these.  ``first_block``: decode's block at which the parcel begins.  The table may be in host memory, and ``out`` on
    another device than the cache: then the parcel is put together there and copied.  One gather for each layer.
    """
    device = blocks[0].device
    target = out if out.device == device else torch.empty(plan.nbytes, dtype=torch.uint8, device=device)
    source = plan.source
    first = first_block * plan.packed.layout.block_size // source.block_size
    table = block_table[first : first + plan.source_blocks].to(device)
    rows = target.view(plan.source_blocks, source.layers, source.block_bytes)
    for layer, cache in enumerate(blocks):
        torch.index_select(cache, 0, table, out=rows[:, layer])
    if target is not out:
        out.copy_(target, non_blocking=True)
