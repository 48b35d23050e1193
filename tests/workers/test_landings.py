"""Whole transfers through the bounce buffer and through stages, with real workers: bytes, faults, room."""

from __future__ import annotations

import pytest

from hawk_connector.decode.worker import LoadEnd
from hawk_connector.transport.memory import Corrupt, Fail, Hang, MemoryFabric
from tests.transport.waiting import eventually
from tests.workers.sides import DecodeSide, PrefillSide, Sides, wait_idle
from tests.workers.source import Geometry, Prompt
from tt_plugin.landing import BounceLanding, LandingChoice, StagedLanding

pytestmark = pytest.mark.slow

GEOMETRY = Geometry()
BLOCKS = [9, 2, 13, 4]
OTHERS = [1, 3, 5, 7]
TOKENS = 200
KIB = 1 << 10
CHOICES = {
    "bounce": LandingChoice(path="bounce", bounce_buffer_bytes=1 << 20),
    "bounce-staged": LandingChoice(path="bounce", placement="staged", stage_bytes_per_bank=256 * KIB),
    "direct-staged": LandingChoice(path="direct", placement="staged", stage_bytes_per_bank=256 * KIB),
    "by-counts": LandingChoice(path="direct", placement=None, stage_bytes_per_bank=256 * KIB),
}


def both(
    sides: Sides, fabric: MemoryFabric, choice: LandingChoice, **more: object
) -> tuple[PrefillSide, DecodeSide, BounceLanding | StagedLanding]:
    prefill = sides.prefill(GEOMETRY, fabric.factory(), parcel_tokens=64)
    decode = sides.decode(
        GEOMETRY, fabric.factory(timeout_s=60.0), kind="per_layer", landing=choice, read_threads=2, **more
    )
    landing = decode.landing
    assert isinstance(landing, (BounceLanding, StagedLanding))
    return prefill, decode, landing


@pytest.mark.parametrize("device", ["blackhole-p150", "blackhole-p100", "wormhole-n150"])
@pytest.mark.parametrize("choice", CHOICES.values(), ids=CHOICES)
def test_a_transfer_arrives_whole(sides: Sides, fabric: MemoryFabric, choice: LandingChoice, device: str) -> None:
    prefill, decode, landing = both(sides, fabric, choice, device=device, chips=2)
    running = prefill.run(Prompt(GEOMETRY, TOKENS, seed=1))
    report = decode.pull(prefill, running, BLOCKS)
    # Four parcels of a block; bytes for each bank are those that were on the wire, as every block is wanted.
    assert report.parcels == 4
    assert sum(nbytes for _, _, nbytes in report.bank_fill) == report.wire_bytes
    assert landing.held_bytes == 0
    prefill.wait_released(running)
    wait_idle(prefill, decode)


@pytest.mark.parametrize("choice", CHOICES.values(), ids=CHOICES)
def test_blocks_that_decode_has_are_not_written(sides: Sides, fabric: MemoryFabric, choice: LandingChoice) -> None:
    """Parcels of two blocks, of which the first has one block that decode has: it stays as it was."""
    prefill = sides.prefill(GEOMETRY, fabric.factory(), parcel_tokens=128)
    decode = sides.decode(GEOMETRY, fabric.factory(), kind="per_layer", landing=choice, parcel_digest=True)
    prompt = Prompt(GEOMETRY, TOKENS, seed=1)
    running = prefill.run(prompt)
    request = decode.load(prefill.ticket(running), BLOCKS[1:], first_block=1)
    assert decode.wait(request).ok, decode.report(request).reason
    assert decode.touched() == 3 * decode.layout.block_bytes
    prefill.wait_released(running)
    wait_idle(prefill, decode)


@pytest.mark.parametrize("choice", [CHOICES["bounce"], CHOICES["direct-staged"]], ids=["bounce", "direct-staged"])
def test_late_bytes_of_a_failed_read_hit_nobody(sides: Sides, fabric: MemoryFabric, choice: LandingChoice) -> None:
    """Its memory is held until the fence; the bytes are still under way when the load is reported, and then no more."""
    prefill, decode, landing = both(sides, fabric, choice)
    decode.pull(prefill, first := prefill.run(Prompt(GEOMETRY, TOKENS, seed=1)), OTHERS)
    decode.wipe()
    fabric.inject(Fail(late=True))
    failed = prefill.run(Prompt(GEOMETRY, TOKENS, seed=2))
    request = decode.load(prefill.ticket(failed), BLOCKS)
    assert decode.wait(request) == LoadEnd(request, False, tuple(BLOCKS))
    # The fence has passed, so nothing is held, and the late bytes are refused.
    assert landing.held_bytes == 0
    assert fabric.release_late() == 0
    good = prefill.run(Prompt(GEOMETRY, TOKENS, seed=3))
    decode.pull(prefill, good, BLOCKS)
    prefill.wait_released(first, failed, good)
    wait_idle(prefill, decode)


