"""BankIndex: in which bank a host address lies, where banks are host memory or windows."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hawk_connector.errors import LocalError
from hawk_connector.plan.segments import PoolPlacement, Segments

__all__ = ["BankIndex"]


class BankIndex:
    """Over the banks of a placement, each ``length`` bytes from its origin on."""

    def __init__(self, placement: PoolPlacement, length: int) -> None:
        origins = placement.flat_origins
        self._order = np.argsort(origins)
        self._origins = origins[self._order]
        self._length = length

    def find(self, segments: Segments) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """For each segment its channel (chip * banks + bank), and the address in the bank at which it ends.

        LocalError where one does not lie in one bank.
        """
        index = np.searchsorted(self._origins, segments.local, side="right") - 1
        end = segments.local + segments.length - self._origins[index]
        if segments.count and (index.min() < 0 or end.max() > self._length):
            raise LocalError(
                "segments ended outside the device's banks",
                expected=f"addresses inside {len(self._origins)} banks of {self._length} bytes",
                got=f"{int(segments.local.min()):#x}..{int((segments.local + segments.length).max()):#x}",
            )
        return self._order[index], end
