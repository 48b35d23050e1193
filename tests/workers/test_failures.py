"""Aborts in every phase, reads that fail with bytes still under way, and what is held afterwards: nothing."""

from __future__ import annotations

import time

import pytest

from hawk_connector.decode.worker import LoadEnd
from hawk_connector.prefill.metadata import PrefillStep, RequestProgress
from hawk_connector.transport.memory import Corrupt, Fail, Hang, MemoryFabric
from tests.transport.waiting import eventually
from tests.workers.gate import Gate
from tests.workers.sides import DecodeSide, PrefillSide, Sides, wait_idle
from tests.workers.source import Geometry, Prompt

pytestmark = pytest.mark.slow

GEOMETRY = Geometry()
BLOCKS = [9, 2, 13, 4]
TOKENS = 200


def pair(prefill: PrefillSide, decode: DecodeSide) -> None:
    decode.pull(prefill, running := prefill.run(Prompt(GEOMETRY, 1, seed=99)), [0])
    prefill.wait_released(running)
    decode.wipe()


def both(sides: Sides, fabric: MemoryFabric, gate: Gate | None = None) -> tuple[PrefillSide, DecodeSide]:
    sources = gate.sources() if gate else None
    prefill = sides.prefill(GEOMETRY, fabric.factory(), gate=sources, parcel_tokens=64)
    decode = sides.decode(GEOMETRY, fabric.factory(timeout_s=60.0), read_threads=2)
    pair(prefill, decode)
    return prefill, decode


def still_serves(prefill: PrefillSide, decode: DecodeSide) -> None:
    """The same two sides move the next request, and hold nothing afterwards."""
    running = prefill.run(Prompt(GEOMETRY, 150, seed=77))
    decode.pull(prefill, running, [6, 5, 1])
    prefill.wait_released(running)
    wait_idle(prefill, decode)


# --- prefill aborts


def test_prefill_aborts_before_anything_is_computed(sides: Sides, fabric: MemoryFabric) -> None:
    prefill, decode = both(sides, fabric)
    running = prefill.begin(Prompt(GEOMETRY, TOKENS, seed=1))
    prefill.abandon(running)
    prefill.wait_released(running)
    assert prefill.reports()[-1].outcome == "aborted"
    still_serves(prefill, decode)


def test_prefill_aborts_while_a_pack_is_out(sides: Sides, fabric: MemoryFabric) -> None:
    gate = Gate()
    prefill, decode = both(sides, fabric, gate)
    running = prefill.begin(Prompt(GEOMETRY, TOKENS, seed=1))
    gate.shut(after=1)
    prefill.compute(running, 100)
    gate.wait_for_a_pack()
    prefill.abandon(running)
    # The pack still reads the blocks, so vLLM must not have them.
    assert prefill.held("packs") == [1]
    assert prefill.workers[0].take_finished({running.name}) is None
    gate.open()
    prefill.wait_released(running)
    still_serves(prefill, decode)


def test_prefill_aborts_with_parcels_packed(sides: Sides, fabric: MemoryFabric) -> None:
    prefill, decode = both(sides, fabric)
    running = prefill.begin(Prompt(GEOMETRY, TOKENS, seed=1))
    prefill.compute(running, 130)
    eventually(lambda: prefill.held("regions") == [2], "two parcels are packed")
    prefill.abandon(running)
    prefill.wait_released(running)
    still_serves(prefill, decode)


def test_prefill_aborts_what_decode_is_reading(sides: Sides, fabric: MemoryFabric) -> None:
    prefill, decode = both(sides, fabric)
    running = prefill.begin(Prompt(GEOMETRY, TOKENS, seed=1))
    prefill.compute(running, 130)
    request = decode.load(prefill.ticket(running), BLOCKS)
    eventually(lambda: decode.touched() > 0, "a parcel lands")
    prefill.abandon(running)
    assert decode.wait(request) == LoadEnd(request, False, tuple(BLOCKS))
    assert decode.report(request).reason.endswith("gave the transfer up: aborted")
    prefill.wait_released(running)
    still_serves(prefill, decode)


# --- decode aborts


def test_decode_aborts_before_the_first_parcel(sides: Sides, fabric: MemoryFabric) -> None:
    prefill, decode = both(sides, fabric)
    running = prefill.begin(Prompt(GEOMETRY, TOKENS, seed=1))
    request = decode.load(prefill.ticket(running), BLOCKS)
    eventually(lambda: prefill.statuses()[0].held["transfers"] == 1, "the request runs")
    decode.abort(request)
    # An aborted load is no failed one: its blocks are vLLM's again, and nobody must recompute them.
    assert decode.wait(request) == LoadEnd(request, True, tuple(BLOCKS))
    assert decode.report(request).outcome == "aborted"
    prefill.compute(running, TOKENS)
    prefill.finish(running)
    prefill.wait_released(running)
    assert decode.touched() == 0
    still_serves(prefill, decode)


