"""Pictures of what was measured: transfers as the paper's Figure 9 shows them, packing as bars beside a copy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hawk_connector.errors import ConfigError, LocalError

from .contestants import FACE_ROWS
from .record import Ratios

__all__ = ["picture", "plot_transfer", "plot_transform", "save_picture"]

Rows = Sequence[Mapping[str, Any]]

_COLOURS = {
    ("direct", ""): "#222222",
    ("hawk", "fp32"): "#9ecae1",
    ("hawk", "bf16"): "#3182bd",
    ("hawk", "bfp8"): "#08306b",
    ("hawk", "bfp4"): "#54278f",
    ("host", "fp32"): "#fdae6b",
    ("host", "bf16"): "#e6550d",
    ("host", "bfp8"): "#8c2d04",
    ("host", "bfp4"): "#67000d",
    (FACE_ROWS, "bf16"): "#31a354",
}
_MARKERS = {"direct": "s", "hawk": "o", "host": "^", FACE_ROWS: "D"}


def plot_transfer(rows: Rows, ratios: Ratios, about: str, file: Path) -> None:
    """Time over size for each contestant, both axes logarithmic; below, each one's ratio to direct.

    ``about``: one line on the machine and the carrier.  ConfigError without matplotlib or for an unknown kind of file,
    LocalError where it cannot be written.
    """
    figure = picture((10.5, 9.0))
    has_ratios = any(ratio.to.startswith("direct") and ratio.value is not None for _, ratio in ratios)
    grid = figure.add_gridspec(2 if has_ratios else 1, 1, height_ratios=(3, 2) if has_ratios else (1,), hspace=0.12)
    times = figure.add_subplot(grid[0])
    several = len({row["parcel_tokens"] for row in rows}) > 1
    for key in dict.fromkeys(_key(row) for row in rows):
        mine = [row for row in rows if _key(row) == key]
        size = [row["size_mb"] for row in mine]
        style = _style(mine[0])
        times.plot(size, [row["seconds_median"] * 1e3 for row in mine], label=_label(mine[0], several), **style)
        low, high = ([row[name] * 1e3 for row in mine] for name in ("seconds_min", "seconds_max"))
        times.fill_between(size, low, high, color=style["color"], alpha=0.12, linewidth=0)
    _axes(times, sorted({row["size_mb"] for row in rows}))
    times.set_yscale("log")
    times.set_ylabel("request to landed, ms (median; band: min to max)")
    times.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    times.legend(loc="upper left", fontsize=8.5, ncol=2, frameon=False)
    lower = times
    if has_ratios:
        lower = figure.add_subplot(grid[1], sharex=times)
        _draw_ratios(lower, rows, ratios, several)
        times.tick_params(labelbottom=False)
    lower.set_xlabel("KV counted in bf16, MB (1 MB = 2^20 bytes)")
    figure.suptitle(f"KV transfer latency by size\n{about}", fontsize=11, x=0.08, y=0.965, ha="left")
    save_picture(figure, file)


def plot_transform(rows: Rows, about: str, file: Path) -> None:
    """Packing rates in groups of source and dtypes, with the copy's rate as a line over each bar.  Errors as above."""
    threads = sorted({row["threads"] for row in rows})
    groups = list(dict.fromkeys((row["source"], row["source_dtype"], row["dtype"]) for row in rows))
    figure = picture((max(7.0, 0.62 * len(groups) + 2.5), 5.6))
    axes = figure.add_subplot()
    width = 0.8 / len(threads)
    for at, count in enumerate(threads):
        mine = {(r["source"], r["source_dtype"], r["dtype"]): r for r in rows if r["threads"] == count}
        place = [number - 0.4 + width * (at + 0.5) for number in range(len(groups))]
        label = "1 thread" if count == 1 else f"{count} threads"
        colour = ("#3182bd", "#9ecae1", "#08306b")[at % 3]
        axes.bar(place, [mine[group]["gb_per_s"] for group in groups], width * 0.92, label=label, color=colour)
        copies = [mine[group]["memcpy_gb_per_s"] for group in groups]
        axes.hlines(
            copies,
            [x - width * 0.46 for x in place],
            [x + width * 0.46 for x in place],
            colors="#222222",
            linewidth=1.6,
            label="memcpy, as many threads" if at == 0 else None,
        )
    axes.set_xticks(range(len(groups)), [f"{s}\n{a}\n→ {b}" for s, a, b in groups], fontsize=8)
    axes.set_ylabel("GB/s of source (median)")
    axes.grid(axis="y", color="0.9")
    axes.set_axisbelow(True)
    axes.legend(frameon=False, fontsize=9)
    _bare(axes)
    figure.suptitle(f"Packing rate\n{about}", fontsize=11, x=0.08, ha="left")
    save_picture(figure, file)


