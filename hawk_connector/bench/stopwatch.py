"""Clocks and plain copies of a device: the host's own, or CUDA's events and the card's copy bandwidth."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import numpy as np
import torch

__all__ = ["Copier", "Stopwatch", "device_name", "stopwatch"]

# Larger than any GPU's caches, and 8 GiB of writes: two milliseconds at 4 TB/s.
_OTHER_BYTES = 256 << 20
_OTHER_TIMES = 32


class Stopwatch(Protocol):
    def seconds(self, work: Callable[[], object]) -> float:
        """How long ``work`` takes on the device."""
        ...


class HostStopwatch:
    def seconds(self, work: Callable[[], object]) -> float:
        begun = time.perf_counter()
        work()
        return time.perf_counter() - begun


class CudaStopwatch:
    """Two events around what ``work`` queues: the GPU's time alone.

    Before them the GPU is given milliseconds of other work.  So the host has queued all of ``work`` when the GPU comes
    to it, and what was in the GPU's caches is no more.
    """

    def __init__(self, device: torch.device) -> None:
        self._other = torch.empty(_OTHER_BYTES, dtype=torch.uint8, device=device)

    def seconds(self, work: Callable[[], object]) -> float:
        begun, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        for _ in range(_OTHER_TIMES):
            self._other.fill_(0)
        begun.record()
        work()
        ended.record()
        ended.synchronize()
        return float(begun.elapsed_time(ended)) / 1e3


def stopwatch(device: torch.device) -> Stopwatch:
    return CudaStopwatch(device) if device.type == "cuda" else HostStopwatch()


def device_name(device: torch.device) -> str:
    return str(torch.cuda.get_device_name(device)) if device.type == "cuda" else "cpu"


class Copier:
    """Copies ``source`` (uint8) to memory of its own, on the host with ``threads`` threads, each an equal part."""

    def __init__(self, source: torch.Tensor, threads: int) -> None:
        self._source = source
        self._target = torch.zeros_like(source)
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads) if threads > 1 else None

    def copy(self) -> None:
        if self._source.device.type != "cpu":
            self._target.copy_(self._source)
            return
        source, target = self._source.numpy(), self._target.numpy()
        if self._pool is None:
            np.copyto(target, source)
            return
        cuts = [len(source) * part // self._threads for part in range(self._threads + 1)]
        parts = [slice(cuts[part], cuts[part + 1]) for part in range(self._threads)]
        list(self._pool.map(lambda part: np.copyto(target[part], source[part]), parts))
