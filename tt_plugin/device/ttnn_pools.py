"""KV pools that are TTNN tensors: ``[num_blocks, heads, block_size, head_dim]``, or ``num_blocks * layers`` rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hawk_connector.errors import ConfigError
from hawk_connector.layout.kv_pool import KVPoolLayout

from .interface import Written
from .ttnn_device import TtnnDevice

__all__ = ["TtnnPools", "codec_of", "dtype_of"]

_DTYPES = {"float32": "float32", "bfloat16": "bfloat16", "bfp8": "bfloat8_b", "bfp4": "bfloat4_b"}


def dtype_of(ttnn: Any, codec: str) -> Any:
    """TTNN's dtype that stores ``codec``.  ConfigError where it has none."""
    if codec not in _DTYPES:
        raise ConfigError("TTNN does not store this KV dtype", expected=f"one of {', '.join(_DTYPES)}", got=codec)
    return getattr(ttnn, _DTYPES[codec])


def codec_of(ttnn: Any, dtype: Any) -> str:
    """Name of the codec that TTNN's ``dtype`` is; the inverse of ``dtype_of``.  ConfigError where HAWK has none."""
    for codec, name in _DTYPES.items():
        if getattr(ttnn, name) == dtype:
            return codec
    raise ConfigError(
        "HAWK has no codec for the model's KV dtype", expected=f"one of {', '.join(_DTYPES)}", got=str(dtype)
    )