def test_decode_aborts_while_a_read_runs(sides: Sides, fabric: MemoryFabric) -> None:
    prefill, decode = both(sides, fabric)
    before = len(fabric.records)
    fabric.inject(Hang())
    running = prefill.run(Prompt(GEOMETRY, TOKENS, seed=1))
    request = decode.load(prefill.ticket(running), BLOCKS)

    def only_the_hung_one_is_left() -> bool:
        """Of the two readers one hangs; the other has landed the other three of the four parcels."""
        return len(fabric.records) - before == len(BLOCKS) - 1 and decode.status().held["reads"] == 1

    eventually(only_the_hung_one_is_left, "only the hung read is left")
    decode.abort(request)
    held = decode.status().held
    assert (held["reads"], held["quarantined_blocks"]) == (1, len(BLOCKS))
    assert request not in decode.poll()
    fabric.release_hung()
    assert decode.wait(request) == LoadEnd(request, True, tuple(BLOCKS))
    landed = decode.touched()
    prefill.wait_released(running)
    still_serves_after(landed, prefill, decode)


def still_serves_after(landed: int, prefill: PrefillSide, decode: DecodeSide) -> None:
    """Nothing more has landed since ``landed`` was counted."""
    wait_idle(prefill, decode)
    assert decode.touched() == landed
    still_serves(prefill, decode)


def test_decode_aborts_between_two_parcels(sides: Sides, fabric: MemoryFabric) -> None:
    prefill, decode = both(sides, fabric)
    running = prefill.begin(Prompt(GEOMETRY, TOKENS, seed=1))
    prefill.compute(running, 100)
    request = decode.load(prefill.ticket(running), BLOCKS)
    eventually(lambda: prefill.held("regions") == [0] and decode.touched() > 0, "the first parcel is accepted")
    landed = decode.touched()
    decode.abort(request)
    decode.wait(request)
    prefill.compute(running, TOKENS)
    prefill.finish(running)
    prefill.wait_released(running)
    still_serves_after(landed, prefill, decode)


def test_an_abort_of_an_unknown_load_changes_nothing(sides: Sides, fabric: MemoryFabric) -> None:
    prefill, decode = both(sides, fabric)
    decode.abort("never loaded")
    assert decode.poll().keys() == {"load-1"}
    still_serves(prefill, decode)


# --- reads that fail


@pytest.mark.parametrize("after", [0, 3])
def test_a_failed_read_is_fenced_before_it_is_reported(sides: Sides, fabric: MemoryFabric, after: int) -> None:
    prefill, decode = both(sides, fabric)
    fabric.inject(Fail(after_segments=after, late=True))
    running = prefill.run(Prompt(GEOMETRY, 64, seed=1))
    request = decode.load(prefill.ticket(running), [9])
    end = decode.wait(request)
    assert end == LoadEnd(request, False, (9,))
    assert f"failed after {after} of" in decode.report(request).reason
    # vLLM has the block now, and writes another's KV there: not one late byte may follow.
    decode.wipe()
    assert fabric.release_late() == 0
    assert decode.touched() == 0
    prefill.wait_released(running)
    still_serves(prefill, decode)


def test_a_failure_waits_for_the_reads_beside_it(sides: Sides, fabric: MemoryFabric) -> None:
    """One engine carries both reads: it cannot be dropped under the healthy one, which stays healthy."""
    prefill, decode = both(sides, fabric)
    healthy, broken = (prefill.run(Prompt(GEOMETRY, 64, seed=i)) for i in (1, 2))
    batches = len(fabric.records)
    fabric.inject(Hang(), Fail(late=True))
    first = decode.load(prefill.ticket(healthy), [3])
    eventually(lambda: decode.status().held["reads"] == 1, "the healthy read hangs")
    second = decode.load(prefill.ticket(broken), [9])
    eventually(lambda: len(fabric.records) == batches + 1, "the other read fails")
    eventually(lambda: decode.status().held["fences"] == 1, "the fence is wanted")
    assert decode.status().held["quarantined_blocks"] == 1
    assert second not in decode.poll()
    # Unfenced still: what was under way lands, in a block that vLLM has not been given back.
    assert fabric.release_late() > 0
    fabric.release_hung()
    assert decode.wait(first).ok
    decode.check(healthy.prompt, [3])
    assert decode.wait(second) == LoadEnd(second, False, (9,))
    prefill.wait_released(healthy, broken)
    still_serves(prefill, decode)


def test_other_peers_notice_nothing_of_a_fence(sides: Sides, fabric: MemoryFabric) -> None:
    prefill, decode = both(sides, fabric)
    other = sides.prefill(GEOMETRY, fabric.factory())
    other_running = other.begin(Prompt(GEOMETRY, 100, seed=5))
    other_load = decode.load(other.ticket(other_running), [7, 8])
    fabric.inject(Fail(late=True))
    running = prefill.run(Prompt(GEOMETRY, 64, seed=1))
    request = decode.load(prefill.ticket(running), [9])
    assert not decode.wait(request).ok
    other.compute(other_running, 100)
    other.finish(other_running)
    assert decode.wait(other_load).ok
    decode.check(other_running.prompt, [7, 8])
    other.wait_released(other_running)
    wait_idle(other)
    still_serves(prefill, decode)


