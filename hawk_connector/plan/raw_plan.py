"""RawPlan: a parcel of mode *host*, the prefill side's blocks as they are, which decode's host converts.

In the send buffer a parcel is block after block, and of each block layer after layer: so the blocks that decode does
not want are at one end, and what it wants is one read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..layout.cache_layout import CacheLayout
from .parcel import ParcelPlan

__all__ = ["RawPlan"]


@dataclass(frozen=True, slots=True)
class RawPlan:
    """``packed``: the parcel as decode's device wants it.  ``source``: the prefill side's cache.

    ``tokens``: those of the request in this parcel; it holds the source blocks that have any.  The parcel begins
    where a source block does.
    """

    packed: ParcelPlan
    source: CacheLayout
    tokens: int

    @property
    def blocks(self) -> int:
        """Decode's blocks."""
        return self.packed.blocks

    @property
    def source_blocks(self) -> int:
        """Blocks that are sent: none where the rank feeds nobody."""
        return -(-self.tokens // self.source.block_size) if self.packed.shares else 0

    @property
    def pitch(self) -> int:
        """Bytes of one source block, all layers."""
        return self.source.layers * self.source.block_bytes

    @property
    def nbytes(self) -> int:
        return self.source_blocks * self.pitch

    def wanted_ranges(self, skip_blocks: int) -> Iterator[tuple[int, int]]:
        """(offset, length) in bytes of what decode's blocks ``skip_blocks`` and up need: one range, or none."""
        offset = min(skip_blocks * self.packed.layout.block_size // self.source.block_size, self.source_blocks)
        if offset < self.source_blocks:
            yield offset * self.pitch, (self.source_blocks - offset) * self.pitch

    def source_end(self, blocks: int) -> int:
        """Source blocks from the parcel's first that the first ``blocks`` of decode's blocks need."""
        return min(self.source_blocks, -(-blocks * self.packed.layout.block_size // self.source.block_size))
