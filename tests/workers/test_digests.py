"""Digests with real workers: bytes that change on the way fail the load, whichever side asked."""

from __future__ import annotations

import pytest

from hawk_connector.decode.worker import LoadEnd
from hawk_connector.transport.memory import Corrupt, MemoryFabric
from tests.workers.sides import DecodeSide, PrefillSide, Sides, wait_idle
from tests.workers.source import Geometry, Prompt

pytestmark = pytest.mark.slow

GEOMETRY = Geometry()
BLOCKS = [9, 2, 13, 4]
TOKENS = 200


def both(sides: Sides, fabric: MemoryFabric, prefill: bool, decode: bool) -> tuple[PrefillSide, DecodeSide]:
    return (
        sides.prefill(GEOMETRY, fabric.factory(), parcel_tokens=128, parcel_digest=prefill),
        sides.decode(GEOMETRY, fabric.factory(), parcel_digest=decode),
    )


@pytest.mark.parametrize(("prefill", "decode"), [(True, False), (False, True), (True, True)])
def test_one_flipped_bit_fails_the_load_and_the_next_is_right(
    sides: Sides, fabric: MemoryFabric, prefill: bool, decode: bool
) -> None:
    p, d = both(sides, fabric, prefill, decode)
    first = p.run(Prompt(GEOMETRY, TOKENS, seed=1))
    d.pull(p, first, BLOCKS)
    d.wipe()
    fabric.inject(Corrupt(segment=1, xor=1))
    second = p.run(Prompt(GEOMETRY, TOKENS, seed=2))
    request = d.load(p.ticket(second), BLOCKS)
    assert d.wait(request) == LoadEnd(request, False, tuple(BLOCKS))
    report = d.report(request)
    assert (report.outcome, report.failure) == ("failed", "corrupt")
    assert "the bytes that came have digest" in report.reason
    third = p.run(Prompt(GEOMETRY, TOKENS, seed=3))
    d.pull(p, third, BLOCKS)
    p.wait_released(first, second, third)
    wait_idle(p, d)


@pytest.mark.parametrize("first_block", [1, 2, 3])
def test_blocks_that_decode_has_are_left_out(sides: Sides, fabric: MemoryFabric, first_block: int) -> None:
    """Parcels of two blocks, so that 1 and 3 cut one in the middle."""
    p, d = both(sides, fabric, False, True)
    running = p.run(Prompt(GEOMETRY, TOKENS, seed=1))
    request = d.load(p.ticket(running), BLOCKS[first_block:], first_block)
    assert d.wait(request).ok, d.report(request).reason
    fabric.inject(Corrupt(segment=0, xor=8))
    other = p.run(Prompt(GEOMETRY, TOKENS, seed=2))
    request = d.load(p.ticket(other), BLOCKS[first_block:], first_block)
    assert not d.wait(request).ok and d.report(request).failure == "corrupt"
    p.wait_released(running, other)
    wait_idle(p, d)


def test_without_it_the_flipped_bit_is_not_seen(sides: Sides, fabric: MemoryFabric) -> None:
    """That the tests above show the digest at work: nothing else looks at the bytes."""
    p, d = both(sides, fabric, False, False)
    running = p.run(Prompt(GEOMETRY, TOKENS, seed=1))
    fabric.inject(Corrupt(segment=1, xor=1))
    request = d.load(p.ticket(running), BLOCKS)
    assert d.wait(request).ok
    p.wait_released(running)
