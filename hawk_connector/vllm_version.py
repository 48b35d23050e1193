"""Which vLLM HAWK works with.  Imports nothing of vLLM but its version, so that it can speak before anything breaks."""

from __future__ import annotations

import vllm

from .errors import UnsupportedError
from .vllm_range import NEWEST, OLDEST, minor_of

__all__ = ["check_version"]


def check_version(version: str | None = None) -> None:
    """Refuses a vLLM that is too old; a newer one than was ever tested is the user's risk, not an error."""
    found = vllm.__version__ if version is None else version
    minor = minor_of(found)
    if minor is not None and minor < OLDEST:
        raise UnsupportedError(
            "this vLLM",
            reason="its connector interface and KV cache layouts are older than HAWK's",
            expected=f"vLLM {OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}",
            got=f"vLLM {found}",
            fix="Upgrade vLLM.",
        )
