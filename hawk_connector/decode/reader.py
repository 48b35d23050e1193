"""Reads and fences: the threads that may wait, one engine and its own threads for each prefill rank's life."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from ..errors import CapacityError, HawkError, LocalError, ReadStopped, TransferFailed
from ..event_log import EventLog
from ..plan.block_plan import BlockPlan
from ..plan.parcel_digest import landed_digest
from ..plan.segments import Segments
from ..protocol.decode_actions import Read
from ..protocol.lease import Clock
from ..series import Failure
from ..transport.engine import EngineFactory, TransferEngine
from .landing import Landing

__all__ = ["ReadResult", "Reader"]

_log = logging.getLogger(__name__)

# Pause before a fence is tried again, so that one that fails at once is not a busy loop.
_AFTER_ERROR_S = 1.0

_Told = TypeVar("_Told")


@dataclass(frozen=True, slots=True)
class ReadResult:
    """How a read ended.  ``failure``: ``reason`` in one word.  ``stopped``: by ``Reader.stop``, between two batches.

    ``seconds``: reading and landing, ``land_s`` of it after the bytes had arrived; ``nbytes`` and ``segments`` as
    planned; ``fill``: (chip, bank, bytes) landed.
    """

    read: Read
    ok: bool
    reason: str
    seconds: float
    nbytes: int
    segments: int
    fill: tuple[tuple[int, int, int], ...] = ()
    failure: Failure = "read"
    stopped: bool = False
    land_s: float = 0.0


@dataclass(slots=True)
class _Lane:
    """One prefill rank's engine and the threads that wait for it, and for nobody else."""

    pool: ThreadPoolExecutor
    lock: threading.Lock = field(default_factory=threading.Lock)
    engine: TransferEngine | None = None
    failed: list[Segments] = field(default_factory=list)  # until the fence the landing must keep their memory
    fenced: bool = False


