"""The scalar oracle for sharded DRAM: shards dealt out to the banks one by one, as TTNN does it.

Like ``scalar`` it shares no code with the product.  Checked against TTNN (ND_SHARDED with ROUND_ROBIN_1D and
HEIGHT_SHARDED, 0.81.1): shard s lies in bank s % banks, shards of one bank one after another, pages row-major in a
shard.
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.oracle.scalar import PAGE_BYTES, Pool, Tensor, tile_position


def deal(page: int, banks: int, shard_pages: int) -> tuple[int, int]:
    """(bank, slot) of ``page`` when shards of ``shard_pages`` are dealt out like cards."""
    held = [0] * banks
    bank = 0
    first = 0
    while first + shard_pages <= page:
        held[bank] += shard_pages
        bank = bank + 1 if bank + 1 < banks else 0
        first += shard_pages
    return bank, held[bank] + page - first


@dataclass(frozen=True, slots=True)
class ShardedPool(Pool):
    """A ``Pool`` whose pages are not interleaved; ``shard_rows`` pool rows (a block of one layer) make a shard."""

    shard_rows: int = 1

    def address(
        self, tensor: Tensor, block: int, layer: int, head: int, token: int, dim: int
    ) -> tuple[int, int, int]:
        row, buffer = (
            (block, self.buffer_address[layer][tensor])
            if self.kind == "per_layer"
            else (block * self.layers + layer, self.buffer_address[tensor])
        )
        columns = self.head_dim // 32
        page = ((row * self.heads + head) * self.tile_rows() + token // 32) * columns + dim // 32
        bank, slot = deal(page, len(self.banks), self.shard_rows * self.tiles_per_block())
        pitch = PAGE_BYTES[self.codec]
        while pitch % self.alignment:
            pitch += 1
        return bank, self.banks[bank] + buffer + slot * pitch, tile_position(token % 32, dim % 32)
