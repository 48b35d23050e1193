"""The demo's figures as tables, as one line, and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import msgspec
from rich import box
from rich.table import Table
from rich.text import Text

from hawk_connector.cli.demo_client import Answer
from hawk_connector.cli.demo_compare import TIE, Agreement
from hawk_connector.cli.demo_prompts import NEW_TOKENS, Prompt
from hawk_connector.cli.demo_sides import Movement
from hawk_connector.metrics import TransferReport

_LEVELS = "▁▂▃▄▅▆▇█"
# So that the whole table has less than 100: rich would rather narrow the figures than the text.
_TEXT_COLUMNS = 17

CAPTION = (
    "same: tokens that are one instance's at the same place. first diff.: tokens before the first that is not. "
    "MB: 10^6 bytes of KV that the decode side read, a segment being one read. pack: re-ordering on the prefill "
    "side. pull: reading; parcels are read side by side and are added up here. hand-over: from the end of the "
    "prompt's computation to the landing of its KV: the router, the queues, and what of pack and pull was left to "
    "do. per bank: how this prompt's bytes fill the NPU's banks, and MB in each."
)


@dataclass(frozen=True, slots=True)
class Row:
    """One prompt's outcome. ``must_equal``: whether a difference from the reference is a failure."""

    prompt: Prompt
    answer: Answer
    agreement: Agreement
    movement: Movement
    must_equal: bool

    @property
    def problem(self) -> str:
        """What did not hold; "" when everything did."""
        if self.must_equal and not self.agreement.holds:
            return f"differs from one instance at token {self.agreement.before_difference} and it is no tie"
        return self.movement.problem


@dataclass(frozen=True, slots=True)
class Phase:
    """All prompts with one kind of pool. ``held``: what was still held at its end."""

    kv_dtype: str
    rows: tuple[Row, ...]
    held: tuple[str, ...]

    @property
    def must_equal(self) -> bool:
        return any(row.must_equal for row in self.rows)

    @property
    def problems(self) -> list[str]:
        """A line for everything that did not hold."""
        found = [
            f"{self.kv_dtype}, prompt {number} ({row.answer.prompt_tokens} tokens, {row.prompt.kind}): {row.problem}"
            for number, row in enumerate(self.rows, 1)
            if row.problem
        ]
        return found + [f"{self.kv_dtype}: still held when idle: {what}" for what in self.held]

    @property
    def nbytes(self) -> int:
        return sum(row.movement.decode.wire_bytes for row in self.rows if row.movement.decode is not None)

    @property
    def segments(self) -> int:
        return sum(row.movement.decode.segments for row in self.rows if row.movement.decode is not None)


def phase_table(phase: Phase) -> Table:
    """The table of one phase, for some 100 columns."""
    table = Table(
        title=f"{phase.kv_dtype} pools, {NEW_TOKENS} tokens each, through the router",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=0,
        show_edge=False,
        caption_justify="left",
    )
    table.add_column("prompt\ntokens", justify="right", no_wrap=True)
    table.add_column("sent as", no_wrap=True)
    table.add_column("answer begins", no_wrap=True)
    if phase.must_equal:
        table.add_column("equal", no_wrap=True)
    else:
        table.add_column("same", justify="right", no_wrap=True)
        table.add_column("first\ndiff.", justify="right", no_wrap=True)
    for header in ("MB", "seg-\nments", "kB\neach", "pack\nms", "pull\nms", "hand-\nover ms"):
        table.add_column(header, justify="right", no_wrap=True)
    table.add_column("per bank", no_wrap=True)
    for row in phase.rows:
        table.add_row(*_cells(row))
    return table


def _cells(row: Row) -> list[Text | str]:
    prefill, decode = row.movement.prefill, row.movement.decode
    moved = decode if decode is not None and decode.segments else None
    return [
        str(row.answer.prompt_tokens),
        row.prompt.kind,
        Text(beginning(row.answer.text)),
        *_verdict(row),
        "-" if moved is None else f"{moved.wire_bytes / 1e6:.1f}",
        "-" if moved is None else str(moved.segments),
        "-" if moved is None else f"{moved.wire_bytes / moved.segments / 1e3:.0f}",
        _milliseconds(prefill.pack_s if prefill is not None else None),
        _milliseconds(decode.pull_s if decode is not None else None),
        _milliseconds(row.movement.handover_s),
        "-" if moved is None else bank_fill(moved),
    ]


