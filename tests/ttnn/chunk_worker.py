"""TTNN's chunk tables of pools on one device, and pools found in a model's tensors.

Runs under .venv-ttnn, without vLLM and torch.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import ttnn
from worker import Worker, serve

from hawk_connector.errors import ConfigError
from hawk_connector.layout.kv_pool import KVPoolLayout
from tt_plugin.config import SiliconConfig
from tt_plugin.device.chunk_table import ChunkConfig, read_chunk_table, write_chunk_table
from tt_plugin.device.ttnn_device import TtnnDevice
from tt_plugin.device.ttnn_pools import TtnnPools
from tt_plugin.vllm.silicon.pools import live_pools


class ChunkProcess(Worker):
    """What the tests may ask for beside ``worker.Worker``'s requests."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._opened: TtnnDevice | None = None
        self._pools: TtnnPools | None = None
        self._table: Any = None

    def open(self, chips: int) -> None:
        self._opened = TtnnDevice.open(chips)
        self._device = self._opened.mesh
        self._chips = list(self._device.get_device_ids())

    def close(self) -> None:
        self.drop()
        if self._opened is not None:
            self._opened.close()

    def drop(self) -> None:
        if self._pools is not None:
            self._pools.free()
            self._pools = None

    def export(self, layout: str, num_blocks: int, path: str) -> list[int]:
        """Allocates pools and writes their table; the pools' addresses."""
        self.drop()
        assert self._opened is not None
        self._pools = TtnnPools.allocate(self._opened, msgspec.json.decode(layout, type=KVPoolLayout), num_blocks)
        write_chunk_table(self._pools, self._folder / path)
        kinds = ttnn._ttnn.operations.experimental.disaggregation
        self._table = kinds.import_from_protobuf_file(str(self._folder / path))
        return list(self._pools.buffer_addresses)

    def read(self, layout: str, num_blocks: int, path: str) -> dict[str, Any]:
        """The addresses in a table's file, or why they are not believed."""
        assert self._opened is not None
        wanted = msgspec.json.decode(layout, type=KVPoolLayout)
        try:
            found = read_chunk_table(ttnn, self._folder / path, wanted, self._opened.table, num_blocks)
        except ConfigError as error:
            return {"error": str(error)}
        return {"addresses": list(found)}

    def live(self, layers: int, num_blocks: int, shared: bool, config: dict[str, Any]) -> dict[str, Any]:
        """Caches as tt_transformers allocates them, and what the overlay makes of them."""
        self.drop()

        def tensor() -> Any:
            return ttnn.empty(
                [num_blocks * (layers if shared else 1), 2, 64, 128],
                dtype=ttnn.bfloat8_b,
                layout=ttnn.TILE_LAYOUT,
                device=self._device,
                memory_config=ttnn.DRAM_MEMORY_CONFIG,
            )

        caches = [[tensor(), tensor()] for _ in range(1 if shared else layers)]
        caches = caches * layers if shared else caches
        chosen = SiliconConfig.parse({"tt_plugin": config})
        try:
            pools = live_pools(self._device, [caches], layers=layers, config=chosen, model=None)
        except ConfigError as error:
            return {"error": str(error)}
        self._pools = pools
        tensors = [t for pair in (caches[:1] if shared else caches) for t in pair]
        return {
            "layout": msgspec.to_builtins(pools.layout),
            "num_blocks": pools.num_blocks,
            "addresses": list(pools.buffer_addresses),
            "tensors": [int(t.buffer_address()) for t in tensors],
        }

    def places(self, kv: int, chip: int, head: int, column: int, layer: int, positions: list[int]) -> list[list[int]]:
        """TTNN's lookups: (noc address, bytes) of each position."""
        name = ChunkConfig(kv, chip, head, column).name
        found = [self._table.lookup(layer, position, 0, name) for position in positions]
        return [[int(place.noc_addr), int(place.size_bytes)] for place in found]

    def chunk(self, kv: int, head: int, column: int, layer: int, position: int) -> str:
        """The bytes that TTNN itself reads from the device by the table: a file of uint8."""
        name = ChunkConfig(kv, 0, head, column).name
        return self._save(np.frombuffer(self._table.read_device_chunk(layer, position, 0, name), dtype=np.uint8))

    def pools_write(self, bank: int, address: int, data: str) -> None:
        """Raw bytes at an address relative to the bank's base."""
        assert self._opened is not None
        self._opened.write(0, bank, address, self._load(data))


if __name__ == "__main__":
    serve(ChunkProcess(Path(sys.argv[1])))
