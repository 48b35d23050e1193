"""Order between vLLM's steps and packs: a pack reads after the step that wrote, compute overwrites after the pack.

On a CPU a step has run when it returns, and a pack has read when it returns: nothing is needed.  On a GPU both only
queue work, so events order the streams.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

__all__ = ["CudaOrder", "HostOrder", "StepOrder", "step_order"]


class StepOrder(Protocol):
    def step_ended(self) -> None:
        """Called on the step's thread when a step's work has been queued."""
        ...

    def steps_so_far(self) -> object:
        """The steps that have ended, to say later what a pack has to wait for.  Called on any thread."""
        ...

    def pack(self, work: Callable[[], None], after: object = None) -> None:
        """Runs a pack; returns when its bytes are in the send buffer, or nothing of it is under way any more.

        ``after``: what ``steps_so_far`` said when the pack was asked for, since steps that have ended meanwhile need
        not be waited for.  None: all steps up to now.
        """
        ...

    def blocks_reused(self) -> None:
        """Called on the step's thread before blocks that packs may be reading are written again."""
        ...


class HostOrder:
    """For a cache in host memory."""

    def step_ended(self) -> None:
        pass

    def steps_so_far(self) -> object:
        return None

    def pack(self, work: Callable[[], None], after: object = None) -> None:
        work()

    def blocks_reused(self) -> None:
        pass


class CudaOrder:
    """For a cache on a CUDA device: packs run on a stream of their own.  Not yet run on hardware.

    Every step and every pack has an event of its own.  One event for all would be recorded anew by one thread while
    another makes its stream wait for it.  A pack that is queued only after ``blocks_reused`` is not waited for: its
    generation is older than the preemption by then, and what it reads is discarded.
    """

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        """``cuda``: streams, events and contexts as ``torch.cuda`` has them."""
        self._cuda = cuda
        self._device = device
        self._stream = cuda.Stream(device)
        self._stepped: Any = None

    def step_ended(self) -> None:
        stepped = self._cuda.Event()
        stepped.record(self._cuda.current_stream(self._device))
        self._stepped = stepped

    def steps_so_far(self) -> object:
        return self._stepped

    def pack(self, work: Callable[[], None], after: object = None) -> None:
        stepped = self._stepped if after is None else after
        with self._cuda.device(self._device), self._cuda.stream(self._stream):
            if stepped is not None:
                self._stream.wait_event(stepped)
            try:
                work()
            finally:
                # After an error too: what it has queued still writes into a region that will soon be another's.
                # A blocking event sleeps where the default one would spin.
                packed = self._cuda.Event(blocking=True)
                packed.record(self._stream)
                packed.synchronize()

    def blocks_reused(self) -> None:
        self._cuda.current_stream(self._device).wait_stream(self._stream)


def step_order(device: torch.device) -> StepOrder:
    return CudaOrder(device) if device.type == "cuda" else HostOrder()
