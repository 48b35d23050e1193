"""Tally: what a landing has brought to each bank, and with how many device calls."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from hawk_connector.layout.kv_pool import KVPoolLayout

__all__ = ["LandingCounts", "Tally"]


@dataclass(frozen=True, slots=True)
class LandingCounts:
    """Since the start.  ``parcels``: landed.  ``staged``: of these, the ones that went through stages.
    ``device_writes``: writes of runs of bytes from the host.  ``copies``: copies inside the device."""

    parcels: int = 0
    staged: int = 0
    device_writes: int = 0
    copies: int = 0


class Tally:
    """Thread-safe: parcels end on the threads that read them."""

    def __init__(self, layout: KVPoolLayout) -> None:
        self._banks = layout.banks
        self._fill = np.zeros(layout.chips * layout.banks, dtype=np.int64)
        self._counts = LandingCounts()
        self._lock = threading.Lock()

    def landed(
        self,
        channel: NDArray[np.int64],
        nbytes: NDArray[np.int64],
        *,
        staged: bool = False,
        device_writes: int = 0,
        copies: int = 0,
    ) -> tuple[tuple[int, int, int], ...]:
        """A parcel of which ``nbytes[i]`` went to ``channel[i]`` (chip * banks + bank): (chip, bank, bytes) of each
        bank that got any."""
        landed = np.zeros_like(self._fill)
        np.add.at(landed, channel, nbytes)
        with self._lock:
            self._fill += landed
            counts = self._counts
            self._counts = replace(
                counts,
                parcels=counts.parcels + 1,
                staged=counts.staged + staged,
                device_writes=counts.device_writes + device_writes,
                copies=counts.copies + copies,
            )
        return tuple((*divmod(int(c), self._banks), int(landed[c])) for c in np.flatnonzero(landed))

    def fill(self) -> tuple[int, ...]:
        """Bytes landed in each (chip, bank), chip by chip."""
        with self._lock:
            return tuple(int(count) for count in self._fill)

    @property
    def counts(self) -> LandingCounts:
        with self._lock:
            return self._counts
