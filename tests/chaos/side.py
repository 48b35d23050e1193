"""The parent's end of `tests/chaos/engine.py`: a side that can be killed, stopped, started again and asked."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).parents[2]


class Died(Exception):
    """The process ended while something was awaited of it."""


@dataclass(frozen=True, slots=True)
class Answer:
    """How a request ended: greedy tokens, vLLM's finish reason, and kv_transfer_params for the other side."""

    tokens: tuple[int, ...]
    finish: str
    params: dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a side held when it was asked."""

    held: dict[str, int] = field(default_factory=dict)
    transfers: dict[str, int] = field(default_factory=dict)  # since its life began, by outcome
    used_blocks: int = 0
    requests: int = 0
    epoch: str = ""
    descriptors: int = 0

    @property
    def idle(self) -> bool:
        return not any(self.held.values()) and self.used_blocks == 0 and self.requests == 0

    def __str__(self) -> str:
        counts = {k: v for k, v in self.held.items() if v}
        return f"held {counts}, {self.used_blocks} of vLLM's blocks, {self.requests} requests"


@dataclass(slots=True)
class _Life:
    """One process life of a side."""

    process: asyncio.subprocess.Process
    ready: asyncio.Future[None]
    reading: asyncio.Task[None] | None = None
    answers: dict[str, asyncio.Future[Answer]] = field(default_factory=dict)
    snapshots: dict[int, asyncio.Future[Snapshot]] = field(default_factory=dict)
    begun: dict[str, Callable[[], None]] = field(default_factory=dict)
    last: Snapshot = field(default_factory=Snapshot)
    expected_to_end: bool = False


class Side:
    """An engine process, through all its lives.  One event loop's.

    ``wrapper``: words in front of the command (a namespace).  ``open_log``: gives the file that a life prints into.
    """

    def __init__(
        self,
        name: str,
        options: dict[str, Any],
        environment: dict[str, str],
        open_log: Callable[[str], IO[bytes]],
        wrapper: Sequence[str] = (),
    ) -> None:
        self.name = name
        self.options = options
        self._environment = environment
        self._open_log = open_log
        self._wrapper = list(wrapper)
        self._life: _Life | None = None
        self._numbers = itertools.count()
        self._stopped_at: float | None = None
        self._stopped_s = 0.0
        self._transfers: Counter[str] = Counter()
        self.starts = 0
        self.deaths: list[str] = []  # ends that nobody asked for

    # --- lives

    async def start(self) -> None:
        """Starts a life and waits until it serves; raises Died."""
        assert not self.alive, f"{self.name} runs already"
        self.starts += 1
        reading, writing = os.pipe()
        with self._open_log(f"{self.name}-{self.starts}.log") as log:
            process = await asyncio.create_subprocess_exec(
                *self._wrapper,
                *(sys.executable, "-m", "tests.chaos.engine", json.dumps(self.options), str(writing)),
                stdin=asyncio.subprocess.PIPE,
                stdout=log,
                stderr=log,
                pass_fds=[writing],
                env=self._environment,
                cwd=ROOT,
            )
        os.close(writing)
        life = _Life(process, asyncio.get_running_loop().create_future())
        self._life = life
        life.reading = asyncio.create_task(self._read(life, reading))
        await life.ready

    @property
    def alive(self) -> bool:
        return self._life is not None

    @property
    def ready(self) -> bool:
        """Whether requests may be sent; a stopped side is ready, and does not answer."""
        return self._life is not None and self._life.ready.done()

    @property
    def pid(self) -> int:
        assert self._life is not None
        return self._life.process.pid

    async def kill(self) -> None:
        """kill -9."""
        await self._end(signal.SIGKILL)

    async def close(self) -> None:
        """Ends the life, if there is one, as vLLM would be ended by its user."""
        if self._life is None:
            return
        self.resume()
        assert self._life.process.stdin is not None
        self._life.expected_to_end = True
        self._life.process.stdin.close()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._life.process.wait(), 20)
        await self._end(signal.SIGKILL)

    async def _end(self, number: signal.Signals) -> None:
        life = self._life
        if life is None:
            return
        life.expected_to_end = True
        with contextlib.suppress(ProcessLookupError):
            life.process.send_signal(number)
        await life.process.wait()
        assert life.reading is not None
        await life.reading

    def stop(self) -> None:
        """SIGSTOP."""
        assert self._life is not None and self._stopped_at is None
        self._life.process.send_signal(signal.SIGSTOP)
        self._stopped_at = time.monotonic()

    def resume(self) -> None:
        """SIGCONT; nothing on a side that runs."""
        if self._stopped_at is None:
            return
        if self._life is not None and self._life.process.returncode is None:
            self._life.process.send_signal(signal.SIGCONT)
        self._stopped_s += time.monotonic() - self._stopped_at
        self._stopped_at = None

    def running_clock(self) -> float:
        """Seconds, leaving out those for which this side was stopped."""
        now = time.monotonic()
        return now - self._stopped_s - (now - self._stopped_at if self._stopped_at is not None else 0.0)

    def transfers(self) -> Counter[str]:
        """Transfers of all lives by outcome, as each life told when it was last asked."""
        now = self._life.last.transfers if self._life is not None else {}
        return self._transfers + Counter(now)

    # --- orders

    async def generate(
        self,
        name: str,
        prompt: Sequence[int],
        max_tokens: int,
        params: dict[str, Any] | None,
        on_first_token: Callable[[], None] = lambda: None,
    ) -> Answer:
        """A greedy answer; raises Died."""
        life = self._ready_life()
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        life.answers[name] = future
        life.begun[name] = on_first_token
        self._order(life, order="add", name=name, prompt=list(prompt), max_tokens=max_tokens, params=params)
        try:
            return await future
        finally:
            life.answers.pop(name, None)
            life.begun.pop(name, None)

    def abort(self, name: str) -> None:
        """The client of a request is gone; whoever awaits ``generate`` is cancelled by its caller."""
        if self._life is not None and self._life.ready.done():
            self._order(self._life, order="abort", name=name)

    async def ask(self) -> Snapshot:
        """Raises Died.  A stopped side answers when it runs again."""
        life = self._ready_life()
        number = next(self._numbers)
        future: asyncio.Future[Snapshot] = asyncio.get_running_loop().create_future()
        life.snapshots[number] = future
        self._order(life, order="ask", number=number)
        return await future

    def _ready_life(self) -> _Life:
        if self._life is None or not self._life.ready.done():
            raise Died(f"{self.name} does not serve")
        return self._life

    def _order(self, life: _Life, **order: Any) -> None:
        assert life.process.stdin is not None
        # Not drained: a stopped side must not hold the parent.
        life.process.stdin.write(json.dumps(order).encode() + b"\n")

    # --- events

    async def _read(self, life: _Life, descriptor: int) -> None:
        reader = asyncio.StreamReader(limit=1 << 24)
        pipe = os.fdopen(descriptor, "rb")
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), pipe
        )
        try:
            while line := await reader.readline():
                self._take(life, json.loads(line))
        finally:
            transport.close()
            code = await life.process.wait()
            if not life.expected_to_end:
                self.deaths.append(f"{self.name} ended by itself with code {code} in life {self.starts}")
            self._transfers.update(life.last.transfers)
            if self._life is life:
                self._life = None
                self.resume()
            died = Died(f"{self.name} ended with code {code}")
            for future in (life.ready, *life.answers.values(), *life.snapshots.values()):
                if not future.done():
                    future.set_exception(died)
                    future.exception()  # nobody need be waiting for it

    def _take(self, life: _Life, event: dict[str, Any]) -> None:
        if "ready" in event:
            life.ready.set_result(None)
        elif "begun" in event:
            life.begun.get(event["begun"], lambda: None)()
        elif "done" in event:
            future = life.answers.get(event["done"])
            if future is not None and not future.done():
                future.set_result(Answer(tuple(event["tokens"]), event["finish"], event["params"]))
        else:
            number = event.pop("status")
            future_snapshot = life.snapshots.pop(number)
            life.last = Snapshot(**event)
            if not future_snapshot.done():
                future_snapshot.set_result(life.last)
