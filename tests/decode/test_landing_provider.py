"""Finding the device package's landing."""

from __future__ import annotations

import pytest

from hawk_connector.decode.landing import landing_provider
from hawk_connector.errors import ConfigError
from tt_plugin.landing import from_kv_caches


def test_the_only_installed_provider_needs_no_name() -> None:
    assert landing_provider(None) is from_kv_caches
    assert landing_provider("tt_plugin") is from_kv_caches


def test_an_unknown_provider_names_the_installed_ones() -> None:
    with pytest.raises(ConfigError, match=r"installed landing providers \(tt_plugin\), got 'tt-plugin'"):
        landing_provider("tt-plugin")
