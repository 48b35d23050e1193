"""Reads and fences: the threads that may wait, one engine and its own threads for each prefill rank's life."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from ..errors import HawkError, LocalError
from ..protocol.decode_actions import Read
from ..protocol.lease import Clock
from ..transport.engine import EngineFactory, TransferEngine
from .landing import Landing

__all__ = ["ReadResult", "Reader"]

_log = logging.getLogger(__name__)

# Pause before a fence is tried again, so that one that fails at once is not a busy loop.
_AFTER_ERROR_S = 1.0

_Told = TypeVar("_Told")


@dataclass(frozen=True, slots=True)
class ReadResult:
    """How a read ended.

    ``seconds``: reading and landing; ``nbytes`` and ``segments`` as planned; ``fill``: (chip, bank, bytes) landed.
    """

    read: Read
    ok: bool
    reason: str
    seconds: float
    nbytes: int
    segments: int
    fill: tuple[tuple[int, int, int], ...] = ()


@dataclass(slots=True)
class _Lane:
    """One prefill rank's engine and the threads that wait for it, and for nobody else."""

    pool: ThreadPoolExecutor
    lock: threading.Lock = field(default_factory=threading.Lock)
    engine: TransferEngine | None = None


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
        self._lock = threading.Lock()
        self._lanes: dict[str, _Lane] = {}
        self._closed = threading.Event()

    def read(self, read: Read) -> None:
        self._submit(read.address, lambda lane: self._run(lane, read))

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
        fill: tuple[tuple[int, int, int], ...] = ()
        try:
            segments = self._landing.segments(read.plan, read.region, read.block_ids, read.skip_blocks)
            nbytes, count = segments.nbytes, segments.count
            self._engine(lane).read(read.session, segments)
            fill = self._landing.landed(segments)
            ok, reason = True, ""
        except (HawkError, ValueError) as error:
            ok, reason = False, str(error)
        except Exception as error:
            _log.exception("a read from %s met an unexpected error", read.address)
            ok, reason = False, f"{type(error).__name__}: {error}"
        self._tell(self._on_read, ReadResult(read, ok, reason, self._clock() - start, nbytes, count, fill))

    def _fence(self, lane: _Lane, address: str) -> None:
        with lane.lock:
            engine = lane.engine
        try:
            if engine is not None:
                engine.close()
        except Exception as error:
            # Not fenced: the memory stays in quarantine, and the fence is tried again.
            _log.warning("fencing the engine that reads from %s: %s", address, error)
            self._closed.wait(_AFTER_ERROR_S)
            self.fence(address)
            return
        with self._lock:
            if self._lanes.get(address) is lane:
                del self._lanes[address]
        lane.pool.shutdown(wait=False)
        self._tell(self._on_fenced, address)

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
