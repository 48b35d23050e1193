"""A stand-in for `ttnn` in Python 3.11, where there is no wheel of it: bank tables, raw access, an allocator.

It has only what `tt_plugin.device.ttnn_device` and `ttnn_pools` call.  That they speak with the real one rightly is
tests/ttnn's business; here the overlay needs a device to aim at.
"""

from __future__ import annotations

from enum import Enum
from types import SimpleNamespace

BANKS, BANK_BYTES, FIRST, ALIGNMENT = 8, 32 << 20, 0x100080, 64
DRAM_MEMORY_CONFIG = "dram-interleaved"
TILE_LAYOUT, ROW_MAJOR_LAYOUT = "tile", "row-major"
float32, bfloat16, bfloat8_b, bfloat4_b, uint32 = "float32", "bfloat16", "bfloat8_b", "bfloat4_b", "uint32"
TILE_BYTES = {float32: 4096, bfloat16: 2048, bfloat8_b: 1088, bfloat4_b: 576}


class BufferType(Enum):
    DRAM = 0


class Tensor:
    def __init__(self, shape: list[int], dtype: str, layout: str, address: int) -> None:
        self.shape, self.dtype, self.layout, self._address = shape, dtype, layout, address

    def memory_config(self) -> str:
        return DRAM_MEMORY_CONFIG

    def buffer_address(self) -> int:
        return self._address

    def buffer_num_pages(self) -> int:
        rows = 1
        for extent in self.shape[:-1]:
            rows *= extent
        return rows * self.shape[-1] // 1024

    def buffer_aligned_page_size(self) -> int:
        return TILE_BYTES[self.dtype]


class Mesh:
    """`chips` chips whose banks are host memory."""

    def __init__(self, chips: int) -> None:
        self.chips = chips
        self.next = -(-FIRST // ALIGNMENT) * ALIGNMENT
        self.banks: dict[tuple[int, int], bytearray] = {
            (chip, bank): bytearray(BANK_BYTES) for chip in range(chips) for bank in range(BANKS)
        }
        _OPEN.append(self)

    def get_device_ids(self) -> list[int]:
        return list(range(self.chips))

    def get_num_devices(self) -> int:
        return self.chips


_OPEN: list[Mesh] = []


def empty(shape: list[int], *, dtype: str, layout: str, device: Mesh, memory_config: str) -> Tensor:
    tensor = Tensor(shape, dtype, layout, device.next)
    per_bank = -(-tensor.buffer_num_pages() // BANKS) * tensor.buffer_aligned_page_size()
    if device.next + per_bank > BANK_BYTES:
        raise RuntimeError("Out of Memory: the stand-in's banks are full")
    device.next += per_bank
    return tensor


def get_memory_view(mesh: Mesh, kind: BufferType) -> SimpleNamespace:
    return SimpleNamespace(num_banks=BANKS, total_bytes_per_bank=BANK_BYTES - FIRST)


def get_dram_bank_table(chip: int) -> list[dict[str, int]]:
    return [
        {"bank_id": bank, "noc_x": 17, "noc_y": bank, "base_addr": 0, "bank_size": BANK_BYTES} for bank in range(BANKS)
    ]


def write_to_core(chip: int, x: int, y: int, address: int, data: bytes) -> None:
    _OPEN[-1].banks[chip, y][address : address + len(data)] = data


def read_from_core(chip: int, x: int, y: int, address: int, nbytes: int) -> bytes:
    return bytes(_OPEN[-1].banks[chip, y][address : address + nbytes])


_ttnn = SimpleNamespace(
    cluster=SimpleNamespace(
        get_dram_bank_table=get_dram_bank_table, write_to_core=write_to_core, read_from_core=read_from_core
    ),
    bfp_utils=SimpleNamespace(get_dram_alignment=lambda: ALIGNMENT),
)