class TtnnPools:
    """Pools in tensors that TTNN allocated, as ``allocate`` does or the model's code did.

    ``tensors``: one for each pool, in KVPoolLayout's order.  ``buffer_addresses``: where HAWK aims, relative to a
    bank's base.
    """

    def __init__(self, device: TtnnDevice, layout: KVPoolLayout, tensors: Sequence[Any]) -> None:
        """ConfigError where a tensor is not what the layout says: its shape, dtype, tiling, memory, pages."""
        self.device = device
        self.layout = layout
        table = device.table
        _agree("the device", banks=(layout.banks, table.banks), alignment=(layout.alignment, table.alignment))
        _agree("the device", chips=(layout.chips, device.chips), pools=(layout.pools, len(tensors)))
        if layout.channels != "interleaved":
            raise ConfigError("TTNN's paged caches are interleaved over the banks", got=layout.channels)
        depth = layout.layers if layout.kind == "cross_layer" else 1
        rows = int(tensors[0].shape[0])
        if rows % depth:
            raise ConfigError(
                "the rows of a cross_layer pool are not whole blocks", expected=f"a multiple of {depth}", got=str(rows)
            )
        self.num_blocks = rows // depth
        for index, tensor in enumerate(tensors):
            _agree(
                f"KV pool {index}",
                shape=([rows, layout.heads, layout.block_size, layout.head_dim], [int(n) for n in tensor.shape]),
                dtype=(dtype_of(device.ttnn, layout.codec), tensor.dtype),
                layout=(device.ttnn.TILE_LAYOUT, tensor.layout),
                memory=(device.ttnn.DRAM_MEMORY_CONFIG, tensor.memory_config()),
                pages=(layout.pool_pages(self.num_blocks), int(tensor.buffer_num_pages())),
                page_pitch=(layout.page_pitch, int(tensor.buffer_aligned_page_size())),
            )
        self.tensors = tuple(tensors)
        self.buffer_addresses = tuple(int(tensor.buffer_address()) for tensor in tensors)

    @classmethod
    def allocate(cls, device: TtnnDevice, layout: KVPoolLayout, num_blocks: int) -> TtnnPools:
        """New pools of ``num_blocks`` blocks, filled with zeros.  CapacityError where they do not fit."""
        if num_blocks < 1:
            raise ValueError(f"a pool holds at least one block; got {num_blocks}")
        ttnn = device.ttnn
        depth = layout.layers if layout.kind == "cross_layer" else 1
        shape = [num_blocks * depth, layout.heads, layout.block_size, layout.head_dim]
        tensors: list[Any] = []
        try:
            for index in range(layout.pools):
                what = f"KV pool {index + 1} of {layout.pools} ({num_blocks} blocks)"
                tensors.append(device.tensor(shape, dtype_of(ttnn, layout.codec), ttnn.TILE_LAYOUT, what))
            pools = cls(device, layout, tensors)
        except Exception:
            for tensor in tensors:
                ttnn.deallocate(tensor)
            raise
        pools.zero()
        return pools

    def zero(self) -> None:
        """Writes zeros over every pool: what a kernel reads of a block that was never written must be numbers."""
        slots = self.layout.rule.slots(self.layout.pool_pages(self.num_blocks))
        zeros = np.zeros(slots * self.layout.page_pitch, dtype=np.uint8)
        for chip in range(self.layout.chips):
            for bank in range(self.layout.banks):
                for address in self.buffer_addresses:
                    self.device.write(chip, bank, address, zeros)
        self._flush(self.buffer_addresses[-1], len(zeros))

    def zero_blocks(self, block_ids: Iterable[int]) -> None:
        places = [place for block in block_ids for place in self._runs(block)]
        for bank, address, nbytes in places:
            zeros = np.zeros(nbytes, dtype=np.uint8)
            for chip in range(self.layout.chips):
                self.device.write(chip, bank, address, zeros)
        self._flush_runs(places)

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """All sources are read before any target is written."""
        if len(sources) != len(targets):
            raise ValueError(f"copies need one target for each source; got {len(sources)} and {len(targets)}")
        moved: list[tuple[int, int, int, NDArray[np.uint8]]] = []
        for source, target in zip(sources, targets, strict=True):
            for (bank, address, nbytes), (to_bank, to, _) in zip(self._runs(source), self._runs(target), strict=True):
                for chip in range(self.layout.chips):
                    moved.append((chip, to_bank, to, self.device.read(chip, bank, address, nbytes)))
        for chip, bank, address, data in moved:
            self.device.write(chip, bank, address, data)
        self._flush_runs([place for target in targets for place in self._runs(target)])

    def free(self) -> None:
        """Gives the tensors back to TTNN."""
        for tensor in self.tensors:
            self.device.ttnn.deallocate(tensor)
        self.tensors = ()
        self.buffer_addresses = ()

    def _runs(self, block: int) -> list[tuple[int, int, int]]:
        """(bank, address, bytes) of a block's runs: one for each pool and page class."""
        if not 0 <= block < self.num_blocks:
            raise ValueError(f"block ids must lie in 0..{self.num_blocks - 1}; got {block}")
        layout = self.layout
        first, unit = block * layout.pages_per_unit, layout.pages_per_unit
        found = []
        for buffer in self.buffer_addresses:
            for page in range(first, first + min(unit, layout.banks)):
                bank, offset = layout.rule.place(page)
                pages = -(-(first + unit - page) // layout.banks)
                found.append((bank, buffer + offset, pages * layout.page_pitch))
        return found

    def _flush_runs(self, runs: Iterable[tuple[int, int, int]]) -> None:
        last = {bank: (address, nbytes) for bank, address, nbytes in runs}
        self.device.flush(
            Written(chip, bank, address, nbytes)
            for bank, (address, nbytes) in last.items()
            for chip in range(self.layout.chips)
        )

    def _flush(self, address: int, nbytes: int) -> None:
        self._flush_runs((bank, address, nbytes) for bank in range(self.layout.banks))


def _agree(what: str, **pairs: tuple[Any, Any]) -> None:
    """ConfigError that names every pair whose expected and found value differ."""
    wrong = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
    if wrong:
        raise ConfigError(
            f"{what} is not what the pools' layout says",
            expected=", ".join(f"{name} {ours}" for name, (ours, _) in wrong.items()),
            got=", ".join(f"{name} {theirs}" for name, (_, theirs) in wrong.items()),
        )
