"""How one parcel lies in the send buffer: a row for each page, streams by chip and page class.

Page ``i`` of any unit has class ``i % banks``; all pages of a unit's class lie one after another in one bank, whatever
the unit's block id is, so a stream is made by class and packing needs no block ids of the decode side.  Streams of a
parcel lie one after another: chip, then class; inside a stream: pool, then block, then page.  That is the order in
which the bytes lie in the destination when decode's blocks are consecutive.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ..layout.kv_pool import KVPoolLayout

__all__ = ["ChipShare", "PageRun", "ParcelPlan", "Stream", "UnitPages", "unit_pages"]


@dataclass(frozen=True, slots=True)
class ChipShare:
    """The heads that one prefill rank sends to one chip: pairs (head on the rank, head on the chip)."""

    chip: int
    heads: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class PageRun:
    """Pages ``first_page, first_page + banks, ...`` of a unit: neighbours in a bank and in a stream."""

    first_page: int
    count: int


@dataclass(frozen=True, slots=True)
class UnitPages:
    """The pages of a unit that one rank sends to one chip.

    ``page``: page numbers in stream order (class, then page).  ``class_rows``: pages of each class.
    ``row``: for each page of the unit its index within its class, or -1 where the rank does not send it.
    ``runs``: for each class, the runs of neighbouring pages.
    """

    page: NDArray[np.int64]
    class_rows: tuple[int, ...]
    row: NDArray[np.int64]
    runs: tuple[tuple[PageRun, ...], ...]


@lru_cache(maxsize=256)
def unit_pages(layout: KVPoolLayout, heads: tuple[int, ...]) -> UnitPages:
    """Pages of a unit that hold the chip-local ``heads``."""
    tiles = layout.pages_per_block // layout.heads
    of_block = np.concatenate([np.arange(h * tiles, (h + 1) * tiles) for h in sorted(heads)])
    depth = layout.layers if layout.kind == "cross_layer" else 1
    pages = (np.arange(depth)[:, None] * layout.pages_per_block + of_block).reshape(-1)
    row = np.full(layout.pages_per_unit, -1, dtype=np.int64)
    ordered: list[NDArray[np.int64]] = []
    runs: list[tuple[PageRun, ...]] = []
    for cls in range(layout.banks):
        members = pages[pages % layout.banks == cls]
        row[members] = np.arange(len(members))
        ordered.append(members)
        runs.append(_runs(members, layout.banks))
    return UnitPages(np.concatenate(ordered), tuple(len(m) for m in ordered), row, tuple(runs))


def _runs(members: NDArray[np.int64], banks: int) -> tuple[PageRun, ...]:
    if not len(members):
        return ()
    starts = np.flatnonzero(np.diff(members, prepend=members[0] - 2 * banks) != banks)
    counts = np.diff(starts, append=len(members))
    return tuple(PageRun(int(members[s]), int(n)) for s, n in zip(starts, counts, strict=True))


@dataclass(frozen=True, slots=True)
class Stream:
    """One parcel's bytes for one (chip, page class): ``length`` bytes at ``offset`` in the parcel."""

    chip: int
    page_class: int
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class ParcelPlan:
    """Rows of a parcel of ``blocks`` decode blocks from one prefill rank.  A row is ``layout.page_pitch`` bytes."""

    layout: KVPoolLayout
    shares: tuple[ChipShare, ...]
    blocks: int

    def pages(self, share: ChipShare) -> UnitPages:
        return unit_pages(self.layout, tuple(chip_head for _, chip_head in share.heads))

    @property
    def rows(self) -> int:
        per_block = sum(len(self.pages(share).page) for share in self.shares) * self.layout.pools
        return per_block * self.blocks

    @property
    def nbytes(self) -> int:
        return self.rows * self.layout.page_pitch

    def first_row(self, share: ChipShare) -> int:
        """Row at which the chip's streams start."""
        row = 0
        for other in self.shares:
            if other == share:
                return row
            row += len(self.pages(other).page) * self.layout.pools * self.blocks
        raise ValueError(f"chip {share.chip} is not fed by this plan")

    def class_rows(self, share: ChipShare) -> list[int]:
        """First row of each of the chip's streams."""
        rows, row = [], self.first_row(share)
        for count in self.pages(share).class_rows:
            rows.append(row)
            row += count * self.layout.pools * self.blocks
        return rows

    def streams(self) -> tuple[Stream, ...]:
        """All streams in the order in which they lie in the send buffer."""
        pitch = self.layout.page_pitch
        found = []
        for share in self.shares:
            counts = self.pages(share).class_rows
            for cls, (row, count) in enumerate(zip(self.class_rows(share), counts, strict=True)):
                length = count * self.layout.pools * self.blocks * pitch
                if length:
                    found.append(Stream(share.chip, cls, row * pitch, length))
        return tuple(found)

    def page_rows(self, share: ChipShare, layer: int, kv: int) -> NDArray[np.int64]:
        """Where the pages of one layer's K (kv 0) or V (kv 1) go: int64 ``[blocks, heads of the share, tiles]`` rows.

        ``tiles`` counts a head's tiles of one block in page order.
        """
        layout = self.layout
        tiles = layout.pages_per_block // layout.heads
        chip_heads = np.array([chip_head for _, chip_head in share.heads], dtype=np.int64)
        page = layout.first_page_of(layer) + chip_heads[:, None] * tiles + np.arange(tiles)
        pages = self.pages(share)
        cls = page % layout.banks
        starts = np.array(self.class_rows(share), dtype=np.int64)[cls]
        per_class = np.array(pages.class_rows, dtype=np.int64)[cls]
        unit = layout.pool_of(layer, kv) * self.blocks + np.arange(self.blocks, dtype=np.int64)
        rows: NDArray[np.int64] = starts + unit[:, None, None] * per_class + pages.row[page]
        return rows
