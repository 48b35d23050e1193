"""Mode direct: reads end in vLLM's own cache, whose blocks are kept as the prefill side keeps its.

Whole blocks move, so rows past the last token hold whatever the prefill side's block held: vLLM attends to no row past
a request's tokens, and writes each before it does.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from ..errors import LocalError
from ..layout.cache_layout import CacheLayout, CacheMemory
from ..plan.any_plan import Plan
from ..plan.block_plan import BlockPlan, block_segments
from ..plan.segments import Segments

__all__ = ["CacheLanding"]


class CacheLanding:
    """Lands in ``memory``, which stays mapped until the engines that it is registered with are closed."""

    def __init__(self, memory: CacheMemory) -> None:
        self._memory = memory
        self._landed = 0
        self._lock = threading.Lock()

    @property
    def layout(self) -> CacheLayout:
        return self._memory.layout

    @property
    def num_blocks(self) -> int:
        """Of vLLM's blocks."""
        return self._memory.num_blocks // self.layout.split

    def regions(self) -> Sequence[tuple[int, int]]:
        return self._memory.regions

    def segments(self, plan: Plan, region: int, block_ids: Sequence[int], skip_blocks: int) -> Segments:
        """One read for each run of blocks that are neighbours on both sides, in each layer."""
        if not isinstance(plan, BlockPlan) or plan.layout != self.layout:
            raise LocalError("the parcel is of another cache", expected=repr(self.layout), got=repr(plan))
        return block_segments(plan, self._memory, block_ids, skip_blocks)

    def landed(self, segments: Segments) -> tuple[tuple[int, int, int], ...]:
        """A cache is one bank of one chip."""
        nbytes = segments.nbytes
        with self._lock:
            self._landed += nbytes
        return ((0, 0, nbytes),) if nbytes else ()

    def release(self, segments: Segments) -> None:
        """Nothing is reserved for a read: its blocks are its request's."""

    def fill(self) -> tuple[int, ...]:
        with self._lock:
            return (self._landed,)
