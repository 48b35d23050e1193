"""Engines that several end-to-end tests share: starting one costs ten seconds, so a module starts a pair once."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import Engine, decode_engine, prefill_engine
from tests.models.tiny import TinyLlama

Start = Callable[..., tuple[Engine, Engine]]


@pytest.fixture(scope="module")
def tiny(model_cache: Path) -> Path:
    return TinyLlama().directory(model_cache)


@pytest.fixture
def start_pair(tmp_path: Path) -> Iterator[Start]:
    """Starts a prefill and a decode engine side by side; both end with the test."""
    with ExitStack() as stack:

        def start(
            model: Path, prefill: dict[str, Any] | None = None, decode: dict[str, Any] | None = None
        ) -> tuple[Engine, Engine]:
            number = len(list(tmp_path.iterdir()))
            sides = (
                prefill_engine(model, tmp_path / f"prefill-{number}.log", **(prefill or {})),
                decode_engine(**{"model": model, "log": tmp_path / f"decode-{number}.log", **(decode or {})}),
            )
            for engine in sides:
                stack.callback(engine.stop)
                engine.start()
            for engine in sides:
                engine.wait_ready()
            return sides

        yield start


def prompt(tokens: int, seed: int = 0, vocabulary: int = 384) -> list[int]:
    """A random prompt; ids 0 to 2 are special."""
    rng = random.Random(f"{tokens}/{seed}")
    return [rng.randrange(3, vocabulary) for _ in range(tokens)]