def beginning(text: str) -> str:
    """The first words of ``text`` in one line of _TEXT_COLUMNS; its line breaks as a sign."""
    line = "".join(letter if letter.isprintable() else " " for letter in text.strip().replace("\n", "⏎"))
    return line if len(line) <= _TEXT_COLUMNS else line[: _TEXT_COLUMNS - 1] + "…"


def _verdict(row: Row) -> list[Text | str]:
    agreement = row.agreement
    if not row.must_equal:
        first = agreement.first_difference
        return [f"{agreement.same}/{agreement.total}", "none" if first is None else str(first)]
    if agreement.first_difference is None:
        return [Text("yes", style="green")]
    if agreement.tie:
        return [Text(f"tie at {agreement.first_difference}", style="yellow")]
    return [Text(f"NO at {agreement.first_difference}", style="bold red")]


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.0f}"


def bank_fill(report: TransferReport) -> str:
    """A bar for each bank, the fullest being full, and the banks' MB (least to most where they differ)."""
    fill = {(chip, bank): nbytes for chip, bank, nbytes in report.bank_fill}
    if not fill:
        return "-"
    chips, banks = (1 + max(place[axis] for place in fill) for axis in (0, 1))
    counts = [fill.get((chip, bank), 0) for chip in range(chips) for bank in range(banks)]
    most = max(counts)
    bars = "".join(" " if not n else _LEVELS[-(-n * len(_LEVELS) // most) - 1] for n in counts)
    low, high = f"{min(counts) / 1e6:.2f}", f"{most / 1e6:.2f}"
    return f"{bars} {high if low == high else f'{low}-{high}'}"


def tie_lines(phase: Phase) -> list[str]:
    """A line for each answer that differs from a tie on."""
    return [
        f"prompt {number}: tie at token {row.agreement.first_difference}: the one instance's two best tokens there "
        f"lie within {TIE:g}, so what follows may differ"
        for number, row in enumerate(phase.rows, 1)
        if row.must_equal and row.agreement.tie
    ]


def summary(phases: Sequence[Phase], seconds: float) -> str:
    """Everything in one line."""
    parts = []
    for phase in phases:
        count = len(phase.rows)
        if phase.must_equal:
            good = sum(1 for row in phase.rows if row.agreement.holds)
            ties = sum(1 for row in phase.rows if row.agreement.tie)
            parts.append(
                f"{good}/{count} equal to one instance" + (f" ({ties} from a tie on not compared)" if ties else "")
            )
        else:
            same = sum(row.agreement.same for row in phase.rows)
            total = sum(row.agreement.total for row in phase.rows)
            parts.append(f"{phase.kv_dtype}: {same} of {total} tokens the same")
    nbytes, segments = sum(phase.nbytes for phase in phases), sum(phase.segments for phase in phases)
    each = f" of {nbytes / segments / 1e3:.1f} kB" if segments else ""
    parts.append(f"{nbytes / 1e6:.1f} MB moved in {segments:,} segments{each}")
    idle = not any(phase.held for phase in phases)
    parts.append("nothing held at the end" if idle else "NOT everything was released")
    return "; ".join(parts) + f"; {seconds:.0f} s"


def as_json(phases: Sequence[Phase], seconds: float) -> bytes:
    """All figures, indented."""
    data = {
        "seconds": round(seconds, 1),
        "problems": [problem for phase in phases for problem in phase.problems],
        "phases": [
            {"kv_dtype": phase.kv_dtype, "held": phase.held, "prompts": [_row_data(row) for row in phase.rows]}
            for phase in phases
        ],
    }
    return msgspec.json.format(msgspec.json.encode(data), indent=2) + b"\n"


def _row_data(row: Row) -> dict[str, Any]:
    return {
        "prompt_tokens": row.answer.prompt_tokens,
        "kind": row.prompt.kind,
        "text": row.answer.text,
        "tokens": row.answer.tokens,
        "agreement": asdict(row.agreement),
        "prefill": row.movement.prefill,
        "decode": row.movement.decode,
        "handover_s": row.movement.handover_s,
        "problem": row.problem,
    }
