"""Fixtures that more than one room uses."""

from __future__ import annotations

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
