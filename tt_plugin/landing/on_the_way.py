"""Parcels that have come, or are coming, into a landing's host memory."""

from __future__ import annotations

import threading
from typing import Generic, TypeVar

from hawk_connector.errors import LocalError
from hawk_connector.plan.segments import Segments

__all__ = ["OnTheWay"]

Parcel = TypeVar("Parcel")


class OnTheWay(Generic[Parcel]):
    """By the host address at which a parcel's first segment ends, which no other has while it is here.

    ``what``: the memory's name, for the text of errors.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._parcels: dict[int, Parcel] = {}
        self._lock = threading.Lock()

    def put(self, address: int, parcel: Parcel) -> None:
        with self._lock:
            self._parcels[address] = parcel

    def find(self, segments: Segments) -> Parcel:
        """The parcel that these bring.  LocalError where there is none."""
        return self._of(segments, remove=False)

    def take(self, segments: Segments) -> Parcel:
        """The same, and it is here no longer."""
        return self._of(segments, remove=True)

    def _of(self, segments: Segments, *, remove: bool) -> Parcel:
        address = int(segments.local[0])
        with self._lock:
            parcel = self._parcels.pop(address, None) if remove else self._parcels.get(address)
        if parcel is None:
            raise LocalError(
                f"segments that are not on their way through the {self._what}",
                expected="each parcel landed or released once",
                got=f"address {address:#x}",
            )
        return parcel
