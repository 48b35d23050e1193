"""Either side killed and started again at its address, and new ones that join: nobody else is restarted."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from hawk_connector.cli.free_ports import free_ports
from hawk_connector.transport.curve import write_key_pair
from tests.chaos.deployment import reference_answers
from tests.chaos.load import REMOTE_DECODE, Prompt
from tests.chaos.side import Side
from tests.e2e.conftest import prompt
from tests.e2e.harness import Engine, decode_engine, prefill_engine
from tests.models.tiny import TinyLlama

pytestmark = pytest.mark.e2e

DECODE: dict[str, Any] = {"hello_deadline_s": 2.0, "admission_deadline_s": 3.0}
HOST = "127.0.0.1"


class Sides:
    """Engines on loopback whose keys are checked; a new one's key is added to the files of those that run."""

    def __init__(self, model: Path, directory: Path, stack: AsyncExitStack) -> None:
        self._model = model
        self._directory = directory
        self._stack = stack
        self._known = directory / "known"
        self._known.write_text("")
        # Of different lengths, none asked twice.
        tokens = [tuple(prompt(70 + 10 * number)) for number in range(12)]
        self._prompts = iter(reference_answers(model, directory / "alone.log", tokens, [12] * len(tokens)))

    def prefill(self, name: str) -> Side:
        return self._side(name, lambda log, config: prefill_engine(self._model, log, config))

    def decode(self, name: str) -> Side:
        return self._side(name, lambda log, config: decode_engine(self._model, log, config={**DECODE, **config}))

    def _side(self, name: str, engine: Any) -> Side:
        (port,) = free_ports(1)
        key = self._directory / f"{name}.key"
        with self._known.open("a") as known:
            known.write(f"{HOST}:{port} {write_key_pair(key).decode('ascii')}\n")
        config = {
            "side_channel_port": port,
            "curve_key_file": str(key),
            "curve_known_keys_file": str(self._known),
        }
        made: Engine = engine(self._directory / f"{name}.unused", config)
        side = Side(name, made.options, made.environment, lambda log: (self._directory / log).open("wb"))
        self._stack.push_async_callback(side.close)
        return side

    async def request(self, prefill: Side, decode: Side) -> str:
        """A request over both legs, answered right; how its KV came: "completed", or "" if decode computed it."""
        asked = next(self._prompts)
        before = (await decode.ask()).transfers
        number = len(asked.tokens)
        sent = await prefill.generate(f"p{number}", asked.tokens, 1, REMOTE_DECODE)
        return await self.load(asked, before, sent.params, decode)

    async def load(self, asked: Prompt, before: dict[str, int], params: dict[str, Any] | None, decode: Side) -> str:
        answer = await decode.generate(f"d{len(asked.tokens)}", asked.tokens, len(asked.answer), params)
        assert answer.tokens == asked.answer
        after = (await decode.ask()).transfers
        grown = [outcome for outcome in after if after[outcome] != before.get(outcome, 0)]
        assert len(grown) <= 1
        return grown[0] if grown else ""

    async def orphan(self, prefill: Side, decode: Side) -> str:
        """The same, but the prefill side is killed between the legs."""
        asked = next(self._prompts)
        before = (await decode.ask()).transfers
        sent = await prefill.generate("orphan", asked.tokens, 1, REMOTE_DECODE)
        await prefill.kill()
        return await self.load(asked, before, sent.params, decode)


async def lives(*sides: Side) -> list[tuple[int, str]]:
    """Process and epoch of each side."""
    return [(side.pid, (await side.ask()).epoch) for side in sides]


async def scenario(model: Path, directory: Path) -> None:
    async with AsyncExitStack() as stack:
        sides = Sides(model, directory, stack)
        prefill, decode = sides.prefill("prefill"), sides.decode("decode")
        await asyncio.gather(prefill.start(), decode.start())
        assert await sides.request(prefill, decode) == "completed"

        # Prefill dies between a request's legs, and comes back.
        (survivor,) = await lives(decode)
        (old,) = await lives(prefill)
        assert await sides.orphan(prefill, decode) == ""
        await prefill.start()
        assert await sides.request(prefill, decode) == "completed"
        assert await lives(decode) == [survivor]
        (new,) = await lives(prefill)
        assert old[0] != new[0] and old[1] != new[1]

        # Decode dies, and comes back.
        await decode.kill()
        await decode.start()
        assert await sides.request(prefill, decode) == "completed"
        assert await lives(prefill) == [new]

        # Two more join.
        before = await lives(prefill, decode)
        second_prefill, second_decode = sides.prefill("prefill-2"), sides.decode("decode-2")
        await asyncio.gather(second_prefill.start(), second_decode.start())
        for source, target in (
            (second_prefill, decode),
            (prefill, second_decode),
            (second_prefill, second_decode),
            (prefill, decode),
        ):
            assert await sides.request(source, target) == "completed", (source.name, target.name)
        assert await lives(prefill, decode) == before
        for side in (prefill, decode, second_prefill, second_decode):
            assert side.deaths == []


def test_restarts_and_joins(model_cache: Path, tmp_path: Path) -> None:
    asyncio.run(scenario(TinyLlama().directory(model_cache), tmp_path))
