"""What a Python without TTNN says."""

from __future__ import annotations

import pytest

from hawk_connector.errors import ConfigError
from tt_plugin.device.ttnn_device import TtnnDevice


def test_a_python_without_ttnn_says_what_to_install() -> None:
    with pytest.raises(ConfigError, match=r"this Python has no ttnn: .*Install tt-metal, or the ttnn wheel"):
        TtnnDevice.open()
