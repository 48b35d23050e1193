"""Reads and fences on the reader's threads: engines are made when needed, and dropped before anyone hears of it."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from hawk_connector.decode.reader import Reader, ReadResult
from hawk_connector.errors import LocalError, TransferFailed
from hawk_connector.layout.kv_pool import KVPoolLayout
from hawk_connector.plan.parcel import ParcelPlan
from hawk_connector.plan.segments import Segments
from hawk_connector.protocol.decode_actions import Read
from hawk_connector.transport.engine import TransferEngine
from hawk_connector.transport.memory import Fail, Hang, MemoryFabric
from tests.transport.waiting import eventually

LAYOUT = KVPoolLayout("cross_layer", 1, 1, 1, 32, 32, "bfp8", 8, 64)
PLAN = ParcelPlan(LAYOUT, (), 1)
SIZE = 4096


class FlatLanding:
    """A landing of one region: a parcel is SIZE bytes in two segments, block b at b * SIZE."""

    def __init__(self) -> None:
        self.memory = np.zeros(8 * SIZE, dtype=np.uint8)
        self.refuse_landing: Exception | None = None
        self.refuse_release: Exception | None = None
        self.released: list[list[int]] = []

    layout = LAYOUT
    num_blocks = 8

    def regions(self) -> Sequence[tuple[int, int]]:
        return [(self.memory.ctypes.data, self.memory.nbytes)]

    def segments(self, plan: ParcelPlan, region: int, block_ids: Sequence[int], skip_blocks: int) -> Segments:
        half = np.array([0, SIZE // 2], dtype=np.int64)
        start = self.memory.ctypes.data + block_ids[0] * SIZE
        return Segments(region + half, start + half, np.full(2, SIZE // 2, dtype=np.int64))

    def landed(self, segments: Segments) -> tuple[tuple[int, int, int], ...]:
        if self.refuse_landing is not None:
            raise self.refuse_landing
        return ((0, 3, segments.nbytes),)

    def release(self, segments: Segments) -> None:
        if self.refuse_release is not None:
            raise self.refuse_release
        self.released.append(segments.local.tolist())

    def fill(self) -> tuple[int, ...]:
        return ()

    def block(self, number: int) -> bytes:
        return self.memory[number * SIZE : (number + 1) * SIZE].tobytes()


class World:
    def __init__(self) -> None:
        self.fabric = MemoryFabric()
        self.source = np.arange(2 * SIZE, dtype=np.uint32).astype(np.uint8)
        self.serving = self.fabric.engine()
        self.serving.register(self.source.ctypes.data, self.source.nbytes)
        self.landing = FlatLanding()
        self.engines: list[TransferEngine] = []
        self.segments_a_batch = 1024
        self.results: queue.Queue[ReadResult] = queue.Queue()
        self.fenced: queue.Queue[str] = queue.Queue()
        self.reader = Reader(self.landing, self.make, 2, self.results.put, self.fenced.put, time.monotonic)

    def make(self) -> TransferEngine:
        engine = self.fabric.engine(timeout_s=60, max_segments_per_batch=self.segments_a_batch)
        self.engines.append(engine)
        return self.engines[-1]

    def read(self, number: int, address: str = "p:1", block: int = 1, session: str | None = None) -> None:
        target = session or self.serving.session
        self.reader.read(Read(number, "r", address, target, self.source.ctypes.data, PLAN, (block,), 0))


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.fabric.release_hung()
    made.reader.close()


def test_a_read_lands_and_says_what_it_moved(world: World) -> None:
    world.read(7, block=2)
    result = world.results.get(timeout=30)
    assert (result.read.id, result.ok, result.nbytes, result.segments, result.fill) == (
        7,
        True,
        SIZE,
        2,
        ((0, 3, SIZE),),
    )
    assert world.landing.block(2) == world.source[:SIZE].tobytes()


def test_one_engine_for_each_prefill_rank(world: World) -> None:
    for number, address in enumerate(("p:1", "p:2", "p:1", "p:2")):
        world.read(number, address)
        assert world.results.get(timeout=30).ok
    assert len(world.engines) == 2


def test_a_failed_read_is_told_with_its_reason_and_nothing_is_retried(world: World) -> None:
    world.fabric.inject(Fail(after_segments=1))
    world.read(1)
    result = world.results.get(timeout=30)
    assert not result.ok
    assert "failed after 1 of 2 segments" in result.reason
    assert len(world.fabric.records) == 1
    assert not world.engines[0].closed


def test_the_fence_drops_the_engine_before_it_is_told(world: World) -> None:
    world.fabric.inject(Fail(late=True))
    world.read(1)
    assert not world.results.get(timeout=30).ok
    world.reader.fence("p:1")
    assert world.fenced.get(timeout=30) == "p:1"
    assert world.engines[0].closed
    assert world.fabric.release_late() == 0
    assert world.landing.block(1) == bytes(SIZE)
    world.read(2)
    assert world.results.get(timeout=30).ok
    assert len(world.engines) == 2


def test_what_a_failed_read_reserved_is_released_by_the_fence_and_not_before(world: World) -> None:
    start = world.landing.memory.ctypes.data
    world.fabric.inject(Fail(after_segments=1))
    world.read(1, block=1)
    assert not world.results.get(timeout=30).ok
    world.landing.refuse_landing = LocalError("the device does not answer")
    world.read(2, block=3)
    assert not world.results.get(timeout=30).ok
    world.landing.refuse_landing = None
    world.read(3, block=5)
    assert world.results.get(timeout=30).ok
    assert world.landing.released == []
    world.reader.fence("p:1")
    assert world.fenced.get(timeout=30) == "p:1"
    half = SIZE // 2
    assert world.landing.released == [[start + b * SIZE, start + b * SIZE + half] for b in (1, 3)]


def test_a_landing_that_takes_nothing_back_holds_up_no_fence_and_no_report(world: World) -> None:
    world.landing.refuse_release = LocalError("not on their way")
    world.fabric.inject(Fail(after_segments=1))
    world.read(1)
    assert not world.results.get(timeout=30).ok
    world.reader.fence("p:1")
    assert world.fenced.get(timeout=30) == "p:1"
    world.segments_a_batch = 1
    world.fabric.inject(Hang())
    world.read(2)
    eventually(lambda: world.fabric.faults_left == 0, "its batch hangs")
    world.reader.stop(2)
    world.fabric.release_hung()
    assert world.results.get(timeout=30).stopped


def test_a_stopped_read_ends_between_two_batches_and_its_memory_is_free_at_once(world: World) -> None:
    """Two segments, one a batch; the first hangs while nobody wants the read any more."""
    world.segments_a_batch = 1
    world.fabric.inject(Hang())
    world.read(1, block=2)
    eventually(lambda: world.fabric.faults_left == 0, "its batch hangs")
    world.reader.stop(1)
    assert world.landing.released == []
    world.fabric.release_hung()
    result = world.results.get(timeout=30)
    assert (result.ok, result.stopped) == (False, True)
    # The batch that ran has ended well, the other never began.
    assert [record.ok for record in world.fabric.records] == [True]
    half = world.landing.memory.ctypes.data + 2 * SIZE
    assert world.landing.released == [[half, half + SIZE // 2]]
    # The engine is whole: nothing of it can come late, and it goes on.
    world.read(2, block=3)
    assert world.results.get(timeout=30).ok and len(world.engines) == 1


def test_a_read_that_waits_behind_others_is_stopped_before_it_begins(world: World) -> None:
    world.fabric.inject(Hang(), Hang(), Hang())
    for number in range(3):  # all threads of the lane
        world.read(number, block=number)
    eventually(lambda: world.fabric.faults_left == 0, "all threads hang")
    world.read(9, block=5)
    world.reader.stop(9)
    world.fabric.release_hung()
    ends = {result.read.id: result for result in (world.results.get(timeout=30) for _ in range(4))}
    assert ends[9].stopped and all(ends[number].ok for number in range(3))
    assert world.landing.block(5) == bytes(SIZE)


def test_a_read_whose_last_batch_was_under_way_lands_although_it_is_stopped(world: World) -> None:
    world.fabric.inject(Hang())
    world.read(1)
    eventually(lambda: world.fabric.faults_left == 0, "its batch hangs")
    world.reader.stop(1)
    world.fabric.release_hung()
    result = world.results.get(timeout=30)
    assert result.ok and not result.stopped


def test_to_stop_a_read_that_has_ended_changes_nothing(world: World) -> None:
    world.read(1)
    assert world.results.get(timeout=30).ok
    world.reader.stop(1)
    world.read(1)
    assert world.results.get(timeout=30).ok


def test_a_fence_of_an_engine_that_was_never_made(world: World) -> None:
    world.reader.fence("p:9")
    assert world.fenced.get(timeout=30) == "p:9"


def test_a_fence_waits_for_the_read_that_runs(world: World) -> None:
    world.fabric.inject(Hang())
    world.read(1)
    eventually(lambda: len(world.engines) == 1, "the read begins")
    eventually(lambda: world.reader is not None and _reading(world.engines[0]), "the read runs")
    world.reader.fence("p:1")
    eventually(lambda: _closing(world.engines[0]), "the fence begins")
    assert world.fenced.empty() and world.results.empty()
    world.fabric.release_hung()
    assert world.results.get(timeout=30).ok
    assert world.fenced.get(timeout=30) == "p:1"


def _reading(engine: TransferEngine) -> bool:
    return engine._reads > 0


def _closing(engine: TransferEngine) -> bool:
    return engine._closing


@pytest.mark.parametrize(
    "error", [LocalError("outside the banks"), TransferFailed("no flush"), ZeroDivisionError("a bug")]
)
def test_bytes_that_the_landing_does_not_vouch_for_are_no_success(world: World, error: Exception) -> None:
    world.landing.refuse_landing = error
    world.read(1)
    result = world.results.get(timeout=30)
    assert not result.ok and str(error) in result.reason


def test_a_peer_that_is_not_there_fails_the_read(world: World) -> None:
    world.read(1, session="memory:99")
    assert "nobody is there" in world.results.get(timeout=30).reason


def test_an_engine_that_cannot_be_made_fails_the_read(world: World) -> None:
    def refuse() -> TransferEngine:
        raise LocalError("no more ports")

    results: queue.Queue[ReadResult] = queue.Queue()
    reader = Reader(world.landing, refuse, 1, results.put, world.fenced.put, time.monotonic)
    reader.read(Read(1, "r", "p:1", world.serving.session, world.source.ctypes.data, PLAN, (1,), 0))
    result = results.get(timeout=30)
    assert (result.ok, result.reason) == (False, "no more ports")
    reader.close()


def test_close_drops_every_engine(world: World) -> None:
    for number, address in enumerate(("p:1", "p:2")):
        world.read(number, address)
        assert world.results.get(timeout=30).ok
    assert world.reader.close() is True
    assert [engine.closed for engine in world.engines] == [True, True]


def test_a_peer_that_hangs_takes_nobody_elses_threads(world: World) -> None:
    for number in (1, 2):
        world.fabric.inject(Hang())
        world.read(number, "p:1")
    eventually(lambda: bool(world.engines) and world.engines[0]._reads == 2, "both reads hang")
    world.read(3, "p:2")
    assert world.results.get(timeout=30).read.id == 3
    world.reader.fence("p:3")
    assert world.fenced.get(timeout=30) == "p:3"


def test_an_engine_that_takes_long_to_make_holds_up_neither_caller_nor_others(world: World) -> None:
    release, asked = threading.Event(), threading.Event()

    def make() -> TransferEngine:
        if not asked.is_set():
            asked.set()
            assert release.wait(30)
        return world.fabric.engine()

    results: queue.Queue[ReadResult] = queue.Queue()
    reader = Reader(world.landing, make, 1, results.put, world.fenced.put, time.monotonic)
    source = world.source.ctypes.data
    reader.read(Read(1, "r", "p:1", world.serving.session, source, PLAN, (1,), 0))
    assert asked.wait(30)
    reader.read(Read(2, "r", "p:2", world.serving.session, source, PLAN, (2,), 0))
    assert results.get(timeout=30).read.id == 2
    release.set()
    assert results.get(timeout=30).read.id == 1
    assert reader.close()


def test_close_says_that_a_read_outlived_it_and_keeps_the_engine(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    engine = world.fabric.engine(timeout_s=60)
    reader = Reader(world.landing, lambda: engine, 1, world.results.put, world.fenced.put, time.monotonic)
    world.fabric.inject(Hang())
    reader.read(Read(1, "r", "p:1", world.serving.session, world.source.ctypes.data, PLAN, (1,), 0))
    eventually(lambda: engine._reads == 1, "the read hangs")
    engine._timeout_s = -4.9  # the read is long past its time-out and the rest that close grants
    assert reader.close() is False
    assert not engine.closed
    assert "its memory must stay mapped" in caplog.text
    world.fabric.release_hung()
    eventually(lambda: engine._reads == 0, "the read ends")
    assert reader.close() is True
    assert engine.closed


def test_an_error_of_whoever_is_told_is_logged(world: World, caplog: pytest.LogCaptureFixture) -> None:
    def on_read(result: ReadResult) -> None:
        raise ZeroDivisionError("a bug in what follows")

    reader = Reader(world.landing, world.make, 1, on_read, world.fenced.put, time.monotonic)
    reader.read(Read(1, "r", "p:1", world.serving.session, world.source.ctypes.data, PLAN, (1,), 0))
    eventually(lambda: "a bug in what follows" in caplog.text, "the error is logged")
    reader.fence("p:1")
    assert world.fenced.get(timeout=30) == "p:1"
    assert reader.close()
