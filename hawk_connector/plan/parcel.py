"""How one parcel lies in the send buffer: a row for each page, streams by chip and page class.

All pages of one class of a unit lie one after another in one bank, whatever the unit's block id is, so a stream is
made by class and packing needs no block ids of the decode side.  Page ``i`` of a unit has class ``i % banks`` where
pages are interleaved; ``i // shard pages % banks`` where a unit is several shards; and 0 where a unit lies inside one
shard or memory is one region.  Streams of a parcel lie one after another: chip, then class; inside a stream: pool,
then block, then page.  That is the order in which the bytes lie in the destination when decode's blocks are
consecutive.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ..layout.kv_pool import KVPoolLayout

__all__ = ["ChipShare", "PageRun", "ParcelPlan", "Stream", "UnitPages", "classes_fit", "unit_pages"]


@dataclass(frozen=True, slots=True)
class ChipShare:
    """The heads that one prefill rank sends to one chip: pairs (head on the rank, head on the chip)."""

    chip: int
    heads: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class PageRun:
    """``count`` pages of a unit from ``first_page`` on that are neighbours in a bank and in a stream."""

    first_page: int
    count: int


@dataclass(frozen=True, slots=True)
class UnitPages:
    """The pages of a unit that one rank sends to one chip.

    ``page``: page numbers in stream order (class, then page).  ``class_rows``: pages of each class.
    ``page_class``: class of each page of the unit.
    ``row``: for each page of the unit its index within its class, or -1 where the rank does not send it.
    ``runs``: for each class, the runs of neighbouring pages.
    """

    page: NDArray[np.int64]
    class_rows: tuple[int, ...]
    page_class: NDArray[np.int64]
    row: NDArray[np.int64]
    runs: tuple[tuple[PageRun, ...], ...]


def classes_fit(layout: KVPoolLayout) -> bool:
    """Whether a class of a unit lies in one bank whatever the block: a unit is whole shards, or a shard whole units."""
    shard, unit = layout.rule.shard_pages, layout.pages_per_unit
    return unit % shard == 0 or shard % unit == 0


@lru_cache(maxsize=256)
def unit_pages(layout: KVPoolLayout, heads: tuple[int, ...]) -> UnitPages:
    """Pages of a unit that hold the chip-local ``heads``.

    ValueError where shards cut units unevenly: then no page has a class of its own.
    """
    if not classes_fit(layout):
        raise ValueError(
            f"a moved unit of {layout.pages_per_unit} pages must be whole shards of {layout.rule.shard_pages} pages, "
            "or a shard whole units"
        )
    banks = layout.banks
    shard = min(layout.rule.shard_pages, layout.pages_per_unit)
    of_row = np.sort(layout.tensor_layout(0).head_pages[list(heads)].reshape(-1))
    depth = layout.pages_per_unit // layout.pages_per_block
    pages = (np.arange(depth)[:, None] * layout.pages_per_block + of_row).reshape(-1)
    page_class = np.arange(layout.pages_per_unit, dtype=np.int64) // shard % banks
    row = np.full(layout.pages_per_unit, -1, dtype=np.int64)
    ordered: list[NDArray[np.int64]] = []
    runs: list[tuple[PageRun, ...]] = []
    for cls in range(banks):
        members = pages[page_class[pages] == cls]
        row[members] = np.arange(len(members))
        ordered.append(members)
        runs.append(_runs(members, shard, banks))
    return UnitPages(np.concatenate(ordered), tuple(len(m) for m in ordered), page_class, row, tuple(runs))


def _runs(members: NDArray[np.int64], shard: int, banks: int) -> tuple[PageRun, ...]:
    if not len(members):
        return ()
    # Slot in the bank, counted from where the unit's first page of this class lies.
    slot = members // (shard * banks) * shard + members % shard
    starts = np.flatnonzero(np.diff(slot, prepend=slot[0] - 2) != 1)
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
        """Where the pages of one layer's K (kv 0) or V (kv 1) go: int64 ``[blocks, heads of the share, pages]`` rows.

        ``pages`` counts a head's pages of one block in page order.
        """
        layout = self.layout
        chip_heads = [chip_head for _, chip_head in share.heads]
        page = layout.first_page_of(layer) + layout.tensor_layout(kv).head_pages[chip_heads]
        pages = self.pages(share)
        cls = pages.page_class[page]
        starts = np.array(self.class_rows(share), dtype=np.int64)[cls]
        per_class = np.array(pages.class_rows, dtype=np.int64)[cls]
        unit = layout.pool_of(layer, kv) * self.blocks + np.arange(self.blocks, dtype=np.int64)
        rows: NDArray[np.int64] = starts + unit[:, None, None] * per_class + pages.row[page]
        return rows
