"""The digest that binds KV to the tokens (and whatever else keys a KV block) it was computed from."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec

__all__ = ["token_digest"]


def token_digest(tokens: Sequence[int], keys: Sequence[tuple[str, str]] = ()) -> str:
    """SHA-256 over the prompt's token ids and over ``keys``: LoRA name, cache salt, multimodal hashes.

    Both sides compute it, each from its own request.  64 hex digits.
    """
    return hashlib.sha256(msgspec.msgpack.encode((list(tokens), sorted(keys)))).hexdigest()
