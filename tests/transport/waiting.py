"""Waiting in tests: for a condition, with a deadline that fails the test."""

from __future__ import annotations

import time
from collections.abc import Callable


def eventually(condition: Callable[[], bool], what: str, deadline_s: float = 20.0) -> None:
    """Return once ``condition`` holds; raises AssertionError after ``deadline_s``."""
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, f"did not happen within {deadline_s:g} s: {what}"
        time.sleep(0.002)
