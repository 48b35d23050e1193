"""The decode side's transfer engines: reads that end well, fail, hang, and write late unless the engine is dropped."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hawk_connector.plan.block_plan import BlockPlan
from hawk_connector.protocol.decode_actions import Read
from tests.protocol.simulated_process import Process
from tests.protocol.world import BUFFER_ADDRESS, CACHE_ADDRESS, digest_of


@dataclass(frozen=True)
class EngineFaults:
    """Chances per read.  A failed or timed-out read writes some of its bytes late, unless the engine is dropped.

    ``corrupt``: that a byte is another one on the way; only of reads that have a digest to be seen by.
    ``longest_s``: a good read takes up to that.  ``rdma``: a peer that is stopped is still read.
    """

    fail: float = 0.0
    hang: float = 0.0
    corrupt: float = 0.0
    timeout_s: float = 3.0
    longest_s: float = 0.6
    rdma: bool = False


@dataclass(eq=False)
class Engine:
    """A transfer engine for one peer's address; after ``closed`` no byte of it arrives."""

    closed: bool = False


class Engines:
    """``write(read, index, data)``: bytes of the plan's block ``index`` arrive in the decode side's memory."""

    def __init__(self, process: Process, faults: EngineFaults, write: Callable[[Read, int, bytes], None]) -> None:
        self.process, self.faults, self._write = process, faults, write
        self.world = process.world
        self._engines: dict[str, Engine] = {}
        self._stopped: set[int] = set()
        self._failed: set[int] = set()  # returned as failed, with bytes that may still come
        self._corrupt: set[int] = set()
        self._landed: dict[int, dict[int, bytes]] = {}  # of each read, by block of its plan

    def close(self) -> None:
        for engine in self._engines.values():
            engine.closed = True

    def stop(self, read: int) -> None:
        """Nobody wants it any more: some reads end early for it, between two batches."""
        self._stopped.add(read)

    def read(self, read: Read, ended: Callable[[bool, str, bool], None]) -> None:
        """``ended(ok, why, stopped)`` is called once, when the read has returned."""
        world, faults = self.world, self.faults
        engine = self._engines.setdefault(read.address, Engine())
        todo = list(range(read.skip_blocks, read.plan.blocks))
        cut = world.rng.randint(0, len(todo))
        session = world.sessions.get(read.session)
        hangs = world.chance(faults.hang)
        fails = world.chance(faults.fail)
        why = "no such session" if session is None else "hangs" if hangs else "fails" if fails else ""
        begun = world.now
        self._landed[read.id] = {}
        self._copy(read, engine, todo[:cut] if session is not None else [])
        rest = todo[cut:]
        if why:
            for j in rest:
                world.after(world.between(0, 2 * faults.timeout_s), lambda j=j: self._copy(read, engine, [j]))

        if read.digest and world.chance(faults.corrupt):
            self._corrupt.add(read.id)
        stoppable = not why and len(rest) > 0 and world.chance(0.5)

        def end() -> None:
            stopped = session is not None and session.process.paused and not faults.rdma
            # Between two batches, so the one that was under way has come.
            between = all(j in self._landed[read.id] for j in todo[:cut])
            if stoppable and between and read.id in self._stopped:
                ended(False, "was told to stop", True)
            elif not why and world.sessions.get(read.session) is not session:
                ended(False, "the peer is gone", False)
            elif not why and stopped and world.now < begun + faults.timeout_s:
                self.process.after(0.3, end)
            elif not why and not stopped:
                self._copy(read, engine, rest)
                landed = self._landed[read.id]
                if not read.digest or digest_of(b"".join(landed[j] for j in todo)) == read.digest:
                    ended(True, "", False)
                else:
                    ended(False, "other digest", False)
            else:
                if stopped and not why:
                    for j in rest:
                        self._copy(read, engine, [j])  # when it goes on
                self._failed.add(read.id)
                ended(False, why or "the peer is stopped", False)

        self.process.after(faults.timeout_s if hangs else world.between(0, faults.longest_s), end)

    def fence(self, address: str, fenced: Callable[[], None]) -> None:
        engine = self._engines.get(address)

        def done() -> None:
            if engine is not None:
                engine.closed = True
                del self._engines[address]
            fenced()

        self.process.after(self.world.between(0, self.world.rng.choice([0.5, 0.5, 4.0])), done)

    def _copy(self, read: Read, engine: Engine, blocks: list[int]) -> None:
        """Bytes arrive, from whatever the peer's session serves now."""
        session = self.world.sessions.get(read.session)
        late = read.id in self._failed
        if engine.closed and late:
            self.world.covered["late byte meets a dropped engine", ""] += 1
        if engine.closed or session is None or not blocks:
            return
        if session.process.paused and not self.faults.rdma:
            session.process.on_resume.append(lambda: self._copy(read, engine, blocks))
            return
        each = read.plan.nbytes // read.plan.blocks
        for j in blocks:
            if isinstance(read.plan, BlockPlan):
                remote = read.plan.remote
                named = remote is not None and remote.bases == (CACHE_ADDRESS,)
                self.world.require(8, named, lambda: f"{read} does not read where the cache is")
                data = session.block(remote.ids[j], each)  # type: ignore[union-attr]
                self.world.covered["read in place", ""] += 1
            else:
                start = read.region - BUFFER_ADDRESS + j * each
                inside = start >= 0 and start + each <= len(session.buffer)
                self.world.require(8, inside, lambda: f"{read} reads outside the send buffer")
                data = bytes(session.buffer[start : start + each])
            if read.id in self._corrupt:
                self._corrupt.discard(read.id)
                self.world.covered["byte changes on the way", "reading"] += 1
                data = data[:-1] + bytes([data[-1] ^ 1])
            if late:
                self.world.covered["byte arrives late", "quarantined"] += 1
            self._landed[read.id][j] = data
            self._write(read, j, data)
