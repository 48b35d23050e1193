"""The simulated device as `hawk bench` uses it: pools in host memory, and the landings in them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from hawk_connector.decode.landing import Landing
from hawk_connector.layout.kv_pool import KVPoolLayout
from hawk_connector.plan.facts import Mode

from .config import LandingChoice
from .device.banks import BankTable
from .device.kv_pool import KVPools, heads_per_chip
from .device.simulated import SimulatedDevice
from .landing import make_landing

if TYPE_CHECKING:
    from hawk_connector.bench.device import PoolRequest

__all__ = ["SimulatedPools", "simulated_pools"]

_HOST_BYTES = 1 << 30


class SimulatedPools:
    """KVPools on a simulated device, as ``hawk_connector.bench.device.BenchPools`` says."""

    def __init__(self, pools: KVPools) -> None:
        self._pools = pools

    @property
    def layout(self) -> KVPoolLayout:
        return self._pools.layout

    @property
    def nbytes(self) -> int:
        return self._pools.nbytes

    def landing(self, mode: Mode) -> Landing:
        # Room for several parcels, of large models too, so that no mode waits for it.
        return make_landing(self._pools, LandingChoice(bounce_buffer_bytes=_HOST_BYTES), mode)

    def addresses(self, chip: int, pool: int, pages: NDArray[np.int64]) -> NDArray[np.int64]:
        bank, offset = self.layout.rule.place(pages)
        found: NDArray[np.int64] = self._pools.device.origins[chip][bank] + self._pools.buffer_addresses[pool] + offset
        return found

    def regions(self) -> Sequence[tuple[int, int]]:
        return self._pools.regions()

    def content(self, chip: int, pool: int, pages: NDArray[np.int64]) -> NDArray[np.uint8]:
        view = self._pools.pages(chip, pool)
        bank, offset = self.layout.rule.place(pages)
        found: NDArray[np.uint8] = view[bank, offset // self.layout.page_pitch, : self.layout.page_bytes]
        return found


def simulated_pools(request: PoolRequest) -> SimulatedPools:
    """New pools on a device of their own."""
    table = BankTable.named(request.device)
    layout = KVPoolLayout(
        kind=request.kind,
        layers=request.layers,
        chips=request.chips,
        heads=heads_per_chip(request.kv_heads, request.chips),
        block_size=request.block_size,
        head_dim=request.head_dim,
        codec=request.codec,
        banks=table.banks,
        alignment=table.alignment,
        rope_interleaved=request.rope_interleaved,
    )
    return SimulatedPools(KVPools(SimulatedDevice(request.chips, table), layout, request.num_blocks))
