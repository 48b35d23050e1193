"""The picture of `hawk plan --picture`: where the tiles of one block lie over the banks of one chip.

Left: the block's whole depth in each bank, coloured by head and layer, K beside V.  Right: one layer of it, tile by
tile.  matplotlib is imported here only, when a picture is asked for.
"""

from __future__ import annotations

import colorsys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hawk_connector.errors import ConfigError, LocalError
from hawk_connector.layout.kv_pool import KVPoolLayout

__all__ = ["BlockTiles", "block_tiles", "draw_block"]

_KV = ("K", "V")
# Hues that stay apart for people who do not see red and green alike; they repeat after eight heads.
_HUES = (0.58, 0.08, 0.42, 0.83, 0.15, 0.70, 0.0, 0.50)
# With more slots than these: short labels; no labels.
_TALL_SLOTS = 6
_LABELLED_SLOTS = 32


@dataclass(frozen=True, slots=True)
class BlockTiles:
    """Where one layer of a block lies, K or V; one entry a tile, in page order.

    ``bank``, ``slot``: int64 ``[T]``; a slot is ``page_pitch`` bytes of a bank, counted from the pool's address.
    ``head``: int64 ``[T]``.  ``tokens``, ``dims``: what each tile holds, as text ("0-31", "0-15, 64-79").
    """

    kv: int
    layer: int
    bank: NDArray[np.int64]
    slot: NDArray[np.int64]
    head: NDArray[np.int64]
    tokens: tuple[str, ...]
    dims: tuple[str, ...]


