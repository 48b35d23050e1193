"""One process that has TTNN open on one device; runs under .venv-ttnn, not under the project's Python.

Requests and replies are JSON objects, one a line, on standard input and output; arrays are .npy files in a folder
that both processes know.  A request is ``{"do": name, ...arguments}``; the reply is ``{"ok": value}`` or
``{"error": traceback}``.  At the end of input the device is closed.  Which device it is, the environment says
(``devices.py``).
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import ttnn

DTYPES = {
    "float32": ttnn.float32,
    "bfloat16": ttnn.bfloat16,
    "bfp8": ttnn.bfloat8_b,
    "bfp4": ttnn.bfloat4_b,
}


class Worker:
    """What the tests may ask for; every public method is a request."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._device: Any = None
        self._chips: list[int] = []
        self._tensors: dict[str, Any] = {}
        self._files = 0

    # ---- host only ------------------------------------------------------------------------------------------------
    def pack(self, codec: str, values: str) -> str:
        """Packs fp32 values that are in tile order: a file of bytes."""
        packed = getattr(ttnn._ttnn.bfp_utils, f"pack_{codec}")(self._load(values).reshape(-1))
        return self._save(np.asarray(packed).view(np.uint8))

    def unpack(self, codec: str, pages: str) -> str:
        """The reverse of pack: a file of fp32 values in tile order."""
        words = np.ascontiguousarray(self._load(pages)).reshape(-1).view(np.uint32)
        return self._save(np.asarray(getattr(ttnn._ttnn.bfp_utils, f"unpack_{codec}")(words)))

    def tiles(self, values: str, dtype: str) -> str:
        """The bytes of a tiled tensor of fp32 values before it goes to a device: a file of uint8."""
        tensor = ttnn.Tensor(self._load(values), DTYPES[dtype], layout=ttnn.TILE_LAYOUT)
        shard = tensor.host_buffer().get_shard(ttnn.MeshCoordinate(0, 0))
        return self._save(np.from_dlpack(shard))

    def rounded(self, values: str, dtype: str) -> str:
        """fp32 values as a tiled tensor of another dtype holds them: packed and unpacked by TTNN, a file of fp32."""
        given = self._load(values)
        tensor = ttnn.Tensor(given, DTYPES[dtype], layout=ttnn.TILE_LAYOUT)
        return self._save(np.asarray(tensor.to_list(), dtype=np.float32).reshape(given.shape))

    def alignment(self) -> int:
        return int(ttnn._ttnn.bfp_utils.get_dram_alignment())

    # ---- device ---------------------------------------------------------------------------------------------------
    def open(self, chips: int) -> None:
        if chips == 1:
            self._device = ttnn.open_device(device_id=0)
        else:
            self._device = ttnn.open_mesh_device(ttnn.MeshShape(1, chips))
        self._chips = list(self._device.get_device_ids())

    def close(self) -> None:
        self._tensors.clear()
        if self._device is not None:
            (ttnn.close_device if len(self._chips) == 1 else ttnn.close_mesh_device)(self._device)
            self._device = None

    def bank_tables(self) -> list[list[dict[str, int]]]:
        """For each chip its banks, in order of their ids."""
        tables = [ttnn._ttnn.cluster.get_dram_bank_table(chip) for chip in self._chips]
        return [sorted(({k: int(v) for k, v in bank.items()} for bank in t), key=_bank_id) for t in tables]

    def put(
        self, name: str, values: str, dtype: str, channels: str = "interleaved", shard: list[int] | None = None
    ) -> dict[str, int]:
        """A tiled tensor in DRAM.  ``channels``: interleaved, nd_sharded or height_sharded; ``shard``: a shard's shape.

        Returns its address, pages, and bytes from one page to the next.
        """
        host = ttnn.Tensor(self._load(values), DTYPES[dtype], layout=ttnn.TILE_LAYOUT)
        tensor = host.to(self._device, self._memory(channels, shard))
        self._tensors[name] = tensor
        return {
            "address": int(tensor.buffer_address()),
            "pages": int(tensor.buffer_num_pages()),
            "page_bytes": int(tensor.buffer_page_size()),
            "page_pitch": int(tensor.buffer_aligned_page_size()),
        }

    def get(self, name: str) -> str:
        """A tensor read back by TTNN: a file of fp32 values."""
        tensor = self._tensors[name]
        values = tensor.cpu().to_list()
        return self._save(np.asarray(values, dtype=np.float32).reshape(list(tensor.shape)))

    def free(self, name: str) -> None:
        ttnn.deallocate(self._tensors.pop(name))

    def free_all(self) -> None:
        for name in list(self._tensors):
            self.free(name)

    def write_banks(self, address: int, banks: str) -> None:
        """``banks``: uint8 ``[banks, bytes]``, written raw at ``address`` of each bank."""
        for bank, data in zip(self.bank_tables()[0], self._load(banks), strict=True):
            where = bank["base_addr"] + address
            ttnn._ttnn.cluster.write_to_core(self._chips[0], bank["noc_x"], bank["noc_y"], where, data.tobytes())

    def read_banks(self, address: int, length: int) -> str:
        """``length`` raw bytes at ``address`` of each bank: a file of uint8 ``[banks, length]``."""
        rows = []
        for bank in self.bank_tables()[0]:
            where = bank["base_addr"] + address
            data = ttnn._ttnn.cluster.read_from_core(self._chips[0], bank["noc_x"], bank["noc_y"], where, length)
            rows.append(np.frombuffer(data, dtype=np.uint8))
        return self._save(np.stack(rows))

    def read_places(self, places: list[list[int]], length: int) -> str:
        """``length`` raw bytes at each (bank, absolute address): a file of uint8 ``[places, length]``."""
        banks = self.bank_tables()[0]
        rows = [
            ttnn._ttnn.cluster.read_from_core(self._chips[0], banks[b]["noc_x"], banks[b]["noc_y"], address, length)
            for b, address in places
        ]
        return self._save(np.stack([np.frombuffer(row, dtype=np.uint8) for row in rows]))

    def paged_fill_cache(self, cache: str, values: str, dtype: str, page_table: list[int]) -> None:
        """Runs TTNN's op on the device: ``values`` are fp32 ``[1, heads, tokens, head_dim]``."""
        rows = ttnn.Tensor(self._load(values), DTYPES[dtype], layout=ttnn.TILE_LAYOUT)
        rows = rows.to(self._device, ttnn.DRAM_MEMORY_CONFIG)
        table = ttnn.Tensor(np.array([page_table], dtype=np.int32), ttnn.int32)
        table = table.to(self._device, ttnn.DRAM_MEMORY_CONFIG)
        ttnn.experimental.paged_fill_cache(self._tensors[cache], rows, table, batch_idx=0)
        ttnn.synchronize_device(self._device)
        ttnn.deallocate(rows)
        ttnn.deallocate(table)

    # ---- inside ---------------------------------------------------------------------------------------------------
    def _memory(self, channels: str, shard: list[int] | None) -> Any:
        if channels == "interleaved":
            return ttnn.DRAM_MEMORY_CONFIG
        last = ttnn.CoreCoord(len(self.bank_tables()[0]) - 1, 0)
        grid = ttnn.CoreRangeSet({ttnn.CoreRange(ttnn.CoreCoord(0, 0), last)})
        if channels == "nd_sharded":
            return ttnn.MemoryConfig(ttnn.BufferType.DRAM, ttnn.NdShardSpec(shard, grid))
        spec = ttnn.ShardSpec(grid, shard, ttnn.ShardOrientation.ROW_MAJOR)
        return ttnn.MemoryConfig(ttnn.TensorMemoryLayout.HEIGHT_SHARDED, ttnn.BufferType.DRAM, spec)

    def _load(self, name: str) -> Any:
        return np.load(self._folder / name)

    def _save(self, array: Any) -> str:
        self._files += 1
        name = f"reply-{self._files}.npy"
        np.save(self._folder / name, array)
        return name


def _bank_id(bank: dict[str, int]) -> int:
    return bank["bank_id"]


def serve(worker: Worker) -> None:
    """Answers requests until the end of input, then closes the device."""
    # TTNN logs to standard output; replies keep the real one.
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            method: Callable[..., Any] = getattr(worker, request.pop("do"))
            reply = {"ok": method(**request)}
        except Exception:
            reply = {"error": traceback.format_exc()}
        replies.write(json.dumps(reply) + "\n")
    worker.close()


if __name__ == "__main__":
    serve(Worker(Path(sys.argv[1])))