class Reader:
    """Runs the protocol's reads through engines that are made when first needed and dropped by ``fence``.

    ``threads``: for each prefill rank, so that one that hangs takes nobody else's.  ``read`` and ``fence`` return at
    once; ``on_read`` and ``on_fenced`` are called on the reader's threads.
    """

    def __init__(
        self,
        landing: Landing,
        make_engine: EngineFactory,
        threads: int,
        on_read: Callable[[ReadResult], None],
        on_fenced: Callable[[str], None],
        clock: Clock,
    ) -> None:
        self._landing = landing
        self._make_engine = make_engine
        self._threads = threads
        self._on_read = on_read
        self._on_fenced = on_fenced
        self._clock = clock
        self._events = EventLog(_log, clock)
        self._lock = threading.Lock()
        self._lanes: dict[str, _Lane] = {}
        self._unwanted: dict[int, bool] = {}  # reads that have not ended, and whether they are to be stopped
        self._closed = threading.Event()

    def read(self, read: Read) -> None:
        with self._lock:
            self._unwanted[read.id] = False
        self._submit(read.address, lambda lane: self._run(lane, read))

    def stop(self, read: int) -> None:
        """Begins no more batches of this read.  It is still reported with ``on_read``."""
        with self._lock:
            if read in self._unwanted:
                self._unwanted[read] = True

    def fence(self, address: str) -> None:
        self._submit(address, lambda lane: self._fence(lane, address))

    def close(self) -> bool:
        """Drops every engine; reads that run end by their time-out.

        False where some outlived it.  Their engines are kept, and so must be the memory that they write to; close
        may be called again.
        """
        with self._lock:
            self._closed.set()
            lanes = list(self._lanes.items())
        for _, lane in lanes:
            lane.pool.shutdown(wait=False, cancel_futures=True)
        for address, lane in lanes:
            try:
                with lane.lock:
                    if lane.engine is not None:
                        lane.engine.close()
            except LocalError as error:
                _log.error(
                    "the engine that reads from %s is not fenced, its memory must stay mapped: %s", address, error
                )
                continue
            with self._lock:
                self._lanes.pop(address, None)
        with self._lock:
            return not self._lanes

    def _submit(self, address: str, work: Callable[[_Lane], None]) -> None:
        with self._lock:
            if self._closed.is_set():
                return  # nobody waits for it any more
            lane = self._lanes.get(address)
            if lane is None:
                # One thread more than reads: a fence waits for reads, so it must not stand in their queue.
                lane = _Lane(ThreadPoolExecutor(self._threads + 1, thread_name_prefix=f"hawk-read-{address}"))
                self._lanes[address] = lane
            lane.pool.submit(work, lane)

    def _run(self, lane: _Lane, read: Read) -> None:
        start = self._clock()
        nbytes = count = 0
        segments: Segments | None = None
        fill: tuple[tuple[int, int, int], ...] = ()
        failure: Failure = "read"
        stopped = False
        land_s = 0.0
        try:
            segments = self._landing.segments(read.plan, read.region, read.block_ids, read.skip_blocks)
            nbytes, count = segments.nbytes, segments.count
            self._engine(lane).read(read.session, segments, lambda: self._unwanted[read.id])
            if read.digest and not isinstance(read.plan, BlockPlan):
                # Before the landing takes the bytes on: the memory that the reads wrote may be another's after that.
                found = landed_digest(read.plan, read.skip_blocks, read.region, segments)
                if found != read.digest:
                    failure = "corrupt"
                    raise TransferFailed(
                        f"the bytes that came have digest {found}, those that were packed {read.digest}"
                    )
            arrived = self._clock()
            fill = self._landing.landed(segments)
            land_s = self._clock() - arrived
            ok, reason = True, ""
        except ReadStopped as error:
            ok, stopped, reason = False, True, str(error)
        except CapacityError as error:
            # Of the landing before it gave segments: nothing was read, so nothing can arrive, and it is not the peer's.
            ok, reason = False, str(error)
            if segments is None:
                stopped, failure = True, "room"
        except (HawkError, ValueError) as error:
            ok, reason = False, str(error)
        except Exception as error:
            self._events.exception("read", "a read met an unexpected error", peer=read.address, request=read.request)
            ok, reason = False, f"{type(error).__name__}: {error}"
        with self._lock:
            del self._unwanted[read.id]
        if stopped and segments is not None:
            self._release(segments)
        elif not ok and segments is not None:
            with lane.lock:
                late = lane.fenced
                if not late:
                    lane.failed.append(segments)
            if late:
                self._release(segments)
        seconds = self._clock() - start
        result = ReadResult(read, ok, reason, seconds, nbytes, count, fill, failure, stopped, land_s)
        self._tell(self._on_read, result)

    def _fence(self, lane: _Lane, address: str) -> None:
        with lane.lock:
            engine = lane.engine
        try:
            if engine is not None:
                engine.close()
        except Exception as error:
            # Not fenced: the memory stays in quarantine, and the fence is tried again.
            self._events.warning("fence", f"the engine cannot be dropped yet: {error}", peer=address)
            self._closed.wait(_AFTER_ERROR_S)
            self.fence(address)
            return
        with self._lock:
            if self._lanes.get(address) is lane:
                del self._lanes[address]
        with lane.lock:
            lane.fenced, failed = True, list(lane.failed)
        for segments in failed:
            self._release(segments)
        lane.pool.shutdown(wait=False)
        self._tell(self._on_fenced, address)

    def _release(self, segments: Segments) -> None:
        """A landing that cannot take its memory back keeps it; the read or fence is told of all the same."""
        try:
            self._landing.release(segments)
        except Exception:
            self._events.exception("landing", "the landing did not take back what a read had reserved")

    def _engine(self, lane: _Lane) -> TransferEngine:
        with lane.lock:
            if lane.engine is None:
                if self._closed.is_set():
                    raise LocalError("the reader was closed")
                engine = self._make_engine()
                try:
                    for start, length in self._landing.regions():
                        engine.register(start, length)
                except HawkError:
                    engine.close()
                    raise
                lane.engine = engine
            return lane.engine

    def _tell(self, callback: Callable[[_Told], None], result: _Told) -> None:
        """An error of the callback would vanish in a Future that nobody asks."""
        try:
            callback(result)
        except Exception:
            _log.exception("an error in what follows %s", result)
