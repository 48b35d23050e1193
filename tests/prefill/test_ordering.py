"""The order of packs and steps on a GPU that runs its streams as unfairly as CUDA allows."""

from __future__ import annotations

import contextlib
import random
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hawk_connector.prefill.ordering import CudaOrder


class Gpu:
    """Streams and events by CUDA's rules, one operation at a time, in an order that ``seed`` chooses.

    A stream's work runs in the order in which it was queued, and streams among each other in any.  Waiting for an event
    means for what had been recorded at the time of the call.  Nothing runs before somebody waits for it; then other
    streams may run along, as it happens.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.streams: list[Stream] = []
        self.current = Stream(self)
        self.compute = self.current

    # what CudaOrder takes from torch.cuda

    def Stream(self, device: torch.device) -> Stream:
        return Stream(self)

    def Event(self, blocking: bool = False) -> Event:
        return Event(self, blocking)

    def current_stream(self, device: torch.device) -> Stream:
        return self.current

    def device(self, device: torch.device) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    # how it runs

    def run_until(self, done: Callable[[], bool]) -> None:
        while not done():
            ready = [stream for stream in self.streams if stream.ready()]
            assert ready, "the streams wait for each other"
            self._random.choice(ready).step()


class Stream:
    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._queue: deque[tuple[Callable[[], bool], Callable[[], object]]] = deque()
        gpu.streams.append(self)

    def queue(self, work: Callable[[], object], ready: Callable[[], bool] = lambda: True) -> None:
        self._queue.append((ready, work))

    def ready(self) -> bool:
        return bool(self._queue) and self._queue[0][0]()

    def step(self) -> None:
        self._queue.popleft()[1]()

    def wait_event(self, event: Event) -> None:
        recording = event.recordings
        self.queue(lambda: None, lambda: event.reached >= recording)

    def wait_stream(self, stream: Stream) -> None:
        event = Event(self._gpu, False)
        event.record(stream)
        self.wait_event(event)


class Event:
    def __init__(self, gpu: Gpu, blocking: bool) -> None:
        self._gpu, self.blocking = gpu, blocking
        self.recordings = self.reached = 0

    def record(self, stream: Stream) -> None:
        self.recordings += 1
        recording = self.recordings
        stream.queue(lambda: setattr(self, "reached", max(self.reached, recording)))

    def synchronize(self) -> None:
        assert self.blocking, "the packer's thread would spin"
        recording = self.recordings
        self._gpu.run_until(lambda: self.reached >= recording)


class Side:
    """A prefill side with one block: each step writes its number into it, and a pack copies it to ``region``."""

    def __init__(self, seed: int) -> None:
        self.gpu = Gpu(seed)
        cuda: Any = self.gpu
        self.order = CudaOrder(torch.device("cuda"), cuda)
        self.block = self.steps = 0
        self.region: list[int] = []

    def step(self) -> None:
        self.steps += 1
        number = self.steps
        self.gpu.compute.queue(lambda: setattr(self, "block", number))
        self.order.step_ended()

    def read(self) -> None:
        """What a pack queues."""
        self.gpu.current.queue(lambda: self.region.append(self.block))


@given(st.integers(0, 1 << 30), st.integers(1, 4))
@settings(max_examples=100, deadline=None)
def test_a_pack_reads_what_its_step_wrote(seed: int, steps: int) -> None:
    side = Side(seed)
    for _ in range(steps):
        side.step()
    side.order.pack(side.read)
    assert side.region == [steps]


def test_before_any_step_there_is_nothing_to_wait_for() -> None:
    side = Side(0)
    side.order.pack(side.read)
    assert side.region == [0]


def test_a_pack_does_not_wait_for_steps_after_its_own() -> None:
    """The packer is busy while the next step is queued.  That step never ends here, and the pack must."""
    side = Side(0)
    side.step()
    asked = side.order.steps_so_far()
    side.gpu.compute.queue(lambda: None, lambda: False)
    side.step()
    side.order.pack(side.read, asked)
    assert side.region == [1]


@given(st.integers(0, 1 << 30))
@settings(max_examples=100, deadline=None)
def test_steps_that_end_while_a_pack_is_being_queued(seed: int) -> None:
    """The step's thread comes between the pack's wait and its read, and again before the pack has run."""
    side = Side(seed)
    side.step()

    def work() -> None:
        side.order.step_ended()
        side.read()
        side.order.step_ended()

    side.order.pack(work, side.order.steps_so_far())
    assert side.region == [1]


@given(st.integers(0, 1 << 30), st.integers(1, 3))
@settings(max_examples=100, deadline=None)
def test_blocks_are_written_again_after_all_packs_that_read_them(seed: int, reads: int) -> None:
    """Preempted while the pack's kernels are queued, none of which has run."""
    side = Side(seed)
    side.step()

    def work() -> None:
        for _ in range(reads):
            side.read()
        # The step's thread, on its own stream.
        with side.gpu.stream(side.gpu.compute):
            side.order.blocks_reused()
            side.step()

    side.order.pack(work, side.order.steps_so_far())
    assert side.region == [1] * reads


@pytest.mark.parametrize("seed", range(20))
def test_nothing_of_a_pack_that_failed_is_under_way(seed: int) -> None:
    """Its first kernel is queued, its second cannot be."""
    side = Side(seed)
    side.step()

    def work() -> None:
        side.read()
        raise RuntimeError("no second kernel")

    with pytest.raises(RuntimeError, match="no second kernel"):
        side.order.pack(work)
    assert side.region == [1]


def test_the_packs_stream_is_not_the_steps() -> None:
    side = Side(0)
    streams: list[Stream] = []
    side.order.pack(lambda: streams.append(side.gpu.current))
    assert streams and streams[0] is not side.gpu.compute
    assert side.gpu.current is side.gpu.compute
