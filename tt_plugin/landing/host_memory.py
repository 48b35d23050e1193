"""Memory of this process that reads end in."""

from __future__ import annotations

import mmap

import numpy as np
from numpy.typing import NDArray

from hawk_connector.errors import CapacityError

__all__ = ["host_memory"]


def host_memory(nbytes: int) -> NDArray[np.uint8]:
    """Page-aligned host memory, zeros at first.  CapacityError where there is none."""
    try:
        mapping = mmap.mmap(-1, nbytes)
    except (OSError, ValueError) as error:
        raise CapacityError(
            "cannot map the bounce buffer",
            expected=f"{nbytes} bytes of memory",
            got=str(error),
            fix="Lower tt_plugin.landing.bounce_buffer_bytes.",
        ) from error
    return np.frombuffer(mapping, dtype=np.uint8)
