"""KVPools: the decode side's paged KV cache in the device's banks, at TTNN's addresses."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from hawk_connector.errors import CapacityError
from hawk_connector.layout.kv_pool import KVPoolLayout
from hawk_connector.plan.segments import PoolPlacement

from .banks import BankTable
from .simulated import SimulatedDevice

__all__ = ["KVPools", "heads_of_chip", "heads_per_chip", "largest_num_blocks"]


def heads_per_chip(kv_heads: int, chips: int) -> int:
    """KV heads that each chip holds: an equal share, or one where chips outnumber heads (heads are replicated).

    ValueError where neither number divides the other.
    """
    if kv_heads % chips and chips % kv_heads:
        raise ValueError(f"{kv_heads} KV heads and {chips} chips: one must divide the other")
    return max(1, kv_heads // chips)


def heads_of_chip(chip: int, kv_heads: int, chips: int) -> range:
    """The model's KV heads that ``chip`` holds."""
    share = heads_per_chip(kv_heads, chips)
    first = chip * share if kv_heads >= chips else chip * kv_heads // chips
    return range(first, first + share)


def largest_num_blocks(table: BankTable, layout: KVPoolLayout) -> int:
    """Blocks that fit the DRAM of an empty device."""
    first = -(-table.first_address // table.alignment) * table.alignment
    slots = (table.bank_bytes - first) // layout.pools // layout.page_pitch
    return slots * layout.banks // layout.pages_per_unit


class KVPools:
    """The pools of ``layout`` on ``device``, each holding ``num_blocks`` blocks.

    ``buffer_addresses``: device address of each pool, relative to the bank's base.
    Raises CapacityError where they do not fit, ValueError where the layout is that of another device.
    """

    def __init__(self, device: SimulatedDevice, layout: KVPoolLayout, num_blocks: int) -> None:
        table = device.table
        for name, ours, theirs in (
            ("banks", layout.banks, table.banks),
            ("alignment", layout.alignment, table.alignment),
            ("chips", layout.chips, device.chips),
        ):
            if ours != theirs:
                raise ValueError(f"{name}: the layout has {ours}, the device {theirs}")
        if num_blocks < 1:
            raise ValueError(f"a pool holds at least one block; got {num_blocks}")
        self.device = device
        self.layout = layout
        self.num_blocks = num_blocks
        self._slots = layout.rule.slots(layout.pool_pages(num_blocks))
        addresses: list[int] = []
        try:
            for pool in range(layout.pools):
                what = f"KV pool {pool + 1} of {layout.pools} ({num_blocks} blocks)"
                addresses.append(device.allocator.allocate(self._slots * layout.page_pitch, what))
        except CapacityError as full:
            for address in addresses:
                device.allocator.free(address)
            most = largest_num_blocks(table, layout)
            raise CapacityError(
                full.what,
                expected=full.expected,
                got=full.got,
                fix=f"An empty {table.name} holds {most} blocks. {full.fix}",
            ) from None
        self.buffer_addresses = tuple(addresses)

    @property
    def placement(self) -> PoolPlacement:
        """Where the pools lie in this process."""
        return PoolPlacement(self.device.origins, self.buffer_addresses, self.num_blocks)

    @property
    def nbytes(self) -> int:
        """Bytes that the pools take on all chips."""
        return self.device.chips * self.layout.banks * self.layout.pools * self._slots * self.layout.page_pitch

    def regions(self) -> list[tuple[int, int]]:
        """(host address, length) of the memory that the pools take; neighbours in a bank are one region."""
        spans: list[tuple[int, int]] = []
        size = self._slots * self.layout.page_pitch
        for address in sorted(self.buffer_addresses):
            if spans and sum(spans[-1]) == address:
                spans[-1] = (spans[-1][0], spans[-1][1] + size)
            else:
                spans.append((address, size))
        return [
            (int(origin) + address, length) for origin in self.device.origins.reshape(-1) for address, length in spans
        ]

    def pages(self, chip: int, pool: int) -> NDArray[np.uint8]:
        """View of one pool on one chip: uint8 ``[banks, slots, page_pitch]`` on the bank memory."""
        layout = self.layout
        start = self.buffer_addresses[pool]
        pages: NDArray[np.uint8] = np.ndarray(
            (layout.banks, self._slots, layout.page_pitch),
            dtype=np.uint8,
            buffer=self.device.memory[chip],
            offset=start,
            strides=(self.device.bank_span, layout.page_pitch, 1),
        )
        return pages

    def page_table(self, table: NDArray[np.int32], layer: int) -> NDArray[np.int32]:
        """The page table through which a kernel sees ``layer``: ``table * layers + layer``; -1 stays -1.

        For per_layer pools it is ``table`` itself.
        """
        if self.layout.kind == "per_layer":
            return table
        return np.where(table < 0, table, table * self.layout.layers + layer).astype(np.int32)

    def zero_blocks(self, block_ids: Iterable[int]) -> None:
        """Writes zeros over blocks, in every pool and chip."""
        bank, slot = self._unit_pages(list(block_ids))
        for chip in range(self.layout.chips):
            for pool in range(self.layout.pools):
                self.pages(chip, pool)[bank, slot] = 0

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copies whole blocks inside every pool and chip; all sources are read before any target is written."""
        if len(sources) != len(targets):
            raise ValueError(f"copies need one target for each source; got {len(sources)} and {len(targets)}")
        source_bank, source_slot = self._unit_pages(sources)
        target_bank, target_slot = self._unit_pages(targets)
        for chip in range(self.layout.chips):
            for pool in range(self.layout.pools):
                pages = self.pages(chip, pool)
                pages[target_bank, target_slot] = pages[source_bank, source_slot]

    def free(self) -> None:
        """Gives the pools' addresses back to the device."""
        for address in self.buffer_addresses:
            self.device.allocator.free(address)
        self.buffer_addresses = ()

    def _unit_pages(self, block_ids: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(bank, slot) of every page of the blocks' units, in block order."""
        ids = np.asarray(block_ids, dtype=np.int64)
        if len(ids) and not 0 <= ids.min() <= ids.max() < self.num_blocks:
            raise ValueError(f"block ids must lie in 0..{self.num_blocks - 1}; got {ids.min()}..{ids.max()}")
        unit = self.layout.pages_per_unit
        page = (ids[:, None] * unit + np.arange(unit, dtype=np.int64)).reshape(-1)
        return page % self.layout.banks, page // self.layout.banks
