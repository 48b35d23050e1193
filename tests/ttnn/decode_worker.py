"""A bare decode side in TTNN's process: HAWK's decode core, its bounce path and pools that are TTNN's tensors.

Runs under .venv-ttnn, without vLLM and torch.  Requests are those of ``worker.Worker`` and those below.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import ttnn
from worker import Worker, serve

from hawk_connector.config import DecodeConfig
from hawk_connector.decode.metadata import DecodeStep, LoadRequest
from hawk_connector.decode.worker import DecodeWorker, LoadEnd
from hawk_connector.errors import CapacityError, ConfigError, HawkError
from hawk_connector.layout.kv_pool import KVPoolLayout
from hawk_connector.plan.pairing import DecodeFacts
from hawk_connector.protocol.ticket import Ticket
from hawk_connector.transport.mooncake import mooncake_factory
from hawk_connector.transport.side_channel import SideChannelClient, SideChannelServer
from tt_plugin.device.ttnn_device import TtnnDevice
from tt_plugin.device.ttnn_pools import TtnnPools
from tt_plugin.landing import BounceLanding, LandingChoice, make_landing

LOAD_WITHIN_S = 120.0


class DecodeProcess(Worker):
    """One device, and one decode side at a time in it."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._opened: TtnnDevice | None = None
        self._pools: TtnnPools | None = None
        self._landing: BounceLanding | None = None
        self._side: DecodeWorker | None = None

    def open(self, chips: int) -> None:
        self._opened = TtnnDevice.open(chips)
        self._device = self._opened.mesh
        self._chips = list(self._device.get_device_ids())

    def close(self) -> None:
        self.end()
        if self._opened is not None:
            self._opened.close()

    def describe(self) -> dict[str, Any]:
        """What the device says of itself."""
        assert self._opened is not None
        table = self._opened.table
        return {
            "bases": table.bases,
            "bank_bytes": table.bank_bytes,
            "alignment": table.alignment,
            "first_address": table.first_address,
            "tiles": self._opened.tiles,
            "chips": self._opened.chips,
            "health": list(self._opened.health()),
        }

    def begin(self, facts: str, num_blocks: int, choice: str, peer: str) -> dict[str, Any]:
        """Pools and a decode side that lands in them, paired with the prefill rank at ``peer``; the pools' addresses.

        Paired before any request, so that the rank knows of this layout beside those of earlier sides, and packs none
        ahead for a side that is gone.
        """
        self.end()
        assert self._opened is not None
        decode = msgspec.json.decode(facts, type=DecodeFacts)
        self._pools = TtnnPools.allocate(self._opened, decode.layout, num_blocks)
        landing = make_landing(self._pools, msgspec.json.decode(choice, type=LandingChoice))
        assert isinstance(landing, BounceLanding)
        self._landing = landing
        self._side = DecodeWorker(
            DecodeConfig(peers=(peer,)),
            decode,
            landing,
            SideChannelServer("127.0.0.1", 0),
            SideChannelClient(),
            mooncake_factory("127.0.0.1", protocol="tcp", timeout_s=30, max_segments_per_batch=1024),
        )
        self._side.start()
        self._await(lambda: self._link(peer) == "paired", "the pairing")
        return {"addresses": self._pools.buffer_addresses}

    def load(self, ticket: str, block_ids: list[int]) -> dict[str, Any]:
        """Loads a transfer into blocks; its end and what it took."""
        assert self._side is not None and self._landing is not None
        request = LoadRequest("load", msgspec.json.decode(ticket, type=Ticket), 0, tuple(block_ids))
        self._side.step(DecodeStep(loads=[request]))
        ended: list[LoadEnd] = []
        self._await(lambda: bool(ended.extend(self._side.take_ended()) or ended), "the load's end")
        report = self._side.log.recent()[-1]
        counts = self._landing.counts
        return {
            "ok": [end.ok for end in ended],
            "reason": report.reason,
            "wire_bytes": report.wire_bytes,
            "segments": report.segments,
            "parcels": report.parcels,
            "bank_fill": report.bank_fill,
            "held_bytes": self._landing.held_bytes,
            "counts": {name: getattr(counts, name) for name in ("parcels", "staged", "device_writes", "copies")},
        }

    def pool(self, index: int) -> str:
        """A pool as TTNN reads it back: a file of fp32."""
        assert self._pools is not None
        tensor = self._pools.tensors[index]
        return self._save(np.asarray(tensor.cpu().to_list(), dtype=np.float32).reshape(list(tensor.shape)))

    def make_pools(self, layout: str, num_blocks: int) -> dict[str, Any]:
        """Pools without a decode side."""
        self.end()
        assert self._opened is not None
        decoded = msgspec.json.decode(layout, type=KVPoolLayout)
        self._pools = TtnnPools.allocate(self._opened, decoded, num_blocks)
        return {"addresses": self._pools.buffer_addresses}

    def adopt(self, layout: str, wrong: str) -> str:
        """The error of pools over tensors that TTNN allocated for ``wrong``, taken for those of ``layout``."""
        self.end()
        assert self._opened is not None
        made = TtnnPools.allocate(self._opened, msgspec.json.decode(wrong, type=KVPoolLayout), 2)
        try:
            TtnnPools(self._opened, msgspec.json.decode(layout, type=KVPoolLayout), made.tensors)
        except ConfigError as error:
            return str(error)
        finally:
            made.free()
        return ""

    def refusals(self) -> list[str]:
        """The errors of a chip that is not there, and of bytes outside a bank."""
        assert self._opened is not None
        found = []
        for attempt in (
            lambda: TtnnDevice.open(device_id=7),
            lambda: self._opened.read(0, 0, self._opened.table.bank_bytes - 4, 8),
            lambda: self._opened.write(0, 0, self._opened.table.bank_bytes, np.zeros(1, np.uint8)),
        ):
            try:
                attempt()
            except (HawkError, ValueError) as error:
                found.append(f"{type(error).__name__}: {error}")
        return found

    def take(self, bytes_per_bank: int, what: str) -> dict[str, Any]:
        """A buffer in every bank: its address, or why there is none; and what TTNN says is left in each bank."""
        assert self._opened is not None
        try:
            return {"address": self._opened.allocate(bytes_per_bank, what), "left": self.left()}
        except CapacityError as error:
            return {"error": str(error), "left": self.left()}

    def give_back(self, address: int) -> None:
        assert self._opened is not None
        self._opened.free(address)

    def put_in_one_bank(self, name: str, nbytes: int) -> dict[str, Any]:
        """A tensor of ``nbytes`` in one piece in bank 0: one shard on a grid of one bank."""
        grid = ttnn.CoreRangeSet({ttnn.CoreRange(ttnn.CoreCoord(0, 0), ttnn.CoreCoord(0, 0))})
        shape = [nbytes // 4096, 1024]
        spec = ttnn.ShardSpec(grid, shape, ttnn.ShardOrientation.ROW_MAJOR)
        memory = ttnn.MemoryConfig(ttnn.TensorMemoryLayout.HEIGHT_SHARDED, ttnn.BufferType.DRAM, spec)
        self._tensors[name] = ttnn.empty(
            shape, dtype=ttnn.uint32, layout=ttnn.ROW_MAJOR_LAYOUT, device=self._device, memory_config=memory
        )
        return {"address": int(self._tensors[name].buffer_address()), "left": self.left()}

    def left(self) -> int:
        """Free bytes of each bank, by TTNN's allocator."""
        return int(ttnn.get_memory_view(self._device, ttnn.BufferType.DRAM).total_bytes_free_per_bank)

    def zero_blocks(self, block_ids: list[int]) -> None:
        assert self._pools is not None
        self._pools.zero_blocks(block_ids)

    def copy_blocks(self, sources: list[int], targets: list[int]) -> None:
        assert self._pools is not None
        self._pools.copy_blocks(sources, targets)

    def _link(self, peer: str) -> str:
        assert self._side is not None
        with self._side._lock:
            return self._side._protocol.links[peer].state.value

    def _await(self, happened: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + LOAD_WITHIN_S
        while not happened():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what} did not come within {LOAD_WITHIN_S:g} s")
            time.sleep(0.01)

    def end(self) -> None:
        """Ends the decode side and gives its pools back."""
        if self._side is not None:
            assert self._side.close(), "a read outlived the decode side"
        if self._landing is not None and self._landing.stages is not None:
            self._landing.stages.free()
        if self._pools is not None:
            self._pools.free()
        self._side = self._landing = self._pools = None


if __name__ == "__main__":
    serve(DecodeProcess(Path(sys.argv[1])))
