"""A process that serves one region through Mooncake.

It prints "session address" and lives until its stdin ends. Byte i of the region is i % 251 + 1, so that no
byte is zero.
"""

from __future__ import annotations

import sys

import numpy as np

from hawk_connector.transport.mooncake import MooncakeEngine


def content(start: int, count: int) -> np.ndarray:
    """Bytes [start, start + count) of the region."""
    return (np.arange(start, start + count, dtype=np.uint32) % 251 + 1).astype(np.uint8)


if __name__ == "__main__":
    region = content(0, int(sys.argv[1]))
    engine = MooncakeEngine("127.0.0.1", protocol="tcp", timeout_s=5)
    engine.register(region.ctypes.data, region.nbytes)
    print(engine.session, region.ctypes.data, flush=True)
    sys.stdin.read()
    engine.close()
