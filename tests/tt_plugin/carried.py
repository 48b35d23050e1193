"""A parcel carried into a landing by hand, and the oracle's word on where each of its pages must lie."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hawk_connector.decode.landing import Landing
from hawk_connector.plan.parcel import ChipShare, ParcelPlan
from hawk_connector.plan.segments import Segments
from tests.oracle.scalar import stream_pages
from tests.tt_plugin.pools import device_bytes, oracle_pool
from tt_plugin.device.kv_pool import KVPools

__all__ = ["Parcel"]


class Parcel:
    """Random bytes as one prefill rank sends them to all chips of ``pools``, for blocks ``block_ids``."""

    def __init__(self, pools: KVPools, block_ids: Sequence[int], seed: int = 0) -> None:
        layout = pools.layout
        heads = layout.heads
        shares = (ChipShare(c, tuple((c * heads + h, h) for h in range(heads))) for c in range(layout.chips))
        self.pools = pools
        self.block_ids = list(block_ids)
        self.plan = ParcelPlan(layout, tuple(shares), len(block_ids))
        self.memory: NDArray[np.uint8] = np.random.default_rng(seed).integers(0, 256, self.plan.nbytes, dtype=np.uint8)

    def segments(self, landing: Landing, skip_blocks: int = 0) -> Segments:
        return landing.segments(self.plan, self.memory.ctypes.data, self.block_ids, skip_blocks)

    def read(self, landing: Landing, segments: Segments) -> None:
        """What the engine does: each segment from its remote to its local address, inside the registered regions."""
        regions = landing.regions()
        columns = (segments.remote.tolist(), segments.local.tolist(), segments.length.tolist())
        for remote, local, length in zip(*columns, strict=True):
            first = remote - self.memory.ctypes.data
            assert 0 <= first <= first + length <= len(self.memory)
            assert any(start <= local and local + length <= start + size for start, size in regions)
            ctypes.memmove(local, remote, length)

    def carry(self, landing: Landing, skip_blocks: int = 0) -> tuple[tuple[int, int, int], ...]:
        """All of it; what landed in each bank."""
        segments = self.segments(landing, skip_blocks)
        self.read(landing, segments)
        return landing.landed(segments)

    def places(self, skip_blocks: int = 0) -> list[tuple[int, int, int, bytes]]:
        """(chip, bank, device address, bytes) of each page by the oracle, without those of skipped blocks."""
        pitch = self.pools.layout.page_pitch
        pool = oracle_pool(self.pools)
        skipped = {place for stream in stream_pages(pool, self.block_ids[:skip_blocks]) for place in stream}
        sent = iter(self.memory.reshape(-1, pitch))
        found = []
        for chip in range(self.pools.layout.chips):
            for stream in stream_pages(pool, self.block_ids):
                for bank, address in stream:
                    page = next(sent).tobytes()
                    if (bank, address) not in skipped:
                        found.append((chip, bank, address, page))
        return found

    def is_landed(self, skip_blocks: int = 0) -> bool:
        """Whether every page lies where the oracle says."""
        pitch = self.pools.layout.page_pitch
        return all(
            device_bytes(self.pools, chip, bank, address, pitch) == page
            for chip, bank, address, page in self.places(skip_blocks)
        )

    def bank_bytes(self, skip_blocks: int = 0) -> list[tuple[int, int, int]]:
        """(chip, bank, bytes) of each bank that gets any, by the oracle."""
        counts: dict[tuple[int, int], int] = {}
        for chip, bank, _, page in self.places(skip_blocks):
            counts[chip, bank] = counts.get((chip, bank), 0) + len(page)
        return sorted((chip, bank, n) for (chip, bank), n in counts.items())
