"""A pool as `hawk layouts` shows it: a layout of the catalog, filled in with a model and a device."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from hawk_connector.errors import ConfigError
from hawk_connector.layout.catalog import DeviceEntry, LayoutEntry
from hawk_connector.layout.kv_pool import KVPoolLayout, PoolKind
from hawk_connector.layout.tensor_layout import TensorLayout
from hawk_connector.plan.pairing import chip_heads

from .catalog_pool import device_entry, layout_entry, model_pool
from .named_models import ModelKV, model_kv, nearest

__all__ = ["Element", "ShownPool", "parse_address", "parse_index"]

_AXES = ("block", "layer", "head", "token", "dim")


@dataclass(frozen=True, slots=True)
class Element:
    """One element of a pool, or of the padding in it, with where it lies.

    ``part``: "element", or "exponent" where an address is that of a shared exponent; ``index`` is then the first of
    the elements that share it.  ``bit``: the element's lowest bit in its first byte.
    """

    tensor: str
    index: Mapping[str, int]
    part: str
    padding: bool
    bank: int
    address: int
    bit: int
    page: int
    place: int
    exponent_address: int | None

    def json(self) -> str:
        return json.dumps(asdict(self))

    def text(self) -> str:
        where = f"bank {self.bank}, address {self.address:#x}"
        if self.bit:
            where += f" (bit {self.bit} and up)"
        what = f"{self.tensor}[" + ", ".join(f"{axis} {self.index[axis]}" for axis in self.index) + "]"
        if self.part == "exponent":
            what = f"exponent shared by {what} and those after it"
        if self.padding:
            what += " (padding)"
        about = f"page {self.page}, element {self.place} of it"
        if self.exponent_address is not None and self.part == "element":
            about += f", its exponent at {self.exponent_address:#x}"
        return f"{what}: {where}; {about}"


@dataclass(frozen=True, slots=True)
class ShownPool:
    """One pool of K (kv 0) or V (kv 1) on one chip. ``device`` is None where memory is one region."""

    entry: LayoutEntry
    model: ModelKV
    device: DeviceEntry | None
    layout: KVPoolLayout
    kv: int
    num_blocks: int
    tensor: TensorLayout

    @classmethod
    def of(
        cls,
        *,
        name: str,
        model: str,
        chips: int,
        pool: PoolKind | None,
        block_size: int,
        num_blocks: int,
        codec: str | None,
        device: str,
        kv: int,
        buffer_address: str,
    ) -> ShownPool:
        """``pool`` None: cross_layer in banks, per_layer, as other software has it, where memory is one region.

        Raises ConfigError for names that the catalog does not have, and for a shape that does not fit.
        """
        entry = layout_entry(name)
        chip = device_entry(device)
        banked = chip if entry.needs_device else None
        known = model_kv(model)
        if chip_heads(known.shape.kv_heads, chips) is None:
            raise ConfigError(
                f"{known.shape.kv_heads} KV heads cannot be split over {chips} chips",
                fix="--chips must divide the KV heads, or be a multiple of them.",
            )
        try:
            layout = model_pool(
                entry,
                chip,
                known.shape,
                kind=pool or ("cross_layer" if banked else "per_layer"),
                chips=chips,
                block_size=block_size,
                num_blocks=num_blocks,
                codec=codec,
            )
            first = banked.first_address if banked else 0
            start = _number(buffer_address, "--buffer-address") if buffer_address else _aligned(first, layout.alignment)
            tensor = layout.pool_tensor(kv, num_blocks, banked.base_table if banked else None, start)
        except ValueError as error:
            raise ConfigError(f"{name} cannot hold this cache: {error}") from None
        return cls(entry, known, banked, layout, kv, num_blocks, tensor)

    def element(self, index: Mapping[str, int]) -> Element:
        """The element at ``index``, by axis; ConfigError where it is outside the pool."""
        for axis in index:
            if axis not in self.axes:
                raise ConfigError(f"this pool has no axis {axis!r}", fix=nearest(axis, list(self.axes)))
        full = {axis: index.get(axis, 0) for axis in self.axes}
        try:
            found = self.tensor.locate(full)
        except ValueError as error:
            raise ConfigError(f"--index: {error}") from None
        padding = any(full[axis] >= extent for axis, extent in self.tensor.shape.items())
        return Element(
            tensor="KV"[self.kv],
            index=full,
            part="element",
            padding=padding,
            bank=found.bank,
            address=found.address,
            bit=found.bit,
            page=found.page,
            place=found.element,
            exponent_address=found.exponent_address,
        )

    def element_at(self, bank: int, address: int) -> Element:
        """What has the byte at ``address`` of ``bank``; ConfigError where it is none of the pool's."""
        try:
            found = self.tensor.at(bank, address)
        except ValueError as error:
            raise ConfigError(f"--address: {error}") from None
        where = self.tensor.locate(found.index)
        element = found.part == "element"
        return Element(
            tensor="KV"[self.kv],
            index={axis: found.index[axis] for axis in self.axes},
            part=found.part,
            padding=found.padding,
            bank=bank,
            address=where.address if element else address,
            bit=where.bit if element else 0,
            page=where.page,
            place=where.element,
            exponent_address=where.exponent_address,
        )

    @property
    def axes(self) -> tuple[str, ...]:
        """The pool's axes, as an index is written."""
        return tuple(axis for axis in _AXES if axis in self.tensor.order.axes)


def parse_index(text: str) -> dict[str, int]:
    """``block=3,dim=17`` by axis."""
    index: dict[str, int] = {}
    for part in text.split(","):
        axis, equals, value = (word.strip() for word in part.partition("="))
        if not equals or axis in index:
            raise ConfigError(
                f"--index: {part.strip()!r} is no AXIS=NUMBER, or its axis comes twice",
                fix="Write it as block=3,layer=1,head=0,token=5,dim=17.",
            )
        index[axis] = _number(value, "--index")
    return index


def parse_address(text: str) -> tuple[int, int]:
    """``5:0x123456`` as (bank, address)."""
    bank, colon, address = text.partition(":")
    if not colon:
        raise ConfigError(f"--address: {text!r} is no BANK:ADDRESS", fix="Write it as 5:0x123456.")
    return _number(bank, "--address"), _number(address, "--address")


def _number(text: str, option: str) -> int:
    try:
        return int(text.strip(), 0)
    except ValueError:
        raise ConfigError(f"{option}: {text!r} is no number", fix="Write 12 or 0xc.") from None


def _aligned(address: int, alignment: int) -> int:
    return -(-address // alignment) * alignment
