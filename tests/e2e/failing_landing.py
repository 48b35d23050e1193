"""A landing that spoils and fails as many parcels as a file says: what a device does that loses a write."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hawk_connector.errors import TransferFailed
from hawk_connector.plan.facts import Mode
from hawk_connector.plan.segments import Segments
from tests.e2e.landing_package import install
from tt_plugin.landing import from_kv_caches as good_landing

NAME = "failing"
VARIABLE = "HAWK_TEST_FAIL_LANDINGS"
GARBAGE = 0x7F


class FailingLanding:
    """The good landing, but for ``landed``.  The file holds the number of parcels that are to fail; absent: none."""

    def __init__(self, good: Any, file: Path) -> None:
        self._good = good
        self._file = file
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._good, name)

    def landed(self, segments: Segments) -> tuple[tuple[int, int, int], ...]:
        with self._lock:
            left = int(self._file.read_text()) if self._file.exists() else 0
            if left > 0:
                self._file.write_text(str(left - 1))
        if left > 0:
            for address, length in zip(segments.local.tolist(), segments.length.tolist(), strict=True):
                ctypes.memset(address, GARBAGE, length)
            raise TransferFailed("the device lost a write")
        return tuple(self._good.landed(segments))


def from_kv_caches(kv_caches: Mapping[str, Any], mode: Mode = "hawk") -> FailingLanding:
    return FailingLanding(good_landing(kv_caches, mode), Path(os.environ[VARIABLE]))


def installed(directory: Path) -> dict[str, str]:
    """The environment in which the landing is an installed provider and reads the file ``directory/failures``."""
    return {**install(directory, NAME, "tests.e2e.failing_landing"), VARIABLE: str(directory / "failures")}
