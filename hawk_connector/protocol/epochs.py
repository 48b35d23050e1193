"""Random identities: epochs of process lives, transfer ids, claim nonces."""

from __future__ import annotations

import secrets
from collections.abc import Callable

__all__ = ["IdSource", "random_id"]

IdSource = Callable[[], str]


def random_id() -> str:
    """128 random bits as 32 hex digits: not to be guessed, not to be met twice."""
    return secrets.token_hex(16)
