"""Known devices and known KV layouts.

A *device* entry is the bank table of one chip.  A live device's own table always wins over it; these entries stand in
for a device that is not there.  A *layout* entry says how an NPU's software stores a paged KV cache; together with a
model's shape (and, where memory has banks, a device) it makes a ``KVPoolLayout``.
"""

from __future__ import annotations

from dataclasses import dataclass

from .bases import BaseTable
from .kv_pool import Channels, KVPoolLayout, PoolKind
from .tilings import TilingName

__all__ = ["DEVICES", "LAYOUTS", "DeviceEntry", "LayoutEntry", "device_named", "layout_named"]

_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class DeviceEntry:
    """Memory of one chip.

    ``bases``: base address of each bank.  ``bank_bytes``: addressable bytes of a bank.
    ``first_address``: first address that an allocator hands out, relative to the base.  ``source``: where from.
    """

    name: str
    bases: tuple[int, ...]
    bank_bytes: int
    alignment: int
    first_address: int
    source: str

    @property
    def banks(self) -> int:
        return len(self.bases)

    @property
    def base_table(self) -> BaseTable:
        return BaseTable(self.bases)


DEVICES: tuple[DeviceEntry, ...] = (
    DeviceEntry(
        "blackhole-p150",
        bases=(0,) * 8,
        bank_bytes=4 * _GIB - 16 * (1 << 20),
        alignment=64,
        first_address=0x100080,
        source="ttnn 0.81.1 bank table of a simulated p150a: 8 banks, one per GDDR channel",
    ),
    DeviceEntry(
        "blackhole-p100",
        bases=(0,) * 7,
        bank_bytes=4 * _GIB - 16 * (1 << 20),
        alignment=64,
        first_address=0x100080,
        source="ttnn 0.81.1 bank table of a mock P100: one channel harvested",
    ),
    DeviceEntry(
        "wormhole-n150",
        bases=(0, 0x40000000) * 6,
        bank_bytes=_GIB,
        alignment=32,
        first_address=0x100040,
        source="ttnn 0.81.1 bank table of an n150: 6 channels of two banks",
    ),
)


def device_named(name: str) -> DeviceEntry:
    """The catalog's entry called ``name``; ValueError names the known ones."""
    for entry in DEVICES:
        if entry.name == name:
            return entry
    raise ValueError(f"device must be one of {', '.join(d.name for d in DEVICES)}; got {name!r}")


@dataclass(frozen=True, slots=True)
class LayoutEntry:
    """How an NPU's software stores a paged KV cache.

    ``codec``: what it stores by default.  ``alignment``: bytes to which pages are aligned where memory is one region
    (``channels`` "linear"); elsewhere the device says.  ``source``: where from.
    """

    name: str
    tiling: TilingName
    channels: Channels
    codec: str
    rope_interleaved: bool
    source: str
    alignment: int = 32

    @property
    def needs_device(self) -> bool:
        """Whether memory has banks, whose number and alignment a device entry gives."""
        return self.channels != "linear"

    def pool(
        self,
        *,
        kind: PoolKind,
        layers: int,
        chips: int,
        heads: int,
        block_size: int,
        head_dim: int,
        codec: str | None = None,
        device: DeviceEntry | None = None,
        rotary_dim: int | None = None,
        shard_rows: int = 1,
    ) -> KVPoolLayout:
        """The layout of a model's pools; ``heads`` are those of one chip.  ValueError where a device is missing."""
        if self.needs_device and device is None:
            raise ValueError(f"{self.name} deals pages out to banks: name a device")
        return KVPoolLayout(
            kind,
            layers,
            chips,
            heads,
            block_size,
            head_dim,
            codec or self.codec,
            banks=device.banks if self.needs_device and device else 1,
            alignment=device.alignment if self.needs_device and device else self.alignment,
            rope_interleaved=self.rope_interleaved,
            rotary_dim=rotary_dim,
            tiling=self.tiling,
            channels=self.channels,
            shard_rows=shard_rows,
        )


LAYOUTS: tuple[LayoutEntry, ...] = (
    LayoutEntry(
        "ttnn-interleaved",
        tiling="ttnn",
        channels="interleaved",
        codec="bfp8",
        rope_interleaved=True,
        source="tt-metal tt_transformers allocate_vllm_kv_cache: TILE layout, DRAM interleaved, bfloat8_b",
    ),
    LayoutEntry(
        "ttnn-nd-sharded",
        tiling="ttnn",
        channels="nd_sharded",
        codec="bfp8",
        rope_interleaved=True,
        source="tt-metal NdShardSpec with shards [1, heads, block_size, head_dim], ROUND_ROBIN_1D",
    ),
    LayoutEntry(
        "ttnn-height-sharded",
        tiling="ttnn",
        channels="height_sharded",
        codec="bfp8",
        rope_interleaved=True,
        source="tt-metal TensorMemoryLayout HEIGHT_SHARDED in DRAM: one shard for each bank",
    ),
    LayoutEntry(
        "ascend-310p",
        tiling="ascend-nz",
        channels="linear",
        codec="float16",
        rope_interleaved=False,
        source="vllm-ascend attention_v1 get_kv_cache_shape: FRACTAL_NZ [2, blocks, heads*head_dim/16, block_size, 16]",
    ),
    LayoutEntry(
        "ascend-910b",
        tiling="linear-tokens",
        channels="linear",
        codec="bfloat16",
        rope_interleaved=False,
        source="vllm-ascend attention_v1 get_kv_cache_shape: [2, blocks, block_size, heads, head_dim]",
    ),
    LayoutEntry(
        "tpu-bf16",
        tiling="tpu-8x128",
        channels="linear",
        codec="bfloat16",
        rope_interleaved=False,
        source="XLA 'Tiled layout': bf16[blocks, heads, block_size, head_dim] with T(8,128)(2,1)",
    ),
    LayoutEntry(
        "linear",
        tiling="linear-heads",
        channels="linear",
        codec="bfloat16",
        rope_interleaved=False,
        source="plain row-major [blocks, heads, block_size, head_dim]",
    ),
)


def layout_named(name: str) -> LayoutEntry:
    """The catalog's layout called ``name``; ValueError names the known ones."""
    for entry in LAYOUTS:
        if entry.name == name:
            return entry
    raise ValueError(f"layout must be one of {', '.join(e.name for e in LAYOUTS)}; got {name!r}")
