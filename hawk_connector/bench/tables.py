"""What `hawk bench` prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from .contestants import FACE_ROWS
from .record import Ratios
from .rounds import Ratio

__all__ = ["print_notes", "transfer_tables", "transform_tables"]

Rows = Sequence[Mapping[str, Any]]


def transform_tables(rows: Rows, ratios: Ratios, console: Console) -> None:
    """A line for each (source, dtypes, threads), with its ratios beside it."""
    table = _table(f"packing one parcel, GB/s of source, {rows[0]['device']}")
    for name in ("source", "from", "to", "threads"):
        table.add_column(name)
    for name in ("GB/s", "K", "V", "memcpy", "of memcpy", "K/V", "to 1 thread"):
        table.add_column(name, justify="right")
    for row in rows:
        about = {name: row[name] for name in ("source", "source_dtype", "dtype", "threads")}
        found = {ratio.to: ratio for of, ratio in ratios if of == about}
        table.add_row(
            row["source"],
            row["source_dtype"],
            row["dtype"],
            str(row["threads"]),
            *(_rate(row[name]) for name in ("gb_per_s", "k_gb_per_s", "v_gb_per_s", "memcpy_gb_per_s")),
            *(_ratio(found.get(to)) for to in ("pack", "K", f"{row['threads']} threads")),
        )
    console.print(table)


def transfer_tables(rows: Rows, ratios: Ratios, console: Console) -> None:
    """A line for each contestant and size, then the ratios."""
    table = _table("from the request to the KV in its pool")
    for name in ("mode", "dtype", "packing"):
        table.add_column(name)
    several = len({row["parcel_tokens"] for row in rows}) > 1
    for name in (
        *(["parcel"] if several else []),
        *("MB", "median", "min", "max", "pack", "pull", "land", "segments", "bytes each", "parcels"),
    ):
        table.add_column(name, justify="right")
    last = rows[0]["size_mb"]
    for row in rows:
        if row["size_mb"] != last:
            table.add_section()
            last = row["size_mb"]
        names = ("seconds_median", "seconds_min", "seconds_max", "pack_s", "pull_s", "land_s")
        table.add_row(
            row["mode"],
            row["dtype"],
            "none" if row["mode"] in ("direct", FACE_ROWS) else row["packing"],
            *([f"{row['parcel_tokens']}"] if several else []),
            str(row["size_mb"]),
            *(_ms(row[name]) for name in names),
            f"{row['segments']:,}",
            f"{row['bytes_per_segment']:,.0f}",
            str(row["parcels"]),
        )
    console.print(table)
    console.print("Times in ms. pack, pull, land: work of both sides, which overlaps.", highlight=False)
    if ratios:
        _transfer_ratios(ratios, console)


def print_notes(notes: Sequence[str], console: Console) -> None:
    for note in notes:
        console.print(note, markup=False, highlight=False, soft_wrap=True)


def _transfer_ratios(ratios: Ratios, console: Console) -> None:
    sizes = list(dict.fromkeys(about["size_mb"] for about, _ in ratios))
    table = _table("times beside each other, by MB (quartiles of the rounds)")
    table.add_column("of / to")
    for size in sizes:
        table.add_column(str(size), justify="right")
    found = {(ratio.of, ratio.to, about["size_mb"]): ratio for about, ratio in ratios}
    for of, to in dict.fromkeys((ratio.of, ratio.to) for _, ratio in ratios):
        table.add_row(f"{of} / {to}", *(_ratio(found.get((of, to, size))) for size in sizes))
    console.print(table)


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f}"


def _ratio(ratio: Ratio | None) -> str:
    """The ratio with its quartiles, "spread" or "few" where it was refused."""
    if ratio is None:
        return ""
    if ratio.value is None or ratio.low is None or ratio.high is None:
        return "spread" if "spread" in ratio.refused else "few runs"
    return f"{ratio.value:.2f} ({ratio.low:.2f}-{ratio.high:.2f})"


def _rate(value: float | None) -> str:
    return "spread" if value is None else f"{value:.2f}"
