"""Where pulled bytes come to rest on a Tenstorrent device: in the pools, through the banks' host addresses."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hawk_connector.decode.landing import Landing
from hawk_connector.errors import ConfigError, LocalError
from hawk_connector.layout.kv_pool import KVPoolLayout
from hawk_connector.plan.parcel import ParcelPlan
from hawk_connector.plan.segments import Segments, pool_segments

from .device.kv_pool import KVPools

__all__ = ["PoolLanding", "from_kv_caches"]


class PoolLanding:
    """Path *direct*, placement *pool*: each segment ends where the kernels read it.

    The banks of a simulated device are host memory, so nothing needs a flush.
    """

    def __init__(self, pools: KVPools) -> None:
        self._pools = pools
        self._placement = pools.placement
        origins = self._placement.origins.reshape(-1)
        self._bank_order = np.argsort(origins)
        self._origins = origins[self._bank_order]
        self._fill = np.zeros(len(origins), dtype=np.int64)
        self._lock = threading.Lock()  # parcels end on the threads that read them

    @property
    def layout(self) -> KVPoolLayout:
        return self._pools.layout

    @property
    def num_blocks(self) -> int:
        return self._pools.num_blocks

    def regions(self) -> Sequence[tuple[int, int]]:
        return self._pools.regions()

    def segments(self, plan: ParcelPlan, region: int, block_ids: Sequence[int], skip_blocks: int) -> Segments:
        if plan.layout != self.layout:
            raise LocalError("the parcel is packed for other pools", expected=repr(self.layout), got=repr(plan.layout))
        return pool_segments(plan, region, block_ids, self._placement, skip_blocks)

    def landed(self, segments: Segments) -> tuple[tuple[int, int, int], ...]:
        """Counts the bytes and returns (chip, bank, bytes) of each bank that got any.

        LocalError where a segment ends outside the banks.
        """
        if not segments.count:
            return ()
        table = self._pools.device.table
        index = np.searchsorted(self._origins, segments.local, side="right") - 1
        end = segments.local + segments.length - self._origins[index]
        if index.min() < 0 or end.max() > table.bank_bytes:
            raise LocalError(
                "segments ended outside the device's banks",
                expected=f"addresses inside {len(self._origins)} banks of {table.bank_bytes} bytes",
                got=f"{int(segments.local.min()):#x}..{int((segments.local + segments.length).max()):#x}",
            )
        landed = np.zeros_like(self._fill)
        np.add.at(landed, self._bank_order[index], segments.length)
        with self._lock:
            self._fill += landed
        return tuple(
            (int(bank) // table.banks, int(bank) % table.banks, int(landed[bank])) for bank in np.flatnonzero(landed)
        )

    def fill(self) -> tuple[int, ...]:
        with self._lock:
            return tuple(int(count) for count in self._fill)


def from_kv_caches(kv_caches: Mapping[str, Any]) -> Landing:
    """The landing for the KV caches that vLLM registered: layer name -> a handle that names its pools.

    ConfigError where they are not this platform's handles.
    """
    pools = {id(found): found for cache in kv_caches.values() if (found := getattr(cache, "pools", None)) is not None}
    if len(pools) != 1 or any(getattr(cache, "pools", None) is None for cache in kv_caches.values()):
        kinds = ", ".join(sorted({type(cache).__name__ for cache in kv_caches.values()})) or "nothing"
        raise ConfigError(
            "the KV caches that vLLM registered do not lie in a Tenstorrent device",
            expected="handles of one set of pools",
            got=kinds,
            fix="Start the decode side with HAWK_NPU=simulated.",
        )
    return PoolLanding(next(iter(pools.values())))
