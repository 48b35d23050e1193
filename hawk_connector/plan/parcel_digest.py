"""The digest of a parcel: 128 bits of XXH3 over the blocks that decode wants, in stream order.

Both sides compute it, prefill over the send buffer and decode over the memory that the reads wrote, so that bytes that
changed on the way are seen.  It guards against faults, not against someone who forges bytes: he could forge it too.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator

import numpy as np
import xxhash

from .parcel import ParcelPlan
from .raw_plan import RawPlan
from .segments import Segments

__all__ = ["landed_digest", "parcel_digest", "wanted_ranges"]

# Bytes that are given to the hash at once; a read of a whole parcel stays one piece, its Python loop short.
_MAX_PIECE = 1 << 30


def wanted_ranges(plan: ParcelPlan | RawPlan, skip_blocks: int) -> Iterator[tuple[int, int]]:
    """(offset, length) in bytes of what blocks ``skip_blocks`` and up have in the parcel, in rising order, disjoint."""
    if isinstance(plan, RawPlan):
        yield from plan.wanted_ranges(skip_blocks)
        return
    if not skip_blocks:
        if plan.nbytes:
            yield 0, plan.nbytes
        return
    pitch = plan.layout.page_pitch
    for share in plan.shares:
        for first_row, count in zip(plan.class_rows(share), plan.pages(share).class_rows, strict=True):
            length = (plan.blocks - skip_blocks) * count * pitch
            if length > 0:
                for pool in range(plan.layout.pools):
                    yield (first_row + (pool * plan.blocks + skip_blocks) * count) * pitch, length


def parcel_digest(plan: ParcelPlan | RawPlan, skip_blocks: int, piece: Callable[[int, int], memoryview]) -> str:
    """The digest, 32 hex digits.  ``piece(offset, length)`` gives bytes of the parcel."""
    state = xxhash.xxh3_128()
    for offset, length in wanted_ranges(plan, skip_blocks):
        for start in range(offset, offset + length, _MAX_PIECE):
            state.update(piece(start, min(_MAX_PIECE, offset + length - start)))
    return state.hexdigest()


def landed_digest(plan: ParcelPlan | RawPlan, skip_blocks: int, region: int, segments: Segments) -> str:
    """The digest of the parcel at remote address ``region`` as its reads left it in local memory.

    ``segments`` cover at least the wanted blocks; their local ranges are addresses in this process.
    Raises ValueError where they do not cover them.
    """
    order = np.argsort(segments.remote, kind="stable")
    starts = (segments.remote[order] - region).tolist()
    locals_, lengths = segments.local[order].tolist(), segments.length[order].tolist()
    state = xxhash.xxh3_128()
    at = 0
    for offset, length in wanted_ranges(plan, skip_blocks):
        end = offset + length
        while offset < end:
            while at < len(starts) and starts[at] + lengths[at] <= offset:
                at += 1
            if at == len(starts) or starts[at] > offset:
                raise ValueError(f"no read covers byte {offset} of the parcel")
            inside = offset - starts[at]
            count = min(lengths[at] - inside, end - offset)
            state.update((ctypes.c_ubyte * count).from_address(locals_[at] + inside))
            offset += count
    return state.hexdigest()
