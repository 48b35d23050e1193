"""The table of `hawk bench handover`, and its picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from hawk_connector.bench.record import Ratios

__all__ = ["handover_table", "plot_handover"]

Rows = Sequence[Mapping[str, Any]]


def handover_table(rows: Rows, ratios: Ratios, notes: Sequence[str], console: Console) -> None:
    """A line for each system and concurrency, the parts of HAWK's, then the ratios and the notes."""
    table = _table("from the prefill side's answer to the first token of decode, ms")
    table.add_column("at once", justify="right")
    table.add_column("system")
    for name in ("median", "p90", "min", "max", "n", "own step", "rest", "idle, % of a core"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            str(row["concurrency"]),
            row["system"],
            *(f"{row[name]:,.1f}" for name in ("p50_ms", "p90_ms", "min_ms", "max_ms")),
            str(row["n"]),
            *(f"{row[name]:,.1f}" for name in ("itl_ms", "rest_ms")),
            " + ".join(f"{share * 100:.1f}" for share in row["idle_cpu"].values()),
        )
    console.print(table)
    console.print(
        "own step: between two tokens of the same server at that context; rest: the median without it.", highlight=False
    )
    console.print()
    _parts(rows, console)
    for about, ratio in ratios:
        said = (
            f"not said, {ratio.refused}"
            if ratio.value is None
            else f"{ratio.value:.2f} (quartiles {ratio.low:.2f}-{ratio.high:.2f})"
        )
        line = f"{about['concurrency']} at once: {ratio.of} / {ratio.to} = {said}"
        console.print(line, highlight=False, soft_wrap=True)
    for note in notes:
        console.print(note, markup=False, highlight=False, soft_wrap=True)


def plot_handover(rows: Rows, about: str, file: Path) -> None:
    """Every hand-over as a dot and each system's median as a bar; HAWK's own step within it, darker.

    ``about``: a line on the machine.  Errors as of the other plots.
    """
    from hawk_connector.bench.plot import picture, save_picture

    counts = list(dict.fromkeys(row["concurrency"] for row in rows))
    figure = picture((max(7.0, 4.4 * len(counts)), 4.8))
    for at, count in enumerate(counts):
        mine = [row for row in rows if row["concurrency"] == count]
        axes = figure.add_subplot(1, len(counts), at + 1)
        places = range(len(mine))
        axes.bar(places, [row["p50_ms"] for row in mine], 0.7, color="#9ecae1", label="median")
        axes.bar(places, [row["itl_ms"] for row in mine], 0.7, color="#3182bd", label="of it one decode step")
        for place, row in zip(places, mine, strict=True):
            values = row["handover_ms"]
            axes.plot([place] * len(values), values, "o", color="#222222", markersize=2.5, alpha=0.6)
        axes.set_xticks(list(places), [row["system"] for row in mine], rotation=30, ha="right", fontsize=8)
        axes.set_title(f"{count} at once", fontsize=10)
        axes.set_ylabel("ms" if at == 0 else "")
        axes.grid(axis="y", color="0.9")
        axes.set_axisbelow(True)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        if at == 0:
            axes.legend(frameon=False, fontsize=8)
    figure.suptitle(f"Hand-over: prefill's answer to decode's first token\n{about}", fontsize=10, x=0.08, ha="left")
    figure.tight_layout()
    save_picture(figure, file)


def _parts(rows: Rows, console: Console) -> None:
    mine = [row for row in rows if row["parts"]]
    if not mine:
        return
    names = list(dict.fromkeys(name for row in mine for name in row["parts"]))
    table = _table("HAWK's parts, medians, ms")
    table.add_column("at once", justify="right")
    table.add_column("system")
    for name in names:
        table.add_column(name.replace("_", " "), justify="right")
    for row in mine:
        figures = (f"{row['parts'][name]:,.1f}" if name in row["parts"] else "" for name in names)
        table.add_row(str(row["concurrency"]), row["system"], *figures)
    console.print(table)
    console.print(
        "until landed, from landed: the hand-over split where decode's load ends; pack, pull, land: work, which may "
        "lie before the answer and overlap.",
        highlight=False,
        soft_wrap=True,
    )
    console.print()


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
