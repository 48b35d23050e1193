"""The judge of the chaos run, judged: what must not happen is noticed when it does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from tests.chaos.load import Bounds, Load, Outcome, Prompt, Tally
from tests.chaos.side import Answer, Died

PROMPT = Prompt((5, 6, 7), (1, 2, 3, 4))
PARAMS = {"do_remote_prefill": True}
RIGHT = Answer(PROMPT.answer, "length", None)


class Scripted:
    """A side that gives one answer to every request; None: it never does."""

    def __init__(self, name: str, answer: Answer | Exception | None) -> None:
        self.name = name
        self._answer = answer
        self.ready = True
        self.starts = 1
        self.asked: list[dict[str, Any] | None] = []
        self.aborted: list[str] = []
        self._clock = 0.0

    def running_clock(self) -> float:
        """40 ms go by between any two looks."""
        self._clock += 0.04
        return self._clock

    async def generate(
        self,
        name: str,
        prompt: Sequence[int],
        max_tokens: int,
        params: dict[str, Any] | None,
        on_first_token: Callable[[], None],
    ) -> Answer:
        self.asked.append(params)
        await asyncio.sleep(0)
        if isinstance(self._answer, Exception):
            raise self._answer
        if self._answer is None:
            await asyncio.Event().wait()
        assert self._answer is not None
        return self._answer

    def abort(self, name: str) -> None:
        self.aborted.append(name)


def judge(decode: Scripted, *, errors_allowed: bool = False, prefill: Scripted | None = None) -> Tally:
    """What a load says of one client's first request."""
    prefill = prefill or Scripted("prefill", Answer((1,), "length", PARAMS))

    async def run() -> Tally:
        bounds = Bounds(prefill_s=0.05, decode_s=0.05)
        load = Load(prefill, decode, [PROMPT], bounds, 1, 0, errors_allowed=errors_allowed)  # type: ignore[arg-type]
        await asyncio.sleep(0)
        await load.end()
        return load.tally

    return asyncio.run(run())


def test_the_right_answer() -> None:
    decode = Scripted("decode", RIGHT)
    tally = judge(decode)
    assert tally.outcomes == {Outcome.RIGHT: 1}
    assert tally.broken == []
    assert decode.asked == [PARAMS]


def test_one_other_token_is_a_broken_promise() -> None:
    tally = judge(Scripted("decode", Answer((1, 2, 3, 5), "length", None)))
    assert tally.outcomes == {Outcome.WRONG: 1}
    assert len(tally.broken) == 1


def test_a_shorter_answer_is_wrong() -> None:
    assert judge(Scripted("decode", Answer((1, 2), "abort", None))).outcomes == {Outcome.WRONG: 1}


def test_an_error_is_allowed_by_policy_fail_only() -> None:
    error = Answer((), "error", None)
    assert len(judge(Scripted("decode", error)).broken) == 1
    tally = judge(Scripted("decode", error), errors_allowed=True)
    assert (tally.outcomes, tally.broken) == ({Outcome.ERROR: 1}, [])


def test_no_answer_is_late_by_the_sides_own_clock_and_aborted() -> None:
    decode = Scripted("decode", None)
    tally = judge(decode)
    assert tally.outcomes == {Outcome.LATE: 1}
    assert len(tally.broken) == 1
    assert decode.aborted == ["request-1-decode"]


def test_the_death_of_its_own_process_is_nobodys_fault() -> None:
    for decode, prefill in (
        (Scripted("decode", Died("killed")), None),
        (Scripted("decode", RIGHT), Scripted("prefill", Died("killed"))),
    ):
        tally = judge(decode, prefill=prefill)
        assert (tally.outcomes, tally.broken) == ({Outcome.CUT: 1}, [])