def test_memory_of_a_read_that_hangs_is_held_and_others_use_what_is_left(sides: Sides, fabric: MemoryFabric) -> None:
    """Two prefill sides, room for two parcels: one's read hangs with its parcel's memory, the other's go on."""
    prefill, decode, landing = both(sides, fabric, CHOICES["bounce"])
    other = sides.prefill(GEOMETRY, fabric.factory(), parcel_tokens=64)
    parcel = decode.layout.block_bytes
    fabric.inject(Hang())
    hung = prefill.run(Prompt(GEOMETRY, 50, seed=1))
    request = decode.load(prefill.ticket(hung), [9])
    eventually(lambda: landing.held_bytes > 0, "the read hangs")
    running = other.run(Prompt(GEOMETRY, TOKENS, seed=2))
    decode.pull(other, running, OTHERS)
    assert landing.held_bytes == parcel
    fabric.release_hung()
    assert decode.wait(request).ok
    decode.check(hung.prompt, [9])
    prefill.wait_released(hung)
    other.wait_released(running)
    wait_idle(prefill, other, decode)


def test_a_buffer_for_one_parcel_is_enough(sides: Sides, fabric: MemoryFabric) -> None:
    """Two readers, room for one: they take turns, and no parcel fails."""
    size = -(-2 * GEOMETRY.layers * GEOMETRY.kv_heads * 64 * GEOMETRY.head_dim * 4 // 65536) * 65536
    prefill, decode, landing = both(sides, fabric, LandingChoice(path="bounce", bounce_buffer_bytes=size))
    assert decode.layout.block_bytes <= size < 2 * decode.layout.block_bytes
    running = prefill.run(Prompt(GEOMETRY, TOKENS, seed=1))
    assert decode.pull(prefill, running, BLOCKS).parcels == 4
    assert landing.held_bytes == 0
    prefill.wait_released(running)
    wait_idle(prefill, decode)


def test_a_parcel_too_large_fails_its_load_and_says_what_to_change(sides: Sides, fabric: MemoryFabric) -> None:
    prefill = sides.prefill(GEOMETRY, fabric.factory(), parcel_tokens=256)
    choice = LandingChoice(path="bounce", bounce_buffer_bytes=64 * KIB)
    decode = sides.decode(GEOMETRY, fabric.factory(), kind="per_layer", landing=choice)
    running = prefill.run(Prompt(GEOMETRY, TOKENS, seed=1))
    request = decode.load(prefill.ticket(running), BLOCKS)
    assert decode.wait(request) == LoadEnd(request, False, tuple(BLOCKS))
    report = decode.report(request)
    assert "Raise tt_plugin.landing.bounce_buffer_bytes, or lower parcel_tokens" in report.reason
    # It is no fault of the peer's: nothing was read, so no engine is dropped and no peer judged.
    assert report.failure == "room"
    assert "fences" not in (decode.worker.log.take() or {}).get("counters", {})
    assert decode.touched() == 0
    prefill.wait_released(running)
    wait_idle(prefill, decode)


@pytest.mark.parametrize("choice", CHOICES.values(), ids=CHOICES)
def test_bytes_whose_digest_is_wrong_are_not_written(sides: Sides, fabric: MemoryFabric, choice: LandingChoice) -> None:
    """The digest is looked at in host memory or in the stages: no page of the pools is touched."""
    prefill = sides.prefill(GEOMETRY, fabric.factory(), parcel_tokens=256, parcel_digest=True)
    decode = sides.decode(GEOMETRY, fabric.factory(), kind="per_layer", landing=choice)
    fabric.inject(Corrupt(segment=1, xor=1))
    running = prefill.run(Prompt(GEOMETRY, TOKENS, seed=1))
    request = decode.load(prefill.ticket(running), BLOCKS)
    assert not decode.wait(request).ok
    assert decode.report(request).failure == "corrupt"
    assert decode.touched() == 0
    again = prefill.run(Prompt(GEOMETRY, TOKENS, seed=2))
    decode.pull(prefill, again, BLOCKS)
    prefill.wait_released(running, again)
    wait_idle(prefill, decode)
