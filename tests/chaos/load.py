"""Clients that keep several requests in flight, over both legs, and judge every answer."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from tests.chaos.side import Answer, Died, Side

REMOTE_DECODE = {"do_remote_decode": True, "do_remote_prefill": False}


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt and what a single instance answers to it, greedily."""

    tokens: tuple[int, ...]
    answer: tuple[int, ...]


class Stage(Enum):
    """Where a request is, as its client knows it."""

    PREFILL = "prefill"
    BETWEEN = "between"
    WAITING = "waiting for decode's first token"
    DECODING = "decoding"


class Outcome(Enum):
    RIGHT = "right"
    ERROR = "error"
    CUT = "its own process died"
    GONE = "its client left"
    WRONG = "WRONG"
    LATE = "LATE"


@dataclass(slots=True)
class Request:
    name: str
    prompt: Prompt
    stage: Stage = Stage.PREFILL
    left: bool = False
    task: asyncio.Task[None] | None = None


@dataclass(frozen=True, slots=True)
class Bounds:
    """How long each leg may take, on the clock of a side that leaves out the times for which it was stopped."""

    prefill_s: float
    decode_s: float


@dataclass(slots=True)
class Tally:
    """What has come of the requests; ``broken`` names each that broke a promise."""

    outcomes: Counter[Outcome] = field(default_factory=Counter)
    broken: list[str] = field(default_factory=list)


class Load:
    """``clients`` tasks, each with one request after another, until ``end``."""

    def __init__(
        self,
        prefill: Side,
        decode: Side,
        prompts: Sequence[Prompt],
        bounds: Bounds,
        clients: int,
        seed: int,
        *,
        errors_allowed: bool,
    ) -> None:
        self._prefill = prefill
        self._decode = decode
        self._prompts = prompts
        self._bounds = bounds
        self._errors_allowed = errors_allowed
        self._numbers = itertools.count(1)
        self._seed = seed
        self._ending = False
        self._old_params: dict[int, dict[str, Any]] = {}  # by the prompt's number: of an earlier request
        self.tally = Tally()
        self.live: dict[str, Request] = {}
        self._clients = [asyncio.create_task(self._client(number)) for number in range(clients)]

    async def end(self) -> None:
        """No new requests; returns when all have ended."""
        self._ending = True
        await asyncio.gather(*self._clients)
        while self.live:
            await asyncio.sleep(0.02)

    def leave(self, rng: random.Random, stages: Sequence[Stage]) -> str:
        """The client of one request, in one of ``stages`` if there is such, hangs up; the request's name, or ""."""
        requests = [r for r in self.live.values() if not r.left and r.task is not None]
        chosen = [r for r in requests if r.stage in stages] or requests
        if not chosen:
            return ""
        request = rng.choice(chosen)
        request.left = True
        assert request.task is not None
        request.task.cancel()
        return request.name

    def burst(self, rng: random.Random, count: int) -> None:
        """The longest prompts, all at once."""
        longest = sorted(range(len(self._prompts)), key=lambda n: -len(self._prompts[n].tokens))[: 2 * count]
        for number in rng.sample(longest, count):
            self._begin(number, rng.random() * 0.1)

    def count(self, stage: Stage) -> int:
        return sum(1 for request in self.live.values() if request.stage is stage)

    async def _client(self, number: int) -> None:
        rng = random.Random(f"client/{self._seed}/{number}")
        while not self._ending:
            chosen = rng.randrange(len(self._prompts))
            pause_s, think_s, way = rng.choice((0.0, rng.random())), rng.random() * 0.3, rng.random()
            request = self._begin(chosen, pause_s, old_params=way < 0.1, forsaken=way > 0.9)
            assert request.task is not None
            await asyncio.wait([request.task])
            await asyncio.sleep(think_s)

    def _begin(self, number: int, pause_s: float, old_params: bool = False, forsaken: bool = False) -> Request:
        request = Request(f"request-{next(self._numbers)}", self._prompts[number])
        self.live[request.name] = request
        request.task = asyncio.create_task(self._run(request, number, pause_s, old_params, forsaken))
        return request

    async def _run(self, request: Request, number: int, pause_s: float, old_params: bool, forsaken: bool) -> None:
        """One request, from the first leg to its verdict.

        ``old_params``: its client sends decode those of an earlier request.  ``forsaken``: it never comes to decode, so
        nobody asks for the KV, and only the lease ends the transfer.
        """
        try:
            params = self._old_params.get(number) if old_params or not self._prefill.ready else None
            if params is None and self._prefill.ready:
                answer = await self._leg(self._prefill, request, self._bounds.prefill_s, REMOTE_DECODE, 1)
                params = answer.params
                if params is not None and not forsaken:
                    self._old_params[number] = params
            request.stage = Stage.BETWEEN
            await asyncio.sleep(pause_s)
            if forsaken:
                self.tally.outcomes[Outcome.GONE] += 1
                return
            while not self._decode.ready:
                await asyncio.sleep(0.05)
            request.stage = Stage.WAITING
            tokens = len(request.prompt.answer)
            self._judge(request, await self._leg(self._decode, request, self._bounds.decode_s, params, tokens))
        except Died:
            self.tally.outcomes[Outcome.CUT] += 1
        except TimeoutError:
            self._broke(request, Outcome.LATE, f"not ended within its deadline, {request.stage.value}")
        except asyncio.CancelledError:
            if not request.left:
                raise
            self.tally.outcomes[Outcome.GONE] += 1
        finally:
            del self.live[request.name]

    async def _leg(
        self, side: Side, request: Request, bound_s: float, params: dict[str, Any] | None, tokens: int
    ) -> Answer:
        """Raises Died, and TimeoutError past ``bound_s`` of the side's own running time."""
        name = f"{request.name}-{side.name}"
        began = side.running_clock()
        life = side.starts

        def decoding() -> None:
            if side is self._decode:
                request.stage = Stage.DECODING

        answer = asyncio.create_task(side.generate(name, request.prompt.tokens, tokens, params, decoding))
        try:
            while not answer.done():
                left = bound_s - (side.running_clock() - began)
                if left <= 0:
                    raise TimeoutError
                await asyncio.wait([answer], timeout=min(left, 1.0))
            return answer.result()
        finally:
            if not answer.done():
                answer.cancel()
                if side.starts == life:
                    side.abort(name)

    def _judge(self, request: Request, answer: Answer) -> None:
        if answer.finish == "error":
            if self._errors_allowed:
                self.tally.outcomes[Outcome.ERROR] += 1
            else:
                self._broke(request, Outcome.ERROR, "an error although failed loads are computed")
        elif answer.tokens == request.prompt.answer:
            self.tally.outcomes[Outcome.RIGHT] += 1
        else:
            text = f"{answer.finish} after {answer.tokens}, not {request.prompt.answer}"
            self._broke(request, Outcome.WRONG, text)

    def _broke(self, request: Request, outcome: Outcome, text: str) -> None:
        self.tally.outcomes[outcome] += 1
        self.tally.broken.append(f"{request.name} ({len(request.prompt.tokens)} tokens): {text}")
