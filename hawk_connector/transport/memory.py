"""A transfer engine inside one process, with faults: for tests and for simulating the protocol.

It copies real bytes between real addresses and follows the rules of its base class, so what is shown with it
(registration, batching, fencing) is the product's own code. Faults are queued on the fabric and each is used
up by one batch.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from dataclasses import dataclass

from ..config import MAX_SEGMENTS_IN_FLIGHT
from ..errors import TransferFailed
from .engine import EngineFactory, Segments, TransferEngine

__all__ = ["Corrupt", "Fail", "Fault", "Hang", "MemoryEngine", "MemoryFabric", "ReadRecord"]


@dataclass(frozen=True, slots=True)
class Fail:
    """The batch fails after ``after_segments`` of its segments have landed.

    With ``late`` the rest is still on its way: :meth:`MemoryFabric.release_late` lands it, unless the
    engine that asked has been closed.
    """

    after_segments: int = 0
    late: bool = False


@dataclass(frozen=True, slots=True)
class Hang:
    """The batch waits until :meth:`MemoryFabric.release_hung`, and fails when its time-out comes first."""


@dataclass(frozen=True, slots=True)
class Corrupt:
    """The batch succeeds, with the first byte of segment ``segment`` changed by ``xor``."""

    segment: int = 0
    xor: int = 0xFF


Fault = Fail | Hang | Corrupt


@dataclass(frozen=True, slots=True)
class ReadRecord:
    """One batch: who read from whom, the segments, and whether it succeeded."""

    reader: str
    target: str
    segments: Segments
    ok: bool


class MemoryFabric:
    """The engines that can reach each other, the faults that wait for them, and all batches so far."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._engines: dict[str, MemoryEngine] = {}
        self._faults: deque[Fault] = deque()
        self._late: list[tuple[MemoryEngine, Segments]] = []
        self._hung = threading.Event()
        self._records: list[ReadRecord] = []
        self._ports = 0

    def engine(self, *, timeout_s: float = 5.0, max_segments_per_batch: int = MAX_SEGMENTS_IN_FLIGHT) -> MemoryEngine:
        """A new engine with a session of its own."""
        with self._lock:
            self._ports += 1
            engine = MemoryEngine(self, f"memory:{self._ports}", timeout_s, max_segments_per_batch)
            self._engines[engine.session] = engine
        return engine

    def factory(self, *, timeout_s: float = 5.0, max_segments_per_batch: int = MAX_SEGMENTS_IN_FLIGHT) -> EngineFactory:
        return lambda: self.engine(timeout_s=timeout_s, max_segments_per_batch=max_segments_per_batch)

    def inject(self, *faults: Fault) -> None:
        """Queue faults for the next batches, one each."""
        with self._lock:
            self._faults.extend(faults)

    def release_late(self) -> int:
        """Land the bytes that failed batches left under way; returns how many landed."""
        with self._lock:
            late, self._late = self._late, []
            landed = 0
            for reader, segments in late:
                # Not `closed`, which is set a moment after the carrier is gone: a fence must hold at once.
                if reader.session in self._engines:
                    _copy(segments)
                    landed += segments.nbytes
            return landed

    def release_hung(self) -> None:
        """Let every batch that hangs now go on."""
        with self._lock:
            self._hung.set()
            self._hung = threading.Event()

    @property
    def faults_left(self) -> int:
        """Faults that no batch has met yet."""
        with self._lock:
            return len(self._faults)

    @property
    def records(self) -> tuple[ReadRecord, ...]:
        with self._lock:
            return tuple(self._records)

    def _carry(self, reader: MemoryEngine, target: str, segments: Segments, timeout_s: float) -> None:
        with self._lock:
            fault = self._faults.popleft() if self._faults else None
            hung = self._hung
        ok = False
        try:
            if isinstance(fault, Hang) and not hung.wait(timeout_s):
                raise TransferFailed(f"reading from {target} gave no sign for {timeout_s:g} s")
            with self._lock:
                self._check_remote(target, segments)
                if isinstance(fault, Fail):
                    self._fail(reader, target, segments, fault)
                _copy(segments)
                if isinstance(fault, Corrupt):
                    byte = ctypes.c_ubyte.from_address(int(segments.local[fault.segment]))
                    byte.value ^= fault.xor
            ok = True
        finally:
            with self._lock:
                self._records.append(ReadRecord(reader.session, target, segments, ok))

    def _fail(self, reader: MemoryEngine, target: str, segments: Segments, fault: Fail) -> None:
        done = fault.after_segments
        _copy(Segments(segments.remote[:done], segments.local[:done], segments.length[:done]))
        if fault.late:
            rest = Segments(segments.remote[done:], segments.local[done:], segments.length[done:])
            self._late.append((reader, rest))
        raise TransferFailed(f"reading from {target} failed after {done} of {segments.count} segments")

    def _check_remote(self, target: str, segments: Segments) -> None:
        peer = self._engines.get(target)
        if peer is None:
            raise TransferFailed(f"reading from {target}: nobody is there")
        outside = peer.first_unreadable(segments)
        if outside is not None:
            raise TransferFailed(f"reading from {target}: segment {outside} lies outside its registered memory")

    def _leave(self, session: str) -> None:
        with self._lock:
            del self._engines[session]


class MemoryEngine(TransferEngine):
    """An engine of a :class:`MemoryFabric`; made by :meth:`MemoryFabric.engine`."""

    def __init__(self, fabric: MemoryFabric, session: str, timeout_s: float, max_segments_per_batch: int) -> None:
        super().__init__(timeout_s=timeout_s, max_segments_per_batch=max_segments_per_batch)
        self._fabric = fabric
        self._session = session

    @property
    def session(self) -> str:
        return self._session

    def first_unreadable(self, segments: Segments) -> int | None:
        """Index of the first segment that a peer may not read from here, or None."""
        return self._ranges.first_outside(segments.remote, segments.length)

    def _register(self, address: int, length: int) -> None:
        pass  # the base class's table is all there is

    def _unregister(self, address: int) -> None:
        pass

    def _read_batch(self, session: str, segments: Segments) -> None:
        self._fabric._carry(self, session, segments, self._timeout_s)

    def _close(self) -> None:
        self._fabric._leave(self._session)


def _copy(segments: Segments) -> None:
    for remote, local, length in zip(
        segments.remote.tolist(), segments.local.tolist(), segments.length.tolist(), strict=True
    ):
        ctypes.memmove(local, remote, length)
