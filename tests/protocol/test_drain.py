"""A side that drains: what it owes goes on to its end, nothing new is taken, and then it holds nothing."""

from __future__ import annotations

from hawk_connector.protocol.admission import VerdictKind
from hawk_connector.protocol.messages import Abort, Gone, Hello
from tests.protocol.table import OTHER, T, Table
from tests.protocol.world import BLOCK, LIMITS


def test_a_prefill_side_finishes_what_it_has_begun_and_offers_nothing_new() -> None:
    table = Table().pair()
    table.compute(tokens=2 * BLOCK, finish=False)  # its request is still computed when the drain begins
    table.prefill.drain()
    table.compute(OTHER, 2 * BLOCK)
    table.prefill.finished(T)
    table.exchange()
    table.pack()
    assert table.prefill.owed == 1
    verdict = table.ask(2, transfer=OTHER, tokens=2 * BLOCK)
    assert (verdict.kind, verdict.reason, verdict.failure) == (VerdictKind.GONE, "draining", "draining")
    assert table.ask(1, tokens=2 * BLOCK).kind is VerdictKind.CLAIMED
    table.admission.hand_over("r1")
    table.load(1, tokens=2 * BLOCK)
    table.read()
    assert [r.ok for r in table.reports] == [True]
    table.admission.drop("r2")
    assert table.held() == {} and table.prefill.owed == 0


def test_what_nobody_asks_for_ends_with_its_lease() -> None:
    table = Table().pair()
    table.compute()
    table.pack()
    table.prefill.drain()
    table.wait(LIMITS.lease_s - 1)
    assert table.prefill.owed == 1
    table.wait(2)
    assert table.prefill.owed == 0 and table.held() == {}


def test_it_still_pairs_so_that_decode_sides_can_fetch_what_is_theirs() -> None:
    table = Table()
    table.compute(finish=False)
    table.prefill.drain()
    table.prefill.finished(T)
    table.pair()
    table.pack()
    assert len(table.said(Hello)) == 2 and table.ask(1).kind is VerdictKind.CLAIMED


def test_a_request_whose_transfer_was_not_begun_gives_its_blocks_back_at_once() -> None:
    """The worker is told by vLLM's scheduler of requests that began before the drain was known there."""
    table = Table().pair()
    table.prefill.drain()
    table.prefill.begin(T, "5" * 64, BLOCK)
    assert table.prefill.finished(T) is False and table.held() == {}


def test_a_decode_side_lets_new_requests_compute_and_tells_the_prefill_side() -> None:
    table = Table().pair()
    table.compute(T, 2 * BLOCK)
    table.compute(OTHER, 2 * BLOCK)
    table.pack()
    assert table.ask(1, tokens=2 * BLOCK).kind is VerdictKind.CLAIMED
    table.admission.drain()
    verdict = table.ask(2, transfer=OTHER, tokens=2 * BLOCK)
    assert (verdict.kind, verdict.failure) == (VerdictKind.GONE, "draining")
    # The claim of before the drain is kept and loaded.
    assert table.admission.verdict("r1").kind is VerdictKind.CLAIMED  # type: ignore[union-attr]
    table.admission.hand_over("r1")
    table.load(1, tokens=2 * BLOCK)
    table.read()
    assert [r.ok for r in table.reports] == [True]
    # And what the other request named is not kept until its lease ends: nobody else here will want it.
    assert [m.transfer for m in table.said(Abort)] == [OTHER]
    assert [m.reason for m in table.said(Gone)] == ["aborted"]
    table.admission.drop("r2")
    assert table.held() == {}
