"""A prefill side that is stopped during a read and goes on after the read has failed, over real Mooncake.

The bytes that were under way then arrive in memory that another request owns, unless the engine was dropped first.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import msgspec
import numpy as np
import pytest

from hawk_connector.protocol.ticket import Ticket
from hawk_connector.transport.engine import TransferEngine
from hawk_connector.transport.mooncake import MooncakeEngine
from tests.chaos.marked_prefill import Job
from tests.transport.waiting import eventually
from tests.workers.sides import UNTOUCHED, DecodeSide

pytestmark = pytest.mark.e2e

MIB = 1 << 20
TIMEOUT_S = 5
# 256 MiB a transfer: a read that is stopped near its start owes far more than the 100 MB that must be seen.
JOB = Job(layers=8, kv_heads=8, head_dim=128, tokens=4096, marks=[1000.5, 2000.25])
LATE_BYTES = 100_000_000
FIRST, SECOND = range(0, 64), range(64, 128)
OTHER_OWNER = 0x5A


class Unfenced(MooncakeEngine):
    """Mooncake as it is without the fence: closing it keeps the object, and so its late writes."""

    def _close(self) -> None:
        pass

    def drop(self) -> None:
        super()._close()


class StoppablePrefill:
    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.chaos.marked_prefill", msgspec.json.encode(JOB).decode()],
            cwd=Path(__file__).parents[2],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert self.process.stdout is not None
        self.tickets = msgspec.json.decode(self.process.stdout.readline(), type=list[Ticket])

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def end(self) -> None:
        self.process.kill()
        self.process.wait(10)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


@pytest.fixture
def prefill() -> Iterator[StoppablePrefill]:
    prefill = StoppablePrefill()
    yield prefill
    prefill.end()


def unit_pages(decode: DecodeSide, blocks: range) -> tuple[np.ndarray, np.ndarray]:
    """(banks, slots) of every page of ``blocks`` in each pool."""
    units = np.arange(blocks.start, blocks.stop)
    per_unit = decode.layout.pages_per_unit
    pages = (units[:, None] * per_unit + np.arange(per_unit)).reshape(-1)
    return pages % decode.layout.banks, pages // decode.layout.banks


def own(decode: DecodeSide, blocks: range, value: int) -> None:
    """Another request writes its KV into ``blocks``."""
    where = unit_pages(decode, blocks)
    for pool in range(decode.layout.pools):
        decode.pools.pages(0, pool)[where] = value


def others(decode: DecodeSide, blocks: range, value: int) -> int:
    """Bytes in ``blocks`` that are not ``value``; a chunk at a time, since there are hundreds of millions."""
    banks, slots = unit_pages(decode, blocks)
    count = 0
    for pool in range(decode.layout.pools):
        pages = decode.pools.pages(0, pool)
        for part in np.array_split(np.arange(len(banks)), 64):
            count += int((pages[banks[part], slots[part]] != value).sum())
    return count


def holds(decode: DecodeSide, blocks: range, mark: float) -> bool:
    """Whether every element of ``blocks`` is ``mark``."""
    banks, slots = unit_pages(decode, blocks)
    for pool in range(decode.layout.pools):
        pages = decode.pools.pages(0, pool)
        for part in np.array_split(np.arange(len(banks)), 64):
            found = np.ascontiguousarray(pages[banks[part], slots[part]]).view(np.float32)
            if not (found == mark).all():
                return False
    return True


def late_bytes(prefill: StoppablePrefill, decode: DecodeSide) -> int:
    """Bytes that came into FIRST's blocks after their next owner had written there."""
    first, second = prefill.tickets
    load = decode.load(first, list(FIRST))
    banks, slots = (index[:: decode.layout.banks] for index in unit_pages(decode, FIRST))
    heads = [decode.pools.pages(0, pool) for pool in range(decode.layout.pools)]

    def begun() -> bool:
        return any((pages[banks, slots, :4] != UNTOUCHED).any() for pages in heads)

    eventually(begun, "the read begins", deadline_s=60)
    prefill.signal(signal.SIGSTOP)
    end = decode.wait(load)
    assert not end.ok, "the read had ended before its peer was stopped"
    assert f"gave no sign for {TIMEOUT_S} s" in decode.report(load).reason
    assert others(decode, FIRST, UNTOUCHED) > 0
    # What vLLM may do once the load is reported: the blocks are another request's.
    own(decode, FIRST, OTHER_OWNER)
    assert others(decode, FIRST, OTHER_OWNER) == 0
    prefill.signal(signal.SIGCONT)
    # A whole transfer from the same peer: it runs again, and has had the time to write what it owed.
    for _attempt in range(30):
        again = decode.load(second, list(SECOND))
        if decode.wait(again).ok:
            break
        eventually(lambda: decode.status().held["loads"] == 0, "the failed load is over")
    assert holds(decode, SECOND, JOB.marks[1])
    return others(decode, FIRST, OTHER_OWNER)


def decode_side(stack: ExitStack, kind: type[MooncakeEngine]) -> tuple[DecodeSide, list[MooncakeEngine]]:
    made: list[MooncakeEngine] = []

    def make() -> TransferEngine:
        made.append(kind("127.0.0.1", protocol="tcp", timeout_s=TIMEOUT_S))
        return made[-1]

    decode = DecodeSide(JOB.geometry(), make, num_blocks=128, transfer_timeout_s=TIMEOUT_S)
    stack.callback(decode.close)
    return decode, made


def test_no_late_byte_reaches_the_next_owner(prefill: StoppablePrefill) -> None:
    with ExitStack() as stack:
        decode, made = decode_side(stack, MooncakeEngine)
        assert late_bytes(prefill, decode) == 0
        assert len(made) >= 2, "the engine was replaced"
        assert made[0].closed


def test_without_the_fence_more_than_100_megabytes_do(prefill: StoppablePrefill) -> None:
    """The same with an engine whose close does nothing: what the test above would see."""
    with ExitStack() as stack:
        decode, made = decode_side(stack, Unfenced)
        # Before the pools are freed, whose memory they still write.
        stack.callback(lambda: [engine.drop() for engine in made if isinstance(engine, Unfenced)])
        assert late_bytes(prefill, decode) > 0
        eventually(lambda: others(decode, FIRST, OTHER_OWNER) > LATE_BYTES, "late bytes arrive", deadline_s=60)
