"""What a self-test says of itself; it runs in a process of its own, and this is what that process prints."""

from __future__ import annotations

import msgspec

__all__ = ["Report"]


class Report(msgspec.Struct, frozen=True):
    """``error``: what went wrong, empty where the bytes were right.

    ``transport``: what carried them, by what the process held open: "tcp", "rdma" or "unknown"; "local" by what that
    protocol is.  ``packer``: what packed them.  ``nbytes``, ``segments``: of the parcel.  ``elements``: how many were
    looked at in the banks.
    """

    error: str = ""
    transport: str = "unknown"
    packer: str = ""
    nbytes: int = 0
    segments: int = 0
    elements: int = 0
