"""Order between vLLM's steps and packs: a pack reads after the step that wrote, compute overwrites after the pack.

On a CPU a step has run when it returns, and a pack has read when it returns: nothing is needed.  On a GPU both only
queue work, so events order the streams.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

__all__ = ["CudaOrder", "HostOrder", "StepOrder", "step_order"]


class StepOrder(Protocol):
    def step_ended(self) -> None:
        """Called on the step's thread when a step's work has been queued."""
        ...

    def pack(self, work: Callable[[], None]) -> None:
        """Runs a pack after the steps so far; returns when its bytes are in the send buffer."""
        ...

    def blocks_reused(self) -> None:
        """Called on the step's thread before blocks that packs may be reading are written again."""
        ...


class HostOrder:
    """For a cache in host memory."""

    def step_ended(self) -> None:
        pass

    def pack(self, work: Callable[[], None]) -> None:
        work()

    def blocks_reused(self) -> None:
        pass


class CudaOrder:
    """For a cache on a CUDA device: packs run on a stream of their own.  Not yet run on hardware."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._stepped = torch.cuda.Event()
        self._packed = torch.cuda.Event()

    def step_ended(self) -> None:
        self._stepped.record(torch.cuda.current_stream(self._device))

    def pack(self, work: Callable[[], None]) -> None:
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self._stream.wait_event(self._stepped)
            work()
            self._packed.record(self._stream)
        self._packed.synchronize()

    def blocks_reused(self) -> None:
        torch.cuda.current_stream(self._device).wait_stream(self._stream)


def step_order(device: torch.device) -> StepOrder:
    return CudaOrder(device) if device.type == "cuda" else HostOrder()
