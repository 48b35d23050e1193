"""The file that `--json` writes: a header, the rows, and the ratios that were shown or refused."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from hawk_connector.errors import LocalError

from .machine import machine
from .rounds import TOO_WIDE, Ratio

__all__ = ["Ratios", "write_json"]

# (what it is of: the columns that the two contestants share, ratio)
Ratios = Sequence[tuple[Mapping[str, Any], Ratio]]

_RULE = (
    "median of the rounds' ratios; null where the quartiles are further apart than its distance from 1 and than "
    f"{TOO_WIDE:g} of it"
)


def write_json(
    file: Path, bench: str, settings: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], ratios: Ratios, started: str
) -> None:
    """``settings``: of the run.  ``started``: when it began, ISO 8601.  LocalError where the file cannot be written."""
    content = {
        "bench": bench,
        "started": started,
        "command": shlex.join(["hawk", *sys.argv[1:]]),
        "machine": machine(),
        "settings": settings,
        "rows": rows,
        "ratio_rule": _RULE,
        "ratios": [{**about, **asdict(ratio)} for about, ratio in ratios],
    }
    try:
        file.write_bytes(msgspec.json.format(msgspec.json.encode(content), indent=2) + b"\n")
    except OSError as error:
        raise LocalError(f"cannot write {file}: {error.strerror}") from None
