"""The device that `hawk bench transfer` lands in, from a device package: an entry point of DEVICES.

Like the landings of ``decode.landing``, so that nothing here imports a device package.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Protocol, cast

import numpy as np
from numpy.typing import NDArray

from hawk_connector.decode.landing import Landing
from hawk_connector.errors import ConfigError
from hawk_connector.layout.kv_pool import KVPoolLayout, PoolKind
from hawk_connector.plan.facts import Mode

__all__ = ["DEVICES", "BenchDevice", "BenchPools", "PoolRequest", "bench_device"]

DEVICES = "hawk_connector.bench_devices"


@dataclass(frozen=True)
class PoolRequest:
    """Pools of ``num_blocks`` blocks for a model's KV on ``chips`` chips of a ``device`` that the catalog knows."""

    device: str
    chips: int
    kind: PoolKind
    layers: int
    kv_heads: int
    head_dim: int
    block_size: int
    codec: str
    num_blocks: int
    rope_interleaved: bool = True


class BenchPools(Protocol):
    """Pools in memory that this process can look at."""

    @property
    def layout(self) -> KVPoolLayout: ...

    @property
    def nbytes(self) -> int:
        """Bytes that the pools take on all chips."""
        ...

    def landing(self, mode: Mode) -> Landing:
        """The landing of mode "hawk" or "host"."""
        ...

    def addresses(self, chip: int, pool: int, pages: NDArray[np.int64]) -> NDArray[np.int64]:
        """Host address of each page of a pool: int64 of the shape of ``pages``."""
        ...

    def regions(self) -> Sequence[tuple[int, int]]:
        """(address, length) of the memory that the pools take."""
        ...

    def content(self, chip: int, pool: int, pages: NDArray[np.int64]) -> NDArray[np.uint8]:
        """What lies in some pages of a pool: uint8 ``[pages, page_bytes]``."""
        ...


class BenchDevice(Protocol):
    def __call__(self, request: PoolRequest) -> BenchPools:
        """New pools.  CapacityError where they do not fit the device, ConfigError for an unknown one."""
        ...


def bench_device() -> BenchDevice:
    """The installed device package's.  ConfigError where there is none."""
    for entry in entry_points(group=DEVICES):
        return cast(BenchDevice, entry.load())
    raise ConfigError(
        "no installed package offers a device to land in",
        expected=f"an entry point of the group {DEVICES}",
        got="none",
        fix="Install hawk-connector again (pip install -e . in a checkout): tt_plugin, which comes with it, has one.",
    )