def test_parcels_of_a_failed_load_are_not_read_again(sides: Sides, fabric: MemoryFabric) -> None:
    prefill, decode = both(sides, fabric)
    fabric.inject(Fail())
    running = prefill.run(Prompt(GEOMETRY, TOKENS, seed=1))
    request = decode.load(prefill.ticket(running), BLOCKS)
    assert decode.wait(request) == LoadEnd(request, False, tuple(BLOCKS))
    batches = len(fabric.records)
    prefill.wait_released(running)
    wait_idle(prefill, decode)
    assert len(fabric.records) == batches
    # Decode told the prefill side, which did not have to wait for a lease.
    assert prefill.reports()[-1].outcome == "aborted"
    still_serves(prefill, decode)


def test_a_load_past_its_deadline_fails_once_its_read_has_ended(sides: Sides, fabric: MemoryFabric) -> None:
    prefill = sides.prefill(GEOMETRY, fabric.factory())
    decode = sides.decode(
        GEOMETRY, fabric.factory(timeout_s=60.0), load_deadline_s=2.0, admission_deadline_s=1.5, renew_s=0.5
    )
    pair(prefill, decode)
    fabric.inject(Hang())
    running = prefill.run(Prompt(GEOMETRY, 64, seed=1))
    request = decode.load(prefill.ticket(running), [9])
    eventually(lambda: decode.status().held["quarantined_blocks"] == 1, "the deadline passes")
    assert request not in decode.poll()
    fabric.release_hung()
    assert decode.wait(request) == LoadEnd(request, False, (9,))
    assert "not complete within 2 s" in decode.report(request).reason
    prefill.wait_released(running)
    still_serves(prefill, decode)


def test_a_read_that_outlives_its_lease_is_not_believed(sides: Sides, fabric: MemoryFabric) -> None:
    ahead = [0.0]
    prefill = sides.prefill(GEOMETRY, fabric.factory(), lease_s=20.0, clock=lambda: time.monotonic() + ahead[0])
    decode = sides.decode(GEOMETRY, fabric.factory(timeout_s=60.0))
    pair(prefill, decode)
    fabric.inject(Hang())
    running = prefill.run(Prompt(GEOMETRY, 64, seed=1))
    request = decode.load(prefill.ticket(running), [9])
    eventually(lambda: decode.status().held["reads"] == 1, "the read hangs")
    assert prefill.held("regions") == [1]
    # To the prefill side half a minute passes without a sign of life; it reuses the region.
    ahead[0] = 30.0
    eventually(lambda: prefill.held("regions") == [0], "the lease runs out")
    eventually(lambda: decode.status().held["quarantined_blocks"] == 1, "decode is told")
    assert request not in decode.poll()
    fabric.release_hung()
    # The read ended well, and still the load has failed.
    assert decode.wait(request) == LoadEnd(request, False, (9,))
    assert fabric.records[-1].ok
    assert decode.report(request).reason.endswith("gave the transfer up: expired")
    prefill.wait_released(running)
    still_serves(prefill, decode)


def test_a_prefill_side_that_is_down_fails_the_load_within_the_deadline(sides: Sides, fabric: MemoryFabric) -> None:
    prefill = sides.prefill(GEOMETRY, fabric.factory())
    decode = sides.decode(GEOMETRY, fabric.factory(), hello_deadline_s=1.0, admission_deadline_s=1.5)
    running = prefill.run(Prompt(GEOMETRY, 64, seed=1))
    ticket = prefill.ticket(running)
    prefill.close()
    request = decode.load(ticket, [9])
    assert decode.wait(request) == LoadEnd(request, False, (9,))
    assert "no answer within 1 s" in decode.report(request).reason
    eventually(lambda: not any(decode.status().held.values()), "decode is idle")


def test_a_pack_that_fails_costs_its_transfer_only(sides: Sides, fabric: MemoryFabric) -> None:
    prefill, decode = both(sides, fabric)
    running = prefill.begin(Prompt(GEOMETRY, TOKENS, seed=1))
    # As vLLM would never say it: blocks that the cache does not have.
    running.table = [GEOMETRY.blocks + 5] * len(running.table)
    prefill.step(PrefillStep(progress=[RequestProgress(running.name, TOKENS, tuple(running.table))]))
    prefill.finish(running)
    request = decode.load(prefill.ticket(running), BLOCKS)
    assert decode.wait(request) == LoadEnd(request, False, tuple(BLOCKS))
    eventually(lambda: prefill.workers[0].take_finished({running.name}) == {running.name}, "its blocks come back")
    assert prefill.reports()[-1].outcome == "failed"
    still_serves(prefill, decode)


def test_wrong_bytes_would_be_seen(sides: Sides, fabric: MemoryFabric) -> None:
    """That the comparison of these tests can fail: one flipped bit on the wire."""
    prefill, decode = both(sides, fabric)
    fabric.inject(Corrupt(segment=2, xor=1))
    running = prefill.run(Prompt(GEOMETRY, 64, seed=1))
    with pytest.raises(AssertionError, match="chip 0, bank"):
        decode.pull(prefill, running, [9])
    prefill.wait_released(running)
    still_serves(prefill, decode)
