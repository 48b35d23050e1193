"""The rules that every transfer engine keeps, shown on the in-process carrier."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from hawk_connector.errors import LocalError, TransferFailed
from hawk_connector.transport.engine import RegisteredRanges, SegmentBudget, Segments, TransferEngine
from hawk_connector.transport.memory import Corrupt, Fail, Hang, MemoryEngine, MemoryFabric
from tests.transport.waiting import eventually

Bytes = NDArray[np.uint8]


def segments(remote: list[int], local: list[int], length: list[int]) -> Segments:
    return Segments(*(np.array(column, dtype=np.int64) for column in (remote, local, length)))


def whole(source: Bytes, target: Bytes, pieces: int) -> Segments:
    """``target`` from ``source`` in equal pieces."""
    size = source.nbytes // pieces
    steps = np.arange(pieces, dtype=np.int64) * size
    return Segments(source.ctypes.data + steps, target.ctypes.data + steps, np.full(pieces, size, dtype=np.int64))


class Pair:
    """A reading engine and a serving one, each with a registered buffer of ``nbytes``."""

    def __init__(self, nbytes: int = 64, **options: float) -> None:
        self.fabric = MemoryFabric()
        self.reader: MemoryEngine = self.fabric.engine(**options)  # type: ignore[arg-type]
        self.server = self.fabric.engine()
        self.source: Bytes = np.arange(1, nbytes + 1, dtype=np.int64).astype(np.uint8)
        self.target: Bytes = np.zeros(nbytes, dtype=np.uint8)
        self.server.register(self.source.ctypes.data, nbytes)
        self.reader.register(self.target.ctypes.data, nbytes)

    def read(self, pieces: int = 4) -> None:
        self.reader.read(self.server.session, whole(self.source, self.target, pieces))


spans = st.tuples(st.integers(1, 60), st.integers(-1, 20))


@given(st.lists(spans, max_size=6), st.lists(spans, min_size=1, max_size=6))
def test_registered_ranges_agree_with_sets_of_bytes(
    regions: list[tuple[int, int]], asked: list[tuple[int, int]]
) -> None:
    ranges, known = RegisteredRanges(), []
    for start, length in regions:
        region = set(range(start, start + length))
        if region and not any(region & other for other in known):
            ranges.add(start, length)
            known.append(region)
        else:
            with pytest.raises(LocalError):
                ranges.add(start, length)
    outside = [
        index
        for index, (start, length) in enumerate(asked)
        if length < 1 or not any(set(range(start, start + length)) <= region for region in known)
    ]
    addresses, lengths = (np.array(column, dtype=np.int64) for column in zip(*asked, strict=True))
    assert ranges.first_outside(addresses, lengths) == (outside[0] if outside else None)


def test_lengths_that_would_wrap_are_outside() -> None:
    ranges = RegisteredRanges()
    ranges.add(4096, 4096)
    top = np.array([2**63 - 1], dtype=np.int64)
    assert ranges.first_outside(np.array([4096], dtype=np.int64), top) == 0


def test_removed_ranges_are_gone() -> None:
    ranges = RegisteredRanges()
    ranges.add(10, 5)
    ranges.remove(10)
    assert ranges.first_outside(np.array([10], dtype=np.int64), np.array([1], dtype=np.int64)) == 0
    with pytest.raises(LocalError, match="0xa"):
        ranges.remove(10)


def test_reads_whole_and_in_batches() -> None:
    pair = Pair(nbytes=60, max_segments_per_batch=7)
    pair.read(pieces=20)
    assert pair.target.tolist() == list(range(1, 61))
    assert [record.segments.count for record in pair.fabric.records] == [7, 7, 6]


@pytest.mark.parametrize(("shift", "length"), [(-1, 4), (62, 4), (64, 1), (0, 65), (0, 0)])
def test_local_ranges_are_checked_before_anything_is_read(shift: int, length: int) -> None:
    pair = Pair()
    good, bad = pair.target.ctypes.data, pair.target.ctypes.data + shift
    remote = pair.source.ctypes.data
    with pytest.raises(LocalError, match=f"segment 1 .*{bad:#x}"):
        pair.reader.read(pair.server.session, segments([remote, remote], [good, bad], [4, length]))
    assert not pair.target.any()
    assert pair.fabric.records == ()


def test_one_segment_may_not_span_two_registrations() -> None:
    pair = Pair()
    base = pair.target.ctypes.data
    pair.reader.unregister(base)
    pair.reader.register(base, 32)
    pair.reader.register(base + 32, 32)
    with pytest.raises(LocalError, match="segment 0"):
        pair.reader.read(pair.server.session, segments([pair.source.ctypes.data], [base + 30], [4]))


def test_overlapping_registration_is_refused() -> None:
    pair = Pair()
    with pytest.raises(LocalError, match="overlaps"):
        pair.reader.register(pair.target.ctypes.data + 63, 10)


def test_remote_ranges_and_unknown_peers_fail() -> None:
    pair = Pair()
    with pytest.raises(TransferFailed, match="outside"):
        pair.reader.read(pair.server.session, segments([pair.source.ctypes.data + 60], [pair.target.ctypes.data], [5]))
    with pytest.raises(TransferFailed, match="nobody"):
        pair.reader.read("memory:99", whole(pair.source, pair.target, 1))
    pair.server.close()
    with pytest.raises(TransferFailed, match="nobody"):
        pair.read()


def test_late_bytes_land_until_the_fence() -> None:
    pair = Pair()
    pair.fabric.inject(Fail(after_segments=1, late=True))
    with pytest.raises(TransferFailed, match="after 1 of 4"):
        pair.read(pieces=4)
    assert pair.target.tolist() == [*range(1, 17), *([0] * 48)]
    assert pair.fabric.release_late() == 48
    assert pair.target.tolist() == list(range(1, 65))


def test_no_late_byte_lands_after_close() -> None:
    pair = Pair()
    pair.fabric.inject(Fail(after_segments=1, late=True))
    with pytest.raises(TransferFailed):
        pair.read(pieces=4)
    pair.reader.close()
    assert pair.fabric.release_late() == 0
    assert pair.target.tolist() == [*range(1, 17), *([0] * 48)]


def test_a_failed_batch_ends_the_read() -> None:
    pair = Pair(nbytes=60, max_segments_per_batch=5)
    pair.fabric.inject(Fail(after_segments=5))
    with pytest.raises(TransferFailed):
        pair.read(pieces=15)
    assert [record.ok for record in pair.fabric.records] == [False]


def test_corruption_changes_one_byte() -> None:
    pair = Pair()
    pair.fabric.inject(Corrupt(segment=2, xor=0x80))
    pair.read(pieces=4)
    changed = np.flatnonzero(pair.target != pair.source)
    assert changed.tolist() == [32]


def test_a_hung_read_ends_by_its_time_out() -> None:
    pair = Pair(timeout_s=0.05)
    pair.fabric.inject(Hang())
    with pytest.raises(TransferFailed, match="no sign"):
        pair.read()
    assert not pair.target.any()


def test_close_waits_for_the_read_in_flight_and_refuses_new_ones() -> None:
    pair = Pair(timeout_s=30)
    entered = threading.Event()
    order: list[str] = []

    class Watched(MemoryEngine):
        def _read_batch(self, session: str, batch: Segments) -> None:
            entered.set()
            super()._read_batch(session, batch)
            order.append("read")

    reader = Watched(pair.fabric, "memory:watched", 30, 1024)
    pair.fabric._engines[reader.session] = reader
    pair.fabric.inject(Hang())
    reader.register(pair.target.ctypes.data, 64)
    reading = threading.Thread(target=reader.read, args=(pair.server.session, whole(pair.source, pair.target, 4)))
    reading.start()
    assert entered.wait(10)

    def close() -> None:
        reader.close()
        order.append("closed")

    closing = threading.Thread(target=close)
    closing.start()
    eventually(lambda: reader._closing, "close() begins")
    with pytest.raises(TransferFailed, match="was closed"):
        reader.read(pair.server.session, whole(pair.source, pair.target, 1))
    assert not reader.closed
    pair.fabric.release_hung()
    reading.join(10)
    closing.join(10)
    assert order == ["read", "closed"]
    assert pair.target.tolist() == list(range(1, 65))
    reader.close()
    with pytest.raises(TransferFailed, match="was closed"):
        reader.register(1, 1)


class Crowd(TransferEngine):
    """Counts the segments in flight; its batches end when ``gate`` opens."""

    def __init__(self) -> None:
        super().__init__(timeout_s=10)
        self.gate = threading.Event()
        self.begun = threading.Semaphore(0)
        self.now = self.most = 0
        self.lock = threading.Lock()

    @property
    def session(self) -> str:
        return "crowd"

    def _register(self, address: int, length: int) -> None: ...

    def _unregister(self, address: int) -> None: ...

    def _read_batch(self, session: str, batch: Segments) -> None:
        with self.lock:
            self.now += batch.count
            self.most = max(self.most, self.now)
        self.begun.release()
        assert self.gate.wait(10)
        with self.lock:
            self.now -= batch.count

    def _close(self) -> None: ...


def test_all_threads_together_keep_within_1024_segments() -> None:
    engine = Crowd()
    engine.register(4096, 2048)
    ones = np.ones(500, dtype=np.int64)
    batch = Segments(ones, ones + 4096, ones)
    threads = [threading.Thread(target=engine.read, args=("peer", batch)) for _ in range(5)]
    for thread in threads:
        thread.start()
    assert engine.begun.acquire(timeout=10)
    assert engine.begun.acquire(timeout=10)
    engine.gate.set()
    for thread in threads:
        thread.join(10)
    assert engine.most == 1000
    assert engine.now == 0


def test_the_budget_serves_in_order() -> None:
    budget = SegmentBudget(10)
    served: list[str] = []

    def ask(name: str, count: int) -> None:
        with budget.held(count, 10):
            served.append(name)

    with budget.held(6, 10):
        with pytest.raises(TimeoutError), budget.held(5, 0.01):
            pass
        large = threading.Thread(target=ask, args=("large", 10))
        large.start()
        eventually(lambda: len(budget._queue) == 1, "the large batch asks")
        small = threading.Thread(target=ask, args=("small", 1))
        small.start()
        eventually(lambda: len(budget._queue) == 2, "the small batch asks")
        assert served == []
    large.join(10)
    small.join(10)
    assert served == ["large", "small"]


def test_batches_beyond_what_is_safe_are_refused() -> None:
    with pytest.raises(LocalError, match="got 1025"):
        MemoryFabric().engine(max_segments_per_batch=1025)
