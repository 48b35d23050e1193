"""Landing: where pulled bytes come to rest on the decode side.

A device package offers a landing through the entry-point group ``hawk_connector.landings``: a callable that takes
the KV caches that vLLM registered (layer name -> the platform's handle) and the mode (hawk or host) and returns a
Landing.  Nothing here imports vLLM, torch or a device package, so that a bare device process can use it too.  Mode
direct needs no package: it lands in vLLM's own caches (``cache_landing``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import entry_points
from typing import Any, Protocol

from ..errors import ConfigError
from ..layout.cache_layout import CacheLayout
from ..layout.kv_pool import KVPoolLayout
from ..plan.any_plan import Plan
from ..plan.facts import Mode
from ..plan.segments import Segments

__all__ = ["LANDINGS", "Landing", "LandingProvider", "landing_provider"]

LANDINGS = "hawk_connector.landings"


class Landing(Protocol):
    """Where a parcel's bytes go, and what must happen before they count as landed."""

    @property
    def layout(self) -> KVPoolLayout | CacheLayout: ...

    @property
    def num_blocks(self) -> int:
        """Blocks of each pool."""
        ...

    def regions(self) -> Sequence[tuple[int, int]]:
        """(address, length) of the host-addressable memory that reads may write: to be registered."""
        ...

    def segments(self, plan: Plan, region: int, block_ids: Sequence[int], skip_blocks: int) -> Segments:
        """Reads that fetch the parcel at remote address ``region`` for decode's ``block_ids``.

        LocalError where the plan is none of this landing's kind, or of another layout.
        Called on a reader's thread.  A landing that needs room for the parcel reserves it here, and waits for it no
        longer than its own deadline (then CapacityError).  What it reserves is held until ``landed`` has returned,
        or else until ``release``.
        """
        ...

    def landed(self, segments: Segments) -> tuple[tuple[int, int, int], ...]:
        """Called after the reads of ``segments`` have ended well, before the parcel counts as landed.

        Returns (chip, bank, bytes) for every bank that got any.  A direct path flushes its windows here; raises
        TransferFailed where the bytes cannot be vouched for.
        """
        ...

    def release(self, segments: Segments) -> None:
        """Called once no byte of ``segments`` can arrive any more, where they failed or their landing did.

        Memory that was reserved for them may be used again.
        """
        ...

    def fill(self) -> tuple[int, ...]:
        """Bytes landed so far in each (chip, bank), chip by chip."""
        ...


LandingProvider = Callable[[Mapping[str, Any], Mode], Landing]


def landing_provider(name: str | None) -> LandingProvider:
    """The installed provider called ``name``, or the only one.  ConfigError says which are installed."""
    found = {entry.name: entry for entry in entry_points(group=LANDINGS)}
    if name is None and len(found) == 1:
        name = next(iter(found))
    if name is None or name not in found:
        known = ", ".join(sorted(found)) or "none"
        raise ConfigError(
            f"landing: expected one of the installed landing providers ({known}), got {name!r}; "
            "install the device's package (tt_plugin comes with hawk-connector) or name one in 'landing'"
        )
    provider: LandingProvider = found[name].load()
    return provider