def _draw_ratios(axes: Any, rows: Rows, ratios: Ratios, several: bool) -> None:
    """Only those that may be shown: where the spread swallows one, its line has a gap."""
    axes.axhline(1, color=_COLOURS["direct", ""], linewidth=1)
    for key in dict.fromkeys(_key(row) for row in rows):
        first = next(row for row in rows if _key(row) == key)
        name = _name(first)
        mine = [(at["size_mb"], r) for at, r in ratios if r.of == name and r.to.startswith("direct")]
        shown = [(size, r) for size, r in mine if r.value is not None]
        if not shown:
            continue
        style = _style(first)
        values = [r.value if r.value is not None else float("nan") for _, r in mine]
        axes.plot([size for size, _ in mine], values, **style)
        for size, ratio in shown:
            axes.vlines(size, ratio.low, ratio.high, color=style["color"], linewidth=1)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_formatter(lambda value, _: f"{value:g}" if round(value, 1) in (0.5, 2.0, 3.0, 5.0) else "")
    axes.tick_params(axis="y", which="minor", labelsize=8)
    axes.set_ylabel("time / direct's (quartiles)")
    _axes(axes, sorted({row["size_mb"] for row in rows}))


def _key(row: Mapping[str, Any]) -> tuple[str, str, str, int]:
    return row["mode"], row["dtype"], row["packing"], row["parcel_tokens"]


def _name(row: Mapping[str, Any]) -> str:
    """The contestant's name, as in ratios."""
    words = [row["mode"], row["dtype"]]
    return " ".join(
        words + ([] if row["mode"] in ("direct", FACE_ROWS) else [row["packing"], f"p{row['parcel_tokens']}"])
    )


def _label(row: Mapping[str, Any], several: bool) -> str:
    if row["mode"] == "direct":
        return f"direct ({row['dtype']}, cache to cache)"
    if row["mode"] == FACE_ROWS:
        return "one read per face row (bf16)"
    parcel = f", parcels of {row['parcel_tokens']}" if several else ""
    return f"{row['mode']} {row['dtype']}, {row['packing']}{parcel}"


def _style(row: Mapping[str, Any]) -> dict[str, Any]:
    mode, dtype = row["mode"], row["dtype"]
    colour = _COLOURS.get((mode, "" if mode == "direct" else dtype), "#777777")
    return {
        "color": colour,
        "marker": _MARKERS.get(mode, "x"),
        "markersize": 5,
        "linewidth": 2.2 if mode == "direct" else 1.5,
        "linestyle": "--" if row["packing"] == "cold" else "-",
    }


def _axes(axes: Any, sizes: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(sizes), [str(size) for size in sizes])
    axes.minorticks_on()
    axes.tick_params(axis="x", which="minor", length=0)
    axes.grid(color="0.9")
    axes.set_axisbelow(True)
    _bare(axes)


def _bare(axes: Any) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def picture(size: tuple[float, float]) -> Any:
    """matplotlib's Figure, which draws without a display and without pyplot's global state."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError(
            "a picture needs matplotlib, which is not installed", fix="Run `pip install 'hawk-connector[plot]'`."
        ) from None
    return Figure(figsize=size)


def save_picture(figure: Any, file: Path) -> None:
    """LocalError where ``file`` cannot be written, ConfigError for an unknown kind of file."""
    try:
        figure.savefig(file, dpi=130, bbox_inches="tight")
    except OSError as error:
        raise LocalError(f"cannot write the picture {file}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"cannot draw into {file}: {error}", fix="End the file's name in .png or .svg.") from None
