"""Fixtures that more than one room uses."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from hypothesis import settings


@pytest.fixture(scope="session")
def model_cache(request: pytest.FixtureRequest) -> Path:
    """Where random test models are kept between runs (`make clean` removes it with pytest's cache)."""
    cache = request.config.cache
    assert cache is not None
    return Path(cache.mkdir("models"))


# How long an example takes says how busy the machine is.
settings.register_profile("hawk", deadline=None)
settings.load_profile("hawk")

# A shell's background jobs ignore SIGINT, and so would all processes that tests start there and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
