"""The pools' addresses in the form that Tenstorrent's own KV migration reads and writes: ``KvChunkAddressTable``.

That table maps (config, layer, position, slot) to a place: a DRAM view, an address in it and a size, on a group of
chips.  A paged cache keeps a tile row of one head in one place only a tile at a time, so here a *chunk* is one page:
32 tokens of 32 dims of one head's K or V.  There is a config for each of those (``ChunkConfig.name``), one slot, and
positions that run through the whole pool: token ``t`` of block ``b`` is position ``b * block_size + t``.  Whoever has
a block table finds a request's pages with it.

Rows are written in the table's strided form: pages of consecutive blocks come back to a bank after a fixed number of
chunks, so a table takes as many entries as that cycle has, whatever the size of the pool.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hawk_connector.errors import ConfigError, UnsupportedError
from hawk_connector.layout.kv_pool import KVPoolLayout
from hawk_connector.layout.tensor_layout import TILE

from .banks import BankTable
from .ttnn_pools import TtnnPools

__all__ = ["ChunkConfig", "chunk_configs", "chunk_table", "pool_addresses", "read_chunk_table", "write_chunk_table"]

_SLOT = 0
_VIEW_BITS = 32


@dataclass(frozen=True, slots=True)
class ChunkConfig:
    """Pages of one kind: K (``kv`` 0) or V (1) of ``head`` on ``chip``, dims ``32 * column`` up to 32 further."""

    kv: int
    chip: int
    head: int
    column: int

    @property
    def name(self) -> str:
        return f"{'kv'[self.kv]}/chip{self.chip}/head{self.head}/dims{TILE * self.column}"


def chunk_configs(layout: KVPoolLayout) -> Iterator[ChunkConfig]:
    """Every kind of page that the pools have, in order of the table's config ids."""
    for kv in range(2):
        for chip in range(layout.chips):
            for head in range(layout.heads):
                for column in range(layout.head_dim // TILE):
                    yield ChunkConfig(kv, chip, head, column)


def chunk_table(pools: TtnnPools) -> Any:
    """A ``KvChunkAddressTable`` of the pools.

    Raises UnsupportedError for pools that are not interleaved tiles of whole rows, or whose chips TTNN cannot name.
    """
    layout, ttnn = pools.layout, pools.device.ttnn
    _check(layout, pools.device.table)
    kinds = ttnn._ttnn.operations.experimental.disaggregation
    configs = {}
    for kind in chunk_configs(layout):
        config = kinds.KvChunkAddressTableConfig()
        config.num_layers = layout.layers
        config.num_slots = 1
        config.max_sequence_length = pools.num_blocks * layout.block_size
        config.chunk_n_tokens = TILE
        config.chunk_size_bytes = layout.page_bytes
        configs[kind.name] = config
    table = kinds.KvChunkAddressTable(configs, dict.fromkeys(configs, kinds.ChunkCompression.STRIDED_ROWS))
    groups = [table.add_device_group([node]) for node in _nodes(pools)]
    # A small pool ends before its first cycle does; then no stride is ever taken.
    step = min(_cycle(layout), pools.num_blocks * layout.block_size // TILE)
    for kind in chunk_configs(layout):
        for layer in range(layout.layers):
            buffer = pools.buffer_addresses[layout.pool_of(layer, kind.kv)]
            places = [
                _place(layout, pools.device.table, buffer, kind, layer, chunk)
                for chunk in (*range(step), *range(_cycle(layout), _cycle(layout) + step))
            ]
            bases, again = places[:step], places[step:]
            strides = [then - now for now, then in zip(bases, again, strict=True)]
            owners = [groups[kind.chip]] * len(bases)
            number = table.config_id_of(kind.name)
            table.set_strided_row(layer, _SLOT, layout.page_bytes, bases, strides, owners, number)
    return table


def pool_addresses(table: Any, layout: KVPoolLayout, banks: BankTable, num_blocks: int) -> tuple[int, ...]:
    """Address of each pool, relative to a bank's base, out of a ``table`` that another process wrote.

    Every page of the table is compared with what ``layout`` says of pools at these addresses.  ConfigError names the
    first that differs: the table is of another model, layout or device, and reads or writes by it would be wrong.
    """
    _check(layout, banks)
    kinds = list(chunk_configs(layout))
    names = [table.config_name(index) for index in range(table.num_configs())]
    if sorted(names) != sorted(kind.name for kind in kinds):
        raise ConfigError(
            "the chunk table is of other pools",
            expected=f"{len(kinds)} configs, {kinds[0].name} to {kinds[-1].name}",
            got=f"{len(names)} configs, {', '.join(names[:3])}...",
        )
    found: list[int] = []
    for pool in range(layout.pools):
        kv = pool if layout.kind == "cross_layer" else pool % 2
        layer = 0 if layout.kind == "cross_layer" else pool // 2
        first = ChunkConfig(kv, 0, 0, 0)
        at = table.lookup(layer, 0, _SLOT, first.name).noc_addr
        found.append(at - _place(layout, banks, 0, first, layer, 0))
    addresses = tuple(found)
    for kind in kinds:
        config = table.config(table.config_id_of(kind.name))
        _same(kind, config, layout, num_blocks)
        for layer in range(layout.layers):
            buffer = addresses[layout.pool_of(layer, kind.kv)]
            for chunk in range(num_blocks * layout.block_size // TILE):
                place = table.lookup(layer, chunk * TILE, _SLOT, kind.name)
                expected = _place(layout, banks, buffer, kind, layer, chunk)
                if place.noc_addr != expected or place.size_bytes != layout.page_bytes:
                    raise ConfigError(
                        f"the chunk table differs from the pools' layout at {kind.name}, layer {layer}, "
                        f"position {chunk * TILE}",
                        expected=f"{layout.page_bytes} bytes at {expected:#x}",
                        got=f"{place.size_bytes} bytes at {place.noc_addr:#x}",
                    )
    return addresses


def write_chunk_table(pools: TtnnPools, path: Path) -> None:
    """Writes the pools' table as TTNN's protobuf file."""
    kinds = pools.device.ttnn._ttnn.operations.experimental.disaggregation
    kinds.export_to_protobuf_file(chunk_table(pools), str(path))


def read_chunk_table(ttnn: Any, path: Path, layout: KVPoolLayout, banks: BankTable, num_blocks: int) -> tuple[int, ...]:
    """``pool_addresses`` of a protobuf file.  ConfigError also where TTNN cannot read it."""
    kinds = ttnn._ttnn.operations.experimental.disaggregation
    try:
        table = kinds.import_from_protobuf_file(str(path))
    except RuntimeError as error:
        raise ConfigError(
            f"{path} is not a KvChunkAddressTable that this ttnn reads",
            got=str(error).splitlines()[0] if str(error) else type(error).__name__,
            fix="Write it with the same release of ttnn.",
        ) from None
    return pool_addresses(table, layout, banks, num_blocks)


def _cycle(layout: KVPoolLayout) -> int:
    """Chunks after which a page of the same place in a block is in the same bank again."""
    blocks = layout.banks // math.gcd(layout.pages_per_unit, layout.banks)
    return blocks * layout.block_size // TILE


def _place(layout: KVPoolLayout, banks: BankTable, buffer: int, kind: ChunkConfig, layer: int, chunk: int) -> int:
    """The table's number of a page's place: the DRAM view, which is the bank's number, above the address in it."""
    rows, columns = layout.block_size // TILE, layout.head_dim // TILE
    block, row = divmod(chunk, rows)
    within = (kind.head * rows + row) * columns + kind.column
    bank, offset = layout.rule.place(block * layout.pages_per_unit + layout.first_page_of(layer) + within)
    return (int(bank) << _VIEW_BITS) | (banks.bases[int(bank)] + buffer + int(offset))


def _nodes(pools: TtnnPools) -> list[Any]:
    """TTNN's name of each chip in its fabric."""
    mesh, ttnn = pools.device.mesh, pools.device.ttnn
    try:
        return [mesh.get_fabric_node_id(ttnn.MeshCoordinate(0, chip)) for chip in range(pools.layout.chips)]
    except (AttributeError, RuntimeError) as error:
        raise UnsupportedError(
            "a chunk table of this device", reason=f"TTNN cannot name its chips in a fabric ({error})"
        ) from error


def _check(layout: KVPoolLayout, banks: BankTable) -> None:
    if layout.channels != "interleaved" or layout.block_size % TILE or layout.head_dim % TILE:
        raise UnsupportedError(
            "a chunk table of these pools",
            reason="a chunk is a whole tile in one bank",
            expected=f"interleaved pools, block size and head_dim multiples of {TILE}",
            got=f"{layout.channels} pools, block size {layout.block_size}, head_dim {layout.head_dim}",
        )
    if max(banks.bases) + banks.bank_bytes > 1 << _VIEW_BITS:
        raise UnsupportedError("a chunk table of this device", reason="its banks are larger than 4 GiB")


def _same(kind: ChunkConfig, config: Any, layout: KVPoolLayout, num_blocks: int) -> None:
    wanted = {
        "num_layers": layout.layers,
        "num_slots": 1,
        "max_sequence_length": num_blocks * layout.block_size,
        "chunk_n_tokens": TILE,
        "chunk_size_bytes": layout.page_bytes,
    }
    wrong = {name: value for name, value in wanted.items() if getattr(config, name) != value}
    if wrong:
        raise ConfigError(
            f"the chunk table's config {kind.name} is of other pools",
            expected=", ".join(f"{name} {value}" for name, value in wrong.items()),
            got=", ".join(f"{name} {getattr(config, name)}" for name in wrong),
        )
