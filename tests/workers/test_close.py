"""What a closed worker leaves behind: nothing, whatever it was doing."""

from __future__ import annotations

import os
import threading

import pytest

from hawk_connector.transport.memory import Hang, MemoryFabric
from tests.transport.waiting import eventually
from tests.workers.sides import DecodeSide, PrefillSide
from tests.workers.source import Geometry, Prompt

pytestmark = pytest.mark.slow

GEOMETRY = Geometry()


def ours() -> list[str]:
    return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("hawk-"))


@pytest.mark.parametrize("busy", [False, True])
def test_no_thread_and_no_descriptor_is_left(busy: bool) -> None:
    """``busy``: a read hangs and parcels wait when both sides are closed."""
    fabric = MemoryFabric()
    fabric.engine().close()
    threads, descriptors = ours(), len(os.listdir("/proc/self/fd"))
    prefill = PrefillSide(GEOMETRY, fabric.factory())
    decode = DecodeSide(GEOMETRY, fabric.factory(timeout_s=3.0))
    decode.pull(prefill, prefill.run(Prompt(GEOMETRY, 100, seed=1)), [1, 2])
    if busy:
        fabric.inject(Hang())
        running = prefill.run(Prompt(GEOMETRY, 100, seed=2))
        decode.load(prefill.ticket(running), [3, 4])
        eventually(lambda: decode.status().held["reads"] == 1, "the read hangs")
    assert {name.partition("-127")[0].partition("_")[0] for name in ours()} >= {"hawk-prefill", "hawk-decode"}
    prefill.close()
    assert decode.worker.close()
    eventually(lambda: ours() == threads, "the threads end")
    assert len(os.listdir("/proc/self/fd")) == descriptors
