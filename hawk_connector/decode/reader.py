"""Reads and fences: the threads that may wait, one engine for each prefill rank's life."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ..errors import HawkError, LocalError
from ..protocol.decode_actions import Read
from ..protocol.lease import Clock
from ..transport.engine import EngineFactory, TransferEngine
from .landing import Landing

__all__ = ["ReadResult", "Reader"]

_log = logging.getLogger(__name__)


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


class Reader:
    """Runs the protocol's reads through engines that are made when first needed and dropped by ``fence``.

    ``on_read`` and ``on_fenced`` are called on the reader's threads.
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
        self._on_read = on_read
        self._on_fenced = on_fenced
        self._clock = clock
        self._lock = threading.Lock()
        self._engines: dict[str, TransferEngine] = {}
        self._readers = ThreadPoolExecutor(threads, thread_name_prefix="hawk-read")
        # Fences wait for reads, so they must not stand in the readers' queue.
        self._fences = ThreadPoolExecutor(2, thread_name_prefix="hawk-fence")

    def read(self, read: Read) -> None:
        self._readers.submit(self._run, read)

    def fence(self, address: str) -> None:
        self._fences.submit(self._fence, address)

    def close(self) -> None:
        """Drops every engine; reads that run end by their time-out."""
        self._readers.shutdown(wait=False, cancel_futures=True)
        self._fences.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            engines, self._engines = list(self._engines.values()), {}
        for engine in engines:
            try:
                engine.close()
            except LocalError as error:
                _log.warning("%s", error)

    def _run(self, read: Read) -> None:
        start = self._clock()
        nbytes = count = 0
        fill: tuple[tuple[int, int, int], ...] = ()
        try:
            segments = self._landing.segments(read.plan, read.region, read.block_ids, read.skip_blocks)
            nbytes, count = segments.nbytes, segments.count
            self._engine(read.address).read(read.session, segments)
            fill = self._landing.landed(segments)
            ok, reason = True, ""
        except (HawkError, ValueError) as error:
            ok, reason = False, str(error)
        except Exception as error:
            _log.exception("a read from %s met an unexpected error", read.address)
            ok, reason = False, f"{type(error).__name__}: {error}"
        self._on_read(ReadResult(read, ok, reason, self._clock() - start, nbytes, count, fill))

    def _fence(self, address: str) -> None:
        with self._lock:
            engine = self._engines.get(address)
        try:
            if engine is not None:
                engine.close()
        except LocalError as error:
            # Not fenced: the memory stays in quarantine, and the fence is tried again.
            _log.warning("fencing the engine that reads from %s: %s", address, error)
            with contextlib.suppress(RuntimeError):  # the reader was closed meanwhile
                self.fence(address)
            return
        with self._lock:
            if self._engines.get(address) is engine:
                self._engines.pop(address, None)
        self._on_fenced(address)

    def _engine(self, address: str) -> TransferEngine:
        with self._lock:
            engine = self._engines.get(address)
            if engine is None:
                engine = self._make_engine()
                try:
                    for start, length in self._landing.regions():
                        engine.register(start, length)
                except HawkError:
                    engine.close()
                    raise
                self._engines[address] = engine
            return engine
