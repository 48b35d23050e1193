"""Sides that have nothing to do take next to nothing of the processor, also after transfers."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack

import pytest

from hawk_connector.config import HawkConfig
from hawk_connector.transport.carrier import configured_factory
from tests.workers.sides import Sides, wait_idle
from tests.workers.source import Geometry, Prompt

pytestmark = pytest.mark.slow

SECONDS = 4.0


@pytest.mark.parametrize("protocol", ["tcp", "local"])
def test_idle_sides_take_under_three_hundredths_of_a_core(protocol: str) -> None:
    """Processor time of this process, which has both sides, and not time on the wall."""
    geometry = Geometry()
    with ExitStack() as stack:
        sides = Sides(stack)
        engines = {
            role: configured_factory(HawkConfig.parse({"protocol": protocol}, role), 1024)
            for role in ("kv_producer", "kv_consumer")
        }
        prefill = sides.prefill(geometry, engines["kv_producer"], protocol=protocol)
        decode = sides.decode(geometry, engines["kv_consumer"], protocol=protocol)
        for seed in range(3):
            decode.pull(prefill, prefill.run(Prompt(geometry, 100, seed)), [seed * 2, seed * 2 + 1])
        wait_idle(prefill, decode)
        before = os.times()
        time.sleep(SECONDS)
        after = os.times()
        share = (after.user + after.system - before.user - before.system) / SECONDS
        print(f"{share:.2%} of a core for both sides")
        assert share < 0.03
