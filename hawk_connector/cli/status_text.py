"""Statuses for people to read.  Texts that clients and peers chose are shown escaped, and never as markup."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hawk_connector.address import Address
from hawk_connector.event_log import escaped
from hawk_connector.metrics import TransferReport
from hawk_connector.protocol.messages import PairingStatus, Status
from hawk_connector.protocol.snapshot import TransferSnapshot

__all__ = ["duration", "size", "status_view"]

_SHOWN_REPORTS = 8
_STATE_STYLES = {"paired": "green", "refused": "red", "down": "red", "open": "red", "half_open": "yellow"}


def status_view(address: Address, status: Status | None) -> RenderableType:
    """One side: a head line, what it holds, its peers, transfers and last reports; empty tables are left out."""
    if status is None:
        return Text(f"{address}: no answer", style="bold red")
    parts: list[RenderableType] = [_head(address, status), _held(status)]
    if status.pairings:
        parts.append(_peers(status.pairings))
    if status.transfers:
        parts.append(_transfers(status.transfers))
    if status.reports:
        parts.append(_reports(status.reports))
    if status.left_out:
        parts.append(Text("not shown, for the size of a message: " + _counts(status.left_out), style="dim"))
    return Group(*parts)


def _head(address: Address, status: Status) -> Text:
    head = Text.assemble((f"{escaped(status.role)} {address}", "bold"), f"  up {duration(status.uptime_s)}  ")
    if not status.unready:
        return head.append("ready", style="green")
    head.append("not ready", style="red")
    return head.append(": " + "; ".join(escaped(reason, 1024) for reason in status.unready))


def _held(status: Status) -> Text:
    held = {name: number for name, number in status.held.items() if number}
    text = Text("holds " + (_counts(held) if held else "nothing"))
    dropped = {name: number for name, number in status.dropped.items() if number}
    return text.append(f"; messages dropped: {_counts(dropped)}", style="yellow") if dropped else text


def _peers(pairings: Sequence[PairingStatus]) -> Table:
    table = _table("peer", "state", "circuit", "detail")
    for each in pairings:
        table.add_row(_plain(each.peer), _state(each.state), _state(each.circuit), _plain(each.detail, 1024))
    return table


def _transfers(transfers: Sequence[TransferSnapshot]) -> Table:
    table = _table("transfer", "request", "phase", "age", "still", "parcels", "bytes", "waits for", "ends in")
    for each in transfers:
        ends = "" if each.deadline_in_s is None else f"{duration(each.deadline_in_s)} ({each.deadline})"
        table.add_row(
            _plain(each.transfer),
            _plain(each.request),
            _plain(each.phase),
            duration(each.age_s),
            duration(each.still_s),
            f"{each.parcels_done}/{each.parcels}",
            f"{size(each.nbytes_done)} / {size(each.nbytes)}",
            _plain(each.waits_for),
            _plain(ends),
        )
    return table


def _reports(reports: Sequence[TransferReport]) -> Table:
    table = _table("ended", "request", "outcome", "tokens", "bytes", "segments", "pack", "pull", "hand-over", "reason")
    for each in reports[-_SHOWN_REPORTS:]:
        times = [_milliseconds(seconds) for seconds in (each.pack_s, each.pull_s, each.handover_s)]
        table.add_row(
            _plain(each.transfer_id),
            _plain(each.request_id),
            Text(each.outcome, style="green" if each.outcome == "completed" else "yellow"),
            str(each.tokens),
            size(each.wire_bytes),
            str(each.segments),
            *times,
            _plain(each.reason, 512),
        )
    return table


def _table(*headings: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in headings:
        # What is searched for in logs is never cut.
        table.add_column(heading, overflow="fold", no_wrap=heading in ("age", "still", "parcels", "state", "outcome"))
    return table


def _plain(text: str, limit: int = 256) -> Text:
    return Text(escaped(text, limit))


def _state(text: str) -> Text:
    return Text(escaped(text), style=_STATE_STYLES.get(text, ""))


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{number} {escaped(name).replace('_', ' ')}" for name, number in counts.items())


def _milliseconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:.1f} ms"


def duration(seconds: float) -> str:
    """``seconds`` in two units at most: "0.4 s", "12 s", "3 min 5 s", "2 h 10 min", "4 d 1 h"."""
    if seconds < 10:
        return f"{max(0.0, seconds):.1f} s"
    whole = round(seconds)
    for large, unit, small, part in (("d", 86400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1)):
        if whole >= unit:
            return f"{whole // unit} {large} {whole % unit // part} {small}"
    return f"{whole} s"


def size(nbytes: int) -> str:
    """``nbytes`` with a binary unit: "0 B", "174,080 B", "1.5 GiB"."""
    for unit, power in (("GiB", 30), ("MiB", 20)):
        if nbytes >= 1 << power:
            return f"{nbytes / (1 << power):.1f} {unit}"
    return f"{nbytes:,} B"
