"""Sides that end with their test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from hawk_connector.transport.memory import MemoryFabric
from tests.workers.sides import Sides


@pytest.fixture
def sides() -> Iterator[Sides]:
    with ExitStack() as stack:
        yield Sides(stack)


@pytest.fixture
def fabric() -> MemoryFabric:
    return MemoryFabric()
