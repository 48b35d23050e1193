"""From names to the catalog's entries, and from an entry to a model's pool, for `hawk plan` and `hawk layouts`."""

from __future__ import annotations

from hawk_connector.errors import ConfigError
from hawk_connector.layout.catalog import DEVICES, LAYOUTS, DeviceEntry, LayoutEntry
from hawk_connector.layout.kv_pool import KVPoolLayout, PoolKind
from hawk_connector.layout.kv_shape import KVShape
from hawk_connector.plan.pairing import chip_heads

from .named_models import nearest

__all__ = ["device_entry", "layout_entry", "model_pool"]


def device_entry(name: str) -> DeviceEntry:
    """The catalog's device; ConfigError names the nearest for one that it does not have."""
    for entry in DEVICES:
        if entry.name == name:
            return entry
    raise ConfigError(f"device {name!r} is not in the catalog", fix=nearest(name, [entry.name for entry in DEVICES]))


def layout_entry(name: str) -> LayoutEntry:
    """The catalog's layout; ConfigError names the nearest for one that it does not have."""
    for entry in LAYOUTS:
        if entry.name == name:
            return entry
    raise ConfigError(f"layout {name!r} is not in the catalog", fix=nearest(name, [entry.name for entry in LAYOUTS]))


def model_pool(
    entry: LayoutEntry,
    device: DeviceEntry,
    shape: KVShape,
    *,
    kind: PoolKind,
    chips: int,
    block_size: int,
    num_blocks: int,
    codec: str | None,
) -> KVPoolLayout:
    """The pool of ``num_blocks`` that each of ``chips`` has.  ``codec`` None: what the layout's software stores.

    Where the heads cannot be split over the chips it has as many as come out at least, and no pairing accepts it.
    """
    split = chip_heads(shape.kv_heads, chips)
    shard_rows = 1
    if entry.channels == "height_sharded":  # one shard for each bank, of whole blocks
        shard_rows = -(-num_blocks // device.banks) * (shape.layers if kind == "cross_layer" else 1)
    return entry.pool(
        kind=kind,
        layers=shape.layers,
        chips=chips,
        heads=len(split[0]) if split else max(1, shape.kv_heads // chips),
        block_size=block_size,
        head_dim=shape.head_dim,
        codec=codec,
        device=device if entry.needs_device else None,
        shard_rows=shard_rows,
    )
