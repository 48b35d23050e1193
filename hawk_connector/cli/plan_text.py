"""`hawk plan`'s figures as text for people."""

from __future__ import annotations

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from .plan_count import ParcelCount, PlacementReport, PlanReport

__all__ = ["plan_text"]

# A long prompt has hundreds of parcels, all alike but the last.
_PARCELS_SHOWN = 4


def plan_text(report: PlanReport, console: Console) -> None:
    """Prints ``report``: what is paired, the totals, then a row for each rank and each parcel."""
    console.print(Group(_totals(report), _ranks(report), _parcels(report), _model(report)))


def _sizes(segments: PlanReport) -> str:
    """Bytes of a segment: one figure where all are equal."""
    if segments.smallest_segment == segments.largest_segment:
        return f"{segments.smallest_segment:,} bytes each"
    return (
        f"{segments.smallest_segment:,} to {segments.largest_segment:,} bytes, "
        f"{segments.bytes_per_segment:,.0f} on average"
    )


def _totals(report: PlanReport) -> RenderableType:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    ratio = report.wire_bytes / report.bf16_wire_bytes
    rows = {
        "model": f"{report.model}: {report.layers} layers, {report.kv_heads} KV heads, head_dim {report.head_dim}",
        "sides": f"{_count(report.tp, 'prefill rank')} -> {_count(report.chips, 'chip')} ({report.device}, "
        f"{_count(report.banks, 'bank')}, {_count(report.heads_per_chip, 'KV head')} each)",
        "pool": f"{report.layout}, {report.pool}, {report.dtype}; a unit is {report.pages_per_unit:,} pages "
        f"of {report.page_bytes:,} bytes",
        "request": f"{report.tokens:,} tokens in {report.blocks:,} {report.block_ids} blocks of {report.block_size}, "
        f"{_count(len(report.parcels), 'parcel')}",
        "wire bytes": f"{report.wire_bytes:,} ({ratio:.1%} of bf16's {report.bf16_wire_bytes:,})",
        "streams": f"{report.streams:,}",
        "segments": f"{report.segments:,}, {_sizes(report)}",
        "packing": f"{'eager' if report.eager else 'on demand'}: {report.why}",
        "predicted": f"{_time(report.predicted_s)} = {_time(report.bytes_s)} for the bytes + "
        f"{_time(report.reads_s)} for the reads",
    }
    if report.placement is not None:
        rows["placement"] = _placement(report.placement)
    for name, value in rows.items():
        table.add_row(name, Text(value))
    return table


def _placement(placement: PlacementReport) -> str:
    """What the reads should end in, and both counts."""
    pool, staged = f"{placement.pool_reads:,} into the pools", f"{placement.staged_reads:,} into stages"
    copies = f"{placement.copies:,} copies inside the device"
    if placement.choice == "pool":
        return f"pool: {pool} cost no more than {staged} and {copies}"
    return f"{placement.choice}: {placement.reads:,} reads; {pool}, or {staged} and {copies}"


def _ranks(report: PlanReport) -> RenderableType:
    table = _table("rank", "to chips", "streams", "segments", "wire bytes", "alone on the link")
    for rank in report.ranks:
        chips = ", ".join(map(str, rank.chips)) or "none (another rank sends its heads)"
        figures = (f"{rank.streams:,}", f"{rank.segments:,}", f"{rank.wire_bytes:,}", _time(rank.predicted_s))
        table.add_row(str(rank.rank), chips, *figures)
    figures = (f"{report.streams:,}", f"{report.segments:,}", f"{report.wire_bytes:,}", _time(report.predicted_s))
    table.add_row("all", "", *figures, style="bold")
    return table


def _parcels(report: PlanReport) -> RenderableType:
    table = _table("parcel", "blocks", "streams", "segments", "wire bytes")
    shown = report.parcels if len(report.parcels) <= _PARCELS_SHOWN else (*report.parcels[:2], report.parcels[-1])
    last: ParcelCount | None = None
    for parcel in shown:
        if last is not None and parcel.index > last.index + 1:
            table.add_row("...")
        figures = (parcel.blocks, parcel.streams, parcel.segments, parcel.wire_bytes)
        table.add_row(str(parcel.index), *(f"{figure:,}" for figure in figures))
        last = parcel
    return table


def _model(report: PlanReport) -> RenderableType:
    return Text(
        f"Prediction: bytes at {report.link_gbps:g} Gbit/s plus {report.read_us:g} µs for each read, nothing "
        "overlapped. 200 Gbit/s is the HDR InfiniBand of HAWK's paper (5.1), one NIC for all ranks; 18 µs is a "
        "small read of Mooncake 0.3.13 over TCP on loopback, on a quiet machine (benchmarks/read_cost.py). Set "
        "--link-gbps and --read-us to what yours has.",
        style="dim",
    )


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 or column == "to chips" else "right")
    return table


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
