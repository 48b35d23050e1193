"""A landing that holds every parcel while a file is there: what a device does that is slow to take its bytes."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hawk_connector.errors import TransferFailed
from hawk_connector.plan.facts import Mode
from hawk_connector.plan.segments import Segments
from tests.e2e.landing_package import install
from tt_plugin.landing import from_kv_caches as good_landing

NAME = "waiting"
VARIABLE = "HAWK_TEST_HOLD_LANDINGS"
PATIENCE_S = 100.0


class WaitingLanding:
    """The good landing, but that ``landed`` does not begin before the file is gone."""

    def __init__(self, good: Any, file: Path) -> None:
        self._good = good
        self._file = file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._good, name)

    def landed(self, segments: Segments) -> tuple[tuple[int, int, int], ...]:
        deadline = time.monotonic() + PATIENCE_S
        while self._file.exists():
            if time.monotonic() > deadline:
                raise TransferFailed("nobody let the landing go on")
            time.sleep(0.01)
        return tuple(self._good.landed(segments))


def from_kv_caches(kv_caches: Mapping[str, Any], mode: Mode = "hawk") -> WaitingLanding:
    return WaitingLanding(good_landing(kv_caches, mode), Path(os.environ[VARIABLE]))


def installed(directory: Path) -> tuple[dict[str, str], Path]:
    """The environment in which the landing is an installed provider, and the file that holds its parcels."""
    file = directory / "hold"
    return {**install(directory, NAME, "tests.e2e.waiting_landing"), VARIABLE: str(file)}, file
