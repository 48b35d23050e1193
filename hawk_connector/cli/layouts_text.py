"""`hawk layouts` for people: the catalog's tables, a device's banks, and a layout as a diagram of its factors."""

from __future__ import annotations

from collections.abc import Iterable

from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from hawk_connector.layout.axes import AxisOrder
from hawk_connector.layout.catalog import DEVICES, LAYOUTS
from hawk_connector.layout.channels import ChannelRule, HeightShardedRule, InterleavedRule, LinearRule

from .layouts_pool import ShownPool

__all__ = ["catalog", "device", "diagram", "digit_names", "is_device", "is_layout", "names"]


def is_device(name: str) -> bool:
    """Whether the catalog has a device called ``name``."""
    return any(entry.name == name for entry in DEVICES)


def is_layout(name: str) -> bool:
    """Whether the catalog has a layout called ``name``."""
    return any(entry.name == name for entry in LAYOUTS)


def names() -> list[str]:
    """All names of the catalog."""
    return [*(entry.name for entry in LAYOUTS), *(entry.name for entry in DEVICES)]


def catalog(console: Console) -> None:
    """Prints both parts of the catalog."""
    devices = _table("device", "banks", "bytes a bank", "alignment", "from")
    for chip in DEVICES:
        devices.add_row(chip.name, str(chip.banks), f"{chip.bank_bytes:,}", str(chip.alignment), chip.source)
    layouts = _table("layout", "tiling", "channels", "codec", "from")
    for entry in LAYOUTS:
        layouts.add_row(entry.name, entry.tiling, entry.channels, entry.codec, entry.source)
    console.print(Group(devices, layouts, Text("`hawk layouts NAME` shows one of them.", style="dim")))


def device(name: str, console: Console) -> None:
    """Prints a device's bank table."""
    entry = next(entry for entry in DEVICES if entry.name == name)
    table = _table("bank", "base address", "bytes")
    for bank, base in enumerate(entry.bases):
        table.add_row(str(bank), f"{base:#x}", f"{entry.bank_bytes:,}")
    about = f"first free address {entry.first_address:#x}, alignment {entry.alignment} bytes; from: {entry.source}"
    console.print(Group(Text(entry.name, style="bold"), table, Text(about)))


def diagram(shown: ShownPool, console: Console) -> None:
    """Prints one pool's layout: every digit of the address, outermost first, then page, bank and order of dims."""
    layout, tensor = shown.layout, shown.tensor
    factors = tensor.order.factors
    of_page = [factor.stride >= tensor.page_elements for factor in factors]
    braces = [*_brace(sum(of_page), "page number"), *_brace(len(factors) - sum(of_page), "element of the page")]
    table = _table("digit", "values", "one step", "")
    for name, factor, counts_pages, brace in zip(digit_names(tensor.order), factors, of_page, braces, strict=True):
        unit = _count(factor.stride // tensor.page_elements, "page") if counts_pages else ""
        table.add_row(name, f"{factor.extent:,}", unit or _count(factor.stride, "element"), brace)
    where = shown.device.name if shown.device else "one region"
    shape = f"{_count(layout.heads, 'KV head')} a chip, blocks of {layout.block_size}, head_dim {layout.head_dim}"
    head = f"{shown.entry.name}: a {layout.kind} pool of {'KV'[shown.kv]} for {shown.model.name}; {shape}; {where}"
    lines = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    lines.add_column(style="bold", no_wrap=True)
    lines.add_column(overflow="fold")
    lines.add_row("page", _page_text(shown))
    lines.add_row("bank", _rule_text(tensor.channel_rule, tensor.buffer_address))
    for axis, extent in tensor.shape.items():
        if tensor.order.extent(axis) > extent:
            lines.add_row("padding", f"{axis} {extent} to {tensor.order.extent(axis) - 1} are zeros")
    if tensor.dim_order is not None:
        lines.add_row("dims", _order_text(shown))
    lines.add_row("from", Text(shown.entry.source))
    console.print(Group(Text(head, style="bold"), table, lines))


def digit_names(order: AxisOrder) -> list[str]:
    """What each factor counts, as arithmetic on its axis' index: "token // 32", "token // 16 % 2", "token % 16"."""
    names = []
    for place, factor in enumerate(order.factors):
        below = _product(f.extent for f in order.factors[place + 1 :] if f.axis == factor.axis)
        outermost = all(f.axis != factor.axis for f in order.factors[:place])
        name = factor.axis if below == 1 else f"{factor.axis} // {below}"
        names.append(name if outermost else f"{name} % {factor.extent}")
    return names


def _brace(rows: int, label: str) -> list[str]:
    """A brace over ``rows`` lines of a table, with its label in the middle."""
    if rows <= 1:
        return [f"─ {label}"] * rows
    lines = ["┐", *"│" * (rows - 2), "┘"]
    lines[rows // 2] = f"{'┘' if rows == 2 else '├'} {label}"
    return lines


def _page_text(shown: ShownPool) -> str:
    layout, elements = shown.layout, shown.tensor.page_elements
    codec = layout.page_codec
    exponents = codec.exponent_bytes(elements)
    parts = [f"{elements:,} x {codec.bits} bits"]
    if exponents:
        parts.insert(0, f"{exponents} exponents (one for {codec.group} elements)")
    gap = "" if layout.page_pitch == layout.page_bytes else f", {layout.page_pitch:,} with the gap after it"
    return f"{codec.name}: {' + '.join(parts)} = {layout.page_bytes:,} bytes{gap}"


def _rule_text(rule: ChannelRule, buffer: int) -> str:
    pitch, shard, banks = f"{rule.page_pitch:,}", f"{rule.shard_pages:,}", rule.banks
    if isinstance(rule, LinearRule):
        return f"one region: page p at {buffer:#x} + p * {pitch}"
    if isinstance(rule, InterleavedRule):
        return f"page p in bank p % {banks}, at base + {buffer:#x} + p // {banks} * {pitch}"
    if isinstance(rule, HeightShardedRule):
        return f"page p in bank p // {shard}, at base + {buffer:#x} + p % {shard} * {pitch}"
    return (
        f"page p in shard s = p // {shard}, shard s in bank s % {banks}, "
        f"at base + {buffer:#x} + (s // {banks} * {shard} + p % {shard}) * {pitch}"
    )


def _order_text(shown: ShownPool) -> str:
    rotary = shown.layout.rotary_dim or shown.layout.head_dim
    kept = "" if rotary == shown.layout.head_dim else f"; dims from {rotary} on keep their place"
    return f"place 2i + k holds K's dim k * {rotary // 2} + i (Meta's RoPE order){kept}"


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        left = column in ("device", "layout", "tiling", "channels", "codec", "from", "digit", "")
        table.add_column(column, justify="left" if left else "right", no_wrap=column in ("device", "layout"))
    return table


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def _product(numbers: Iterable[int]) -> int:
    product = 1
    for number in numbers:
        product *= number
    return product