def block_tiles(layout: KVPoolLayout, block: int, layer: int, kv: int) -> BlockTiles:
    """The tiles of ``layer``'s K (kv 0) or V (kv 1) of pool block ``block``."""
    tensor = layout.tensor_layout(kv)
    first = block * layout.pages_per_unit + layout.first_page_of(layer)
    head, tokens, dims = [], [], []
    stored = np.arange(layout.head_dim) if tensor.dim_order is None else np.asarray(tensor.dim_order)
    kept = len(stored)  # places past it are padding
    for page in range(tensor.pages):
        heads, rows, places = np.nonzero(tensor.page_of == page)
        head.append(int(heads[0]))
        tokens.append(_ranges(np.unique(rows[rows < layout.block_size])))
        dims.append(_ranges(np.unique(stored[np.unique(places[places < kept])])))
    pages = range(first, first + tensor.pages)
    bank = np.array([layout.rule.bank(page) for page in pages], dtype=np.int64)
    slot = np.array([layout.rule.offset(page) // layout.page_pitch for page in pages], dtype=np.int64)
    return BlockTiles(kv, layer, bank, slot, np.array(head), tuple(tokens), tuple(dims))


def draw_block(layout: KVPoolLayout, block: int, title: str, file: Path, layer: int = 0) -> None:
    """Writes the picture of pool block ``block`` to ``file``; the ending chooses the format (png, svg, pdf).

    Raises ConfigError without matplotlib or with an unknown ending, LocalError where the file cannot be written.
    """
    figure_of = _matplotlib()
    zoom = [block_tiles(layout, block, layer, kv) for kv in range(2)]
    slots = int(np.ptp(zoom[0].slot)) + 1
    across = 1.05 * max(layout.banks, 4)
    width = 5.6 + across
    height = max(6.4, 2.6 + 2 * _slot_height(slots, int(np.ptp(zoom[0].bank)) + 1) * min(slots, _LABELLED_SLOTS))
    figure = figure_of(figsize=(width, height))
    grid = figure.add_gridspec(
        2,
        3,
        width_ratios=(1.7, 1.7, across),
        hspace=2.0 / (height - 2.75),
        wspace=4.2 / width,
        left=0.95 / width,
        right=1 - 0.15 / width,
        top=1 - 1.15 / height,
        bottom=0.6 / height,
    )
    left = 0.15 / width
    figure.text(left, 1 - 0.1 / height, title, ha="left", va="top", fontsize=14, weight="bold")
    about = _caption(layout, block)
    figure.text(left, 1 - 0.42 / height, about, ha="left", va="top", fontsize=9.5, color="0.25", linespacing=1.5)
    for kv in range(2):
        _draw_depth(figure.add_subplot(grid[:, kv]), layout, block, kv, layer)
        _draw_layer(figure.add_subplot(grid[kv, 2]), layout, zoom[kv])
    try:
        figure.savefig(file, dpi=110)
    except OSError as error:
        raise LocalError(f"cannot write the picture {file}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"cannot draw into {file}: {error}", fix="End the file's name in .png or .svg.") from None


def _slot_height(slots: int, banks: int) -> float:
    """Inches of a tile with its label: one line where it has the whole width, four where there is room, else two."""
    if banks == 1:
        return 0.24
    return 0.65 if slots <= _TALL_SLOTS else 0.34


def _caption(layout: KVPoolLayout, block: int) -> str:
    unit = "the whole depth" if layout.kind == "cross_layer" else "each layer"
    first = block * layout.pages_per_unit
    banks = Counter(layout.rule.bank(page) for page in range(first, first + layout.pages_per_unit))
    least, most = min(banks.values()), max(banks.values())
    pages = f"{most:,} pages" if least == most else f"{least:,} or {most:,} pages"
    nbytes = " or ".join(f"{count * layout.page_pitch:,}" for count in sorted({least, most}))
    return (
        f"{layout.kind}, {layout.codec}: {unit} of a block, K or V, is {pages} ({nbytes} bytes) "
        f"in {'one bank' if len(banks) == 1 else f'each of {len(banks)} banks'}.\n"
        f"A page has {layout.page_elements:,} elements, {layout.page_pitch:,} bytes. Hue: KV head on this chip. "
        "Shade: layer, the first is the lightest."
    )


def _draw_depth(axes: Any, layout: KVPoolLayout, block: int, kv: int, marked: int) -> None:
    """All layers of K or V: a row for each slot, a column for each bank."""
    layers = [block_tiles(layout, block, layer, kv) for layer in range(layout.layers)]
    slots = np.stack([tiles.slot for tiles in layers])
    rows = slots - slots.min()
    if layout.kind == "per_layer":  # every layer is a buffer of its own: one below the other, a row apart
        rows = rows + np.arange(layout.layers)[:, None] * (int(rows.max()) + 2)
    image = np.ones((int(rows.max()) + 1, layout.banks, 3))
    for tiles, row in zip(layers, rows, strict=True):
        for head in range(layout.heads):
            mine = tiles.head == head
            image[row[mine], tiles.bank[mine]] = _colour(head, tiles.layer, layout.layers)
    axes.imshow(image, aspect="auto", interpolation="nearest")
    axes.set_title(f"{_KV[kv]}: all {layout.layers} layers", fontsize=11)
    axes.set_xticks(range(0, layout.banks, -(-layout.banks // 9)))
    axes.set_xlabel("bank")
    step = max(1, -(-layout.layers // 10))
    shown = list(range(0, layout.layers, step))
    # Where layers lie beside each other in different banks, the first of them has the label.
    ticks = {int(rows[layer].min()): layer for layer in reversed(shown)}
    axes.set_yticks(list(ticks), [str(layer) for layer in ticks.values()])
    axes.set_ylabel("layer (down: rising address)" if kv == 0 else "")
    axes.set_xticks(np.arange(layout.banks + 1) - 0.5, minor=True)
    axes.grid(which="minor", axis="x", color="white", linewidth=2)
    axes.tick_params(which="minor", length=0)
    top, bottom = float(rows[marked].min()) - 0.5, float(rows[marked].max()) + 0.5
    first, last = float(layers[marked].bank.min()) - 0.5, float(layers[marked].bank.max()) + 0.5
    frame = ([first, last, last, first, first], [top, top, bottom, bottom, top])
    axes.plot(*frame, color="black", linewidth=1.6, clip_on=False)


def _draw_layer(axes: Any, layout: KVPoolLayout, tiles: BlockTiles) -> None:
    """One layer of K or V, tile by tile."""
    first, last = int(tiles.slot.min()), int(tiles.slot.max())
    slots = last - first + 1
    labelled, tall = slots <= _LABELLED_SLOTS, slots <= _TALL_SLOTS
    banks = range(int(tiles.bank.min()), int(tiles.bank.max()) + 1)
    size = 8.0 if len(banks) == 1 else 7.2 if tall else 6.2
    for i, (bank, slot, head) in enumerate(zip(tiles.bank, tiles.slot, tiles.head, strict=True)):
        across = [bank - 0.47, bank + 0.47, bank + 0.47, bank - 0.47]
        down = [slot - 0.44, slot - 0.44, slot + 0.44, slot + 0.44]
        axes.fill(across, down, color=_colour(int(head), layout.layers // 3, layout.layers))
        if labelled:
            tokens, dims = tiles.tokens[i] or "none", tiles.dims[i]
            if len(banks) == 1:
                text = f"head {head}, tok {tokens}, dim {dims}"
            elif tall:
                text = f"head {head}\ntok {tokens}\ndim " + dims.replace(", ", ",\n")
            else:
                text = f"h{head} t{tokens}\nd" + dims.replace(", ", ",")
            axes.text(bank, slot, text, ha="center", va="center", fontsize=size, linespacing=1.1)
    axes.set_xlim(banks[0] - 0.55, banks[-1] + 0.55)
    axes.set_ylim(last + 0.55, first - 0.55)
    axes.set_xticks(banks)
    axes.set_xlabel("bank")
    step = 1 if slots <= 16 else -(-slots // 16)
    axes.set_yticks(range(first, last + 1, step))
    axes.set_ylabel(f"slot of the bank ({layout.page_pitch:,} bytes)")
    order = ", dims in the NPU's RoPE order" if layout.tensor_layout(tiles.kv).dim_order is not None else ""
    axes.set_title(f"{_KV[tiles.kv]}, layer {tiles.layer} (framed on the left){order}", fontsize=11, loc="left")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _colour(head: int, layer: int, layers: int) -> tuple[float, float, float]:
    lightness = 0.84 - 0.46 * layer / max(1, layers - 1)
    return colorsys.hls_to_rgb(_HUES[head % len(_HUES)], lightness, 0.62)


def _ranges(numbers: NDArray[np.int64]) -> str:
    """Ascending numbers as text: 0-15, 64-79."""
    if not len(numbers):
        return ""
    parts = np.split(numbers, np.flatnonzero(np.diff(numbers) != 1) + 1)
    return ", ".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)


def _matplotlib() -> Any:
    """matplotlib's Figure, which draws without a display and without pyplot's global state."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError(
            "a picture needs matplotlib, which is not installed", fix="Run `pip install 'hawk-connector[plot]'`."
        ) from None
    return Figure
