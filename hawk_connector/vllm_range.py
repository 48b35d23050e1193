"""Which vLLM HAWK is made for.  Without vLLM, for those who ask about an installation."""

from __future__ import annotations

__all__ = ["NEWEST", "OLDEST", "Minor", "minor_of"]

Minor = tuple[int, int]

OLDEST: Minor = (0, 24)
NEWEST: Minor = (0, 33)


def minor_of(version: str) -> Minor | None:
    """(0, 32) of "0.32.1+cpu"; None where the version does not begin with two numbers."""
    parts = version.split("+")[0].split(".")
    if len(parts) >= 2 and parts[0].isdecimal() and parts[1].isdecimal():
        return int(parts[0]), int(parts[1])
    return None
