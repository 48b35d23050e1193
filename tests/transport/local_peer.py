"""A process whose memory is to be read, and one that reads.

``python -m tests.transport.local_peer serve NBYTES [readable]`` prints "session address" and lives until its stdin
ends.  Its region is ``content(0, NBYTES)``.  ``... read SESSION ADDRESS NBYTES`` prints
the sum of those bytes, or the error.
"""

from __future__ import annotations

import os
import sys

import numpy as np

from hawk_connector.errors import TransferFailed
from hawk_connector.plan.segments import Segments
from hawk_connector.transport.local import LocalEngine


def content(start: int, count: int) -> np.ndarray:
    """Bytes [start, start + count) of the region; 249 is no divisor of any page, and no byte is zero."""
    return (np.arange(start, start + count, dtype=np.int64) % 249 + 1).astype(np.uint8)


def serve(nbytes: int, readable: bool) -> None:
    region = content(0, nbytes)
    engine = LocalEngine(timeout_s=5, readable=readable)
    engine.register(region.ctypes.data, nbytes)
    print(engine.session, region.ctypes.data, flush=True)
    sys.stdin.read()
    engine.close()


def read(session: str, address: int, nbytes: int, user: int | None) -> None:
    target = np.zeros(nbytes, dtype=np.uint8)
    engine = LocalEngine(timeout_s=5)
    engine.register(target.ctypes.data, nbytes)
    if user is not None:  # only now: another user may not be able to import anything
        os.setgroups([])
        os.setgid(user)
        os.setuid(user)
    columns = (address, target.ctypes.data, nbytes)
    try:
        engine.read(session, Segments(*(np.array([value], dtype=np.int64) for value in columns)))
        print(int(target.sum(dtype=np.int64)), flush=True)
    except TransferFailed as error:
        print(error, flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(int(sys.argv[2]), sys.argv[3:] == ["readable"])
    else:
        read(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]) if sys.argv[5:] else None)
