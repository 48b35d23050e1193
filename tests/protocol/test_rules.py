"""The ten rules of the protocol, one after another, by direct calls under a clock that the test moves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hawk_connector.protocol.admission import AdmissionProtocol, VerdictKind
from hawk_connector.protocol.decode import DecodeProtocol
from hawk_connector.protocol.decode_actions import SendTo
from hawk_connector.protocol.messages import (
    PROTOCOL_VERSION,
    Abort,
    Accepted,
    Claimed,
    Done,
    Gone,
    Hello,
    Pull,
    Ready,
    Refused,
    Renew,
    Stale,
    Welcome,
)
from hawk_connector.protocol.ticket import RankAddress, Ticket
from tests.protocol.table import ADDRESS, ADMISSION, DECODE, DIGEST, LINK, OTHER, P2, WRONG, D, P, T, Table, claim
from tests.protocol.world import BLOCK, LIMITS, decode_facts, prefill_facts, prefill_protocol


def offered(tokens: int = 4 * BLOCK, **fields: Any) -> Table:
    """A paired table where T is computed and packed: two parcels of two blocks."""
    table = Table(**fields).pair()
    table.compute(tokens=tokens)
    table.pack()
    return table


# --- rule 1: fence before anything else


def test_rule_1_a_failed_read_is_reported_only_after_the_fence() -> None:
    table = offered()
    table.load()
    assert len(table.reads) == 2
    table.sent.clear()
    table.read(ok=False)
    assert table.fences == [] and table.reports == []  # the other read still runs through the same engine
    table.read()
    assert [f.address for f in table.fences] == [ADDRESS]
    assert table.reports == [] and table.sent == []  # no Done, no Abort: nothing before the fence
    assert table.worker.held()["quarantined_blocks"] == 4
    table.worker.fenced(ADDRESS)
    table.exchange()
    (report,) = table.reports
    assert (report.ok, report.block_ids, report.reason) == (
        False,
        (100, 101, 102, 103),
        f"reading from {ADDRESS}: broken",
    )
    assert len(table.said(Abort)) == 1 and table.held() == {}


def test_rule_1_other_parcels_of_the_peer_wait_for_the_fence_and_are_read_through_the_new_engine() -> None:
    table = offered(tokens=2 * BLOCK)
    table.compute(OTHER, 2 * BLOCK)
    table.pack()
    table.load(1, tokens=2 * BLOCK)
    table.read(ok=False)
    table.load(2, transfer=OTHER, tokens=2 * BLOCK)
    assert table.reads == [] and len(table.fences) == 1
    table.worker.fenced(ADDRESS)
    table.exchange()
    assert [r.request for r in table.reads] == ["r2"]
    table.read()
    assert {r.request: r.ok for r in table.reports} == {"r1": False, "r2": True}


def test_rule_1_an_aborted_load_awaits_its_read_and_needs_no_fence() -> None:
    table = offered(tokens=2 * BLOCK)
    table.load(tokens=2 * BLOCK)
    table.worker.abort("r1")
    table.exchange()
    assert table.reports == [] and table.said(Abort) == []
    table.read()
    assert [(r.ok, r.aborted) for r in table.reports] == [(False, True)]
    assert table.fences == [] and table.held() == {}


def test_rule_1_reads_that_nobody_wants_are_told_to_stop_and_one_that_did_needs_no_fence() -> None:
    table = offered()
    table.load()
    numbers = [read.id for read in table.reads]
    assert len(numbers) == 2 and table.stops == []
    table.worker.abort("r1")
    table.worker.abort("r1")
    table.exchange()
    assert [stop.id for stop in table.stops] == numbers  # each once
    for number in numbers:
        assert table.reports == []  # its blocks stay in quarantine until both have ended
        table.worker.read_ended(number, False, "stopped", stopped=True)
        table.exchange()
    assert [(r.ok, r.aborted) for r in table.reports] == [(False, True)]
    table.reads.clear()
    assert table.fences == [] and table.held() == {}


def test_rule_1_a_read_that_stopped_does_not_spare_the_fence_of_one_that_failed() -> None:
    table = offered()
    table.load()
    first, second = (read.id for read in table.reads)
    table.reads.clear()
    table.worker.read_ended(first, False, "broken")
    table.worker.read_ended(second, False, "stopped", stopped=True)
    table.exchange()
    assert table.reports == [] and len(table.fences) == 1
    table.worker.fenced(ADDRESS)
    table.exchange()
    assert [(r.ok, r.failure) for r in table.reports] == [(False, "read")]


def test_rule_1_an_aborted_load_whose_read_fails_is_fenced_first() -> None:
    table = offered(tokens=2 * BLOCK)
    table.load(tokens=2 * BLOCK)
    table.worker.abort("r1")
    table.read(ok=False)
    assert table.reports == []
    table.worker.fenced(ADDRESS)
    table.exchange()
    assert [(r.ok, r.aborted) for r in table.reports] == [(False, True)]


# --- rule 2: one claimant


def test_rule_2_the_first_pull_claims_and_any_other_gets_gone() -> None:
    table = offered()
    assert table.ask(1).kind is VerdictKind.CLAIMED
    verdict = table.ask(2)
    assert (verdict.kind, verdict.reason) == (VerdictKind.GONE, "claimed")
    assert table.ask(3, digest=WRONG).reason == "claimed"
    table.admission.hand_over("r1")
    table.load(1)
    table.read(), table.read()
    assert [r.ok for r in table.reports] == [True]
    # The claim's loser and a latecomer hear so from the tombstone too.
    assert table.ask(4).reason == "claimed"


def test_rule_2_n_equals_2_and_duplicates_load_once_and_compute_the_rest() -> None:
    table = offered()
    kinds = [table.ask(n).kind for n in (1, 2, 3)]
    assert kinds == [VerdictKind.CLAIMED, VerdictKind.GONE, VerdictKind.GONE]


def test_rule_2_a_repeated_done_gets_the_same_verdict() -> None:
    table = offered(tokens=2 * BLOCK)
    table.lose = lambda message: isinstance(message, Accepted)
    table.load(tokens=2 * BLOCK)
    table.read()
    assert table.reports == [] and [e.reason for e in table.ended] == [None]
    table.wait(3.0)
    assert len(table.said(Accepted)) >= 2 and table.reports == []
    table.lose = lambda message: False
    table.wait(5.0)
    assert [(r.ok, r.parcels) for r in table.reports] == [(True, 1)] and table.held() == {}


def test_rule_2_done_after_expiry_is_gone_and_stays_gone() -> None:
    table = offered(tokens=2 * BLOCK)
    table.load(tokens=2 * BLOCK)
    table.time.now += LIMITS.lease_s
    done = Done(epoch=D, to=P, transfer=T, claim=claim(1), parcel=0, generation=0)
    for _ in range(2):
        table.prefill.receive("worker", done)
        table.sent.clear()
        table.exchange()
        assert [m.reason for m in table.said(Gone)][-1] == "expired" and table.said(Accepted) == []
    table.read()
    assert [r.ok for r in table.reports] == [False]
    assert table.prefill.held()["regions"] == 0


def test_rule_2_renew_extends_a_living_lease_and_never_revives_an_expired_one() -> None:
    table = offered()
    table.ask(1)
    renew = Renew(epoch=D, to=P, transfer=T, claim=claim(1))
    table.time.now += LIMITS.lease_s - 1
    table.prefill.receive("admission", renew)
    table.time.now += LIMITS.lease_s - 1
    table.prefill.tick()
    assert table.prefill.held()["leases"] == 1
    table.time.now += 1
    table.prefill.receive("admission", renew)  # no tick came between
    table.exchange()
    assert table.said(Gone)[-1].reason == "expired"
    assert table.prefill.held()["leases"] == 0 and table.prefill.held()["regions"] == 0


def test_rule_2_another_claims_renew_extends_nothing() -> None:
    table = offered()
    table.ask(1)
    table.time.now += LIMITS.lease_s - 1
    table.prefill.receive("x", Renew(epoch=D, to=P, transfer=T, claim=claim(9)))
    table.time.now += 1
    table.prefill.tick()
    table.exchange()
    assert [e.reason for e in table.ended] == ["expired"]


def test_rule_2_done_names_the_generation() -> None:
    table = offered(tokens=2 * BLOCK)
    table.load(tokens=2 * BLOCK)
    table.prefill.receive("worker", Done(epoch=D, to=P, transfer=T, claim=claim(1), parcel=0, generation=7))
    table.exchange()
    table.read()
    assert [r.ok for r in table.reports] == [False]


# --- rule 3: everything held has a deadline


def test_rule_3_nobody_asks() -> None:
    table = offered()
    assert table.released == [T]
    table.wait(LIMITS.lease_s + 0.5)
    assert [e.reason for e in table.ended] == ["expired"] and table.held() == {}


def test_rule_3_no_decode_side_appears() -> None:
    table = Table()
    table.compute()
    assert table.packs == [] and table.released == []
    table.wait(max(LIMITS.buffer_wait_s, LIMITS.lease_s) + 0.5)
    assert table.released == [T] and table.held() == {}


def test_rule_3_the_prefill_side_is_silent() -> None:
    table = Table().pair()
    table.lose = lambda message: isinstance(message, (Welcome, Claimed, Ready))
    table.prefill.begin(T, DIGEST, BLOCK)
    assert table.ask(1, tokens=BLOCK).kind is VerdictKind.PENDING
    table.wait(10.5)
    verdict = table.admission.verdict("r1")
    assert verdict is not None and verdict.kind is VerdictKind.FAILED
    assert verdict.reason == f"no answer from {ADDRESS} within 10 s" or "is down" in verdict.reason
    table.admission.drop("r1")
    table.prefill.abandoned(T)
    table.exchange()
    assert table.held() == {}


def test_rule_3_a_load_that_never_completes_fails_at_its_deadline() -> None:
    table = Table().pair()
    table.compute(tokens=2 * BLOCK)  # never packed: vLLM's blocks are held
    table.load(tokens=2 * BLOCK)
    table.wait(LIMITS.buffer_wait_s + 1)
    assert [(r.ok, r.reason) for r in table.reports] == [(False, f"{ADDRESS} gave the transfer up: expired")]
    assert table.released == []  # the pack that is out still reads the blocks
    table.pack()
    assert table.released == [T] and table.held() == {}


def test_rule_3_a_farewell_to_a_dead_peer_ends() -> None:
    table = offered()
    table.load()
    table.lose = lambda message: True
    table.worker.abort("r1")
    table.read(), table.read()
    table.wait(11.0)
    assert table.worker.held()["farewells"] == 0 and len(table.reports) == 1


# --- rule 4: a failed load never reaches decode, and stops nobody else


def test_rule_4_bytes_that_are_read_but_not_accepted_are_not_believed() -> None:
    table = offered(tokens=2 * BLOCK)
    table.compute(OTHER, 2 * BLOCK)
    table.pack()
    table.load(1, tokens=2 * BLOCK)
    table.load(2, transfer=OTHER, tokens=2 * BLOCK)
    table.lose = lambda message: getattr(message, "transfer", "") == T
    table.read(), table.read()
    assert [(r.request, r.ok) for r in table.reports] == [("r2", True)]
    table.wait(LIMITS.lease_s)
    table.lose = lambda message: False
    table.wait(5.0)
    assert [(r.request, r.ok) for r in table.reports] == [("r2", True), ("r1", False)]


def test_rule_4_a_failed_pack_fails_its_transfer_only() -> None:
    table = Table().pair()
    table.compute(T, 2 * BLOCK)
    table.compute(OTHER, 2 * BLOCK)
    table.prefill.packed(table.packs.pop(0).job, False)
    table.pack()
    table.load(1, tokens=2 * BLOCK)
    table.load(2, transfer=OTHER, tokens=2 * BLOCK)
    table.read()
    assert {r.request: r.ok for r in table.reports} == {"r1": False, "r2": True}
    assert sorted(table.released) == [T, OTHER] and table.held() == {}


# --- rule 5: idle means empty


@pytest.mark.parametrize("tokens", [1, BLOCK, 2 * BLOCK + 1, 7 * BLOCK])
def test_rule_5_nothing_is_held_after_a_load(tokens: int) -> None:
    table = offered(tokens=tokens)
    table.ask(1, tokens=tokens)
    table.admission.hand_over("r1")
    table.load(1, tokens=tokens)
    while table.reads:
        table.read()
    assert [r.ok for r in table.reports] == [True] and table.released == [T]
    assert table.held() == {} and table.prefill.held()["region_bytes"] == 0


def test_rule_5_a_request_aborted_after_its_pack_failed_gives_its_blocks_back() -> None:
    table = Table().pair()
    table.compute(finish=False)
    table.pack(ok=False)
    assert table.released == []  # vLLM has not ended it yet
    assert table.prefill.abandoned(T) is True
    table.exchange()
    assert table.released == [T] and table.held() == {}


# --- rule 6: lost, repeated, reordered or late messages change nothing but time


@pytest.mark.parametrize("kind", [Hello, Welcome, Pull, Claimed, Ready, Done, Accepted, Gone, Abort])
@pytest.mark.parametrize("losses", [1, 3])
def test_rule_6_lost_messages_are_sent_again(kind: type, losses: int) -> None:
    left = [losses]

    def lose(message: Any) -> bool:
        if isinstance(message, kind) and left[0]:
            left[0] -= 1
            return True
        return False

    table = Table()
    table.lose = lose
    table.pair()
    table.wait(4.9)  # pairing repeats itself
    table.compute()
    table.pack()
    table.ask(1)
    table.ask(2)
    table.wait(6.0)
    verdicts = {n: table.admission.verdict(f"r{n}") for n in (1, 2)}
    (winner,) = [n for n, v in verdicts.items() if v is not None and v.kind is VerdictKind.CLAIMED]
    table.admission.hand_over(f"r{winner}")
    table.load(winner)
    for _ in range(40):
        while table.reads:
            table.read()
        table.wait(0.5)
    assert [(r.request, r.ok) for r in table.reports] == [(f"r{winner}", True)]
    (loser,) = {1, 2} - {winner}
    verdict = table.admission.verdict(f"r{loser}")
    assert verdict is not None and verdict.kind is VerdictKind.GONE
    table.admission.drop(f"r{loser}")
    table.wait(11.0)
    assert table.held() == {}


def test_rule_6_a_ready_that_overtakes_claimed_is_offered_again() -> None:
    table = offered(tokens=2 * BLOCK)
    first = [True]

    def lose(message: Any) -> bool:
        lost = isinstance(message, Claimed) and first[0]
        first[0] = first[0] and not lost
        return lost

    table.lose = lose
    table.load(tokens=2 * BLOCK)
    assert table.reads == []
    table.wait(1.0)
    assert len(table.reads) == 1


def test_rule_6_a_renew_that_overtakes_its_pull_fails_nothing() -> None:
    table = offered(tokens=2 * BLOCK)
    table.prefill.receive("worker", Renew(epoch=D, to=P, transfer=T, claim=claim(1)))
    table.exchange()
    assert table.said(Gone) == []
    table.load(tokens=2 * BLOCK)
    table.read()
    assert [r.ok for r in table.reports] == [True]


def test_rule_6_a_pairing_that_takes_longer_than_renew_s_fails_nothing() -> None:
    """A worker without a scheduler in front of it: its first Pull is the claim, and no Renew goes before it."""
    table = Table()
    limits = replace(DECODE, link=replace(LINK, renew_s=1.0))
    table.worker = DecodeProtocol(D, table.facts, limits, table.time)
    table.lose = lambda message: isinstance(message, Welcome)
    table.compute(tokens=2 * BLOCK, finish=False)
    table.load(tokens=2 * BLOCK)
    table.wait(2.0)
    table.lose = lambda message: False
    table.time.now += 1.0  # the answer comes when a renewal is due, before the next tick
    table.worker.receive(ADDRESS, table.said(Welcome)[-1])
    table.exchange()
    table.wait(2.5)
    said = [type(message) for message in table.sent if isinstance(message, (Pull, Renew))]
    assert said[0] is Pull and Renew in said  # which is said once there is something to renew
    assert table.said(Gone) == []
    table.pack()
    table.read()
    assert [r.ok for r in table.reports] == [True]


def test_rule_6_a_late_question_about_a_completed_transfer_does_not_fail_its_load() -> None:
    table = offered(tokens=2 * BLOCK)
    table.lose = lambda message: isinstance(message, Accepted)
    table.load(tokens=2 * BLOCK)
    table.read()
    for late in (table.said(Pull)[0], Renew(epoch=D, to=P, transfer=T, claim=claim(1))):
        table.prefill.receive("worker", late)
        table.exchange()
    assert [m.reason for m in table.said(Gone)] == ["released", "released"] and table.reports == []
    table.lose = lambda message: False
    table.wait(1.0)
    assert [r.ok for r in table.reports] == [True]


def test_rule_6_answers_to_a_farewell_do_not_start_another() -> None:
    """Of two ranks one has the transfer no more: the other is told once, not for ever in a circle."""

    table = Table()
    ranks = [prefill_protocol(prefill_facts(ranks=2, rank=r), str(r + 1) * 32, table.time) for r in (0, 1)]
    addresses = {"p:1": ranks[0], "p:2": ranks[1]}
    ranks[0].begin(T, DIGEST, BLOCK)  # rank 1 never heard of it
    admission = AdmissionProtocol(D, decode_facts(), ADMISSION, table.time)
    ticket = Ticket(T, claim(1), DIGEST, BLOCK, tuple(RankAddress(a, r.epoch) for a, r in addresses.items()))
    admission.ask("r1", ticket)
    said = []
    for _ in range(50):
        table.time.now += 0.05  # rank 1 waits a moment: it may be a step behind the others
        ranks[1].tick()
        for sent in admission.take_actions():
            assert isinstance(sent, SendTo)
            said.append(sent.message)
            addresses[sent.address].receive("d", sent.message)  # type: ignore[arg-type]
        for address, rank in addresses.items():
            for action in rank.take_actions():
                if hasattr(action, "message"):
                    admission.receive(address, action.message)
    verdict = admission.verdict("r1")
    assert verdict is not None and (verdict.kind, verdict.reason) == (VerdictKind.GONE, "unknown")
    assert len([m for m in said if isinstance(m, Abort)]) == 1
    admission.drop("r1")
    assert admission.take_actions() == [] and not any(admission.held().values())


def test_rule_6_a_late_welcome_of_an_earlier_life_is_dropped() -> None:
    table = Table().pair()
    old = table.said(Welcome)[0]
    table.prefill = table.new_prefill(P2)
    table.worker.connect(ADDRESS)
    table.exchange()
    link = table.worker.links[ADDRESS]
    assert link.remote_epoch == P2
    table.worker.receive(ADDRESS, old)
    assert link.remote_epoch == P2
    refused = Refused(epoch=P, to=D, mismatches=(), number=old.number)
    table.worker.receive(ADDRESS, refused)
    assert link.state.value == "paired"


# --- rule 7: a peer that restarts is a new epoch


def test_rule_7_a_restarted_prefill_side_fails_the_load_and_replaces_the_engine() -> None:
    table = offered(tokens=2 * BLOCK)
    table.load(tokens=2 * BLOCK)
    table.prefill = table.new_prefill(P2)
    table.read()  # it succeeded, perhaps from the new life's memory: Done goes to the old life and is not accepted
    assert table.said(Stale) != [] and table.said(Accepted) == []
    assert [(r.ok, "another life" in r.reason) for r in table.reports] == [(False, True)]
    assert [f.address for f in table.fences] == [ADDRESS]
    table.compute(OTHER, 2 * BLOCK)
    table.pack()
    table.load(2, transfer=OTHER, tokens=2 * BLOCK, epoch=P2)
    assert table.reads == []  # not through the old engine
    table.worker.fenced(ADDRESS)
    table.exchange()
    table.read()
    assert [(r.request, r.ok) for r in table.reports][1:] == [("r2", True)]


def test_rule_7_a_ticket_of_an_earlier_life_is_gone() -> None:
    table = Table().pair()
    table.prefill = table.new_prefill(P2)
    verdict = table.ask(1, epoch=P)
    assert (verdict.kind, verdict.reason) == (VerdictKind.GONE, "restarted")


def test_rule_7_a_message_for_another_life_is_answered_stale_and_changes_nothing() -> None:
    table = offered()
    before = table.prefill.held()
    table.prefill.receive("x", Pull(epoch=D, to=P2, transfer=T, claim=claim(1), digest=DIGEST, tokens=1, deliver=True))
    table.prefill.receive("x", Abort(epoch=D, to=P2, transfer=T, claim=claim(1), digest=DIGEST))
    messages = [a.message for a in table.prefill.take_actions()]  # type: ignore[union-attr]
    assert messages == [Stale(epoch=P, to=D)] * 2 and table.prefill.held() == before


def test_rule_7_a_decode_side_that_has_not_said_hello_is_stale() -> None:
    table = Table()
    table.compute(finish=False)
    table.prefill.receive("x", Pull(epoch=D, to=P, transfer=T, claim=claim(1), digest=DIGEST, tokens=1, deliver=True))
    assert [a.message for a in table.prefill.take_actions()] == [Stale(epoch=P, to=D)]  # type: ignore[union-attr]


# --- rule 8: refusal at Hello, naming the fields


@pytest.mark.parametrize(
    ("facts", "field", "values"),
    [
        (decode_facts(model="other"), "model", ("m", "other")),
        (decode_facts(heads=4), "kv_heads", ("2", "4")),
    ],
)
def test_rule_8_a_pairing_that_would_give_wrong_bytes_is_refused_by_name(
    facts: Any, field: str, values: tuple[str, str]
) -> None:
    table = Table(facts=facts).pair()
    (refused, _) = table.said(Refused)
    named = {m.field: (m.prefill, m.decode) for m in refused.mismatches}
    assert named[field] == values and all(m.fix for m in refused.mismatches)
    verdict = table.ask(1)
    assert verdict.kind is VerdictKind.FAILED
    assert all(text in verdict.reason for text in (field, *values))
    table.load(1)
    assert [r.ok for r in table.reports] == [False] and field in table.reports[0].reason


def test_rule_8_a_send_buffer_too_small_for_one_block_is_refused() -> None:
    """Regions are cut in granules of 256 bytes: what would never find room is not paired."""
    block = 2 * 2 * 1088  # pools x heads x bytes of a bfp8 tile: 17 regions' granules of 256 bytes
    assert Table(buffer_bytes=block).pair().said(Refused) == []
    small = Table(buffer_bytes=block - 1).pair().said(Refused)
    assert [(m.field, str(block) in m.fix) for m in small[0].mismatches] == [("send_buffer_bytes", True)]
    one = prefill_facts(heads=1, buffer_bytes=2 * 1088)  # 2176 bytes a block, of which 2048 are whole granules
    machine = prefill_protocol(one, P, Table().time)
    machine.receive("d", Hello(epoch=D, version=PROTOCOL_VERSION, facts=decode_facts(heads=1), number=1))
    (answer,) = machine.take_actions()
    (mismatch,) = answer.message.mismatches  # type: ignore[union-attr]
    assert (mismatch.field, mismatch.fix.rsplit(" ", 1)[1]) == ("send_buffer_bytes", "2304")


def test_rule_8_a_lease_that_cannot_be_renewed_in_time_is_refused_by_the_decode_side() -> None:
    """A lease holds two renewals, so that one may get lost; a verdict outlives the longest pause before a Done."""
    for limits, field in (
        ({"lease_s": 2 * LINK.renew_s - 0.1}, "lease_s"),
        ({"verdict_keep_s": 8 * LINK.resend_s}, "verdict_keep_s"),
    ):
        table = Table(limits=replace(LIMITS, **limits)).pair()
        assert [m.field for m in table.worker.links[ADDRESS].mismatches] == [field]
    fitting = {"lease_s": 2 * LINK.renew_s, "verdict_keep_s": 8 * LINK.resend_s + 0.1}
    table = Table(limits=replace(LIMITS, **fitting)).pair()
    assert table.worker.links[ADDRESS].mismatches == ()


# --- rule 9: KV is bound to its tokens


def test_rule_9_another_prompt_gets_gone_and_the_right_one_can_still_claim() -> None:
    table = offered()
    assert table.ask(1, digest=WRONG).reason == "digest"
    assert table.ask(2, tokens=3 * BLOCK).reason == "digest"
    assert table.ask(3).kind is VerdictKind.CLAIMED


def test_rule_9_a_list_prompt_gives_each_element_its_own_kv() -> None:
    table = offered()
    digests = [WRONG, DIGEST, "7" * 64, DIGEST, "8" * 64]
    kinds = [table.ask(n, digest=d).kind.value for n, d in enumerate(digests)]
    assert kinds == ["gone", "claimed", "gone", "gone", "gone"]


def test_rule_9_the_farewell_of_a_wrong_prompt_ends_nothing() -> None:
    table = offered()
    table.prefill.receive("x", Abort(epoch=D, to=P, transfer=T, claim=claim(9), digest=WRONG))
    table.exchange()
    assert table.ask(1).kind is VerdictKind.CLAIMED
    table.prefill.receive("x", Abort(epoch=D, to=P, transfer=T, claim=claim(9), digest=DIGEST))
    table.exchange()
    assert table.prefill.held()["transfers"] == 1


# --- rule 10: untrusted parameters (messages: test_messages.py)


def test_rule_10_ranks_that_do_not_fill_the_cache_are_not_believed() -> None:
    """A client that leaves a rank out must not get a load reported whose heads are half empty."""

    table = Table()
    table.prefill = prefill_protocol(prefill_facts(ranks=2, rank=0), P, table.time)
    table.pair()
    table.compute(tokens=2 * BLOCK)
    table.pack()
    verdict = table.ask(1, tokens=2 * BLOCK)
    assert verdict.kind is VerdictKind.GONE and "(0, 1)" in verdict.reason
    table.compute(OTHER, 2 * BLOCK)
    table.pack()
    table.load(2, transfer=OTHER, tokens=2 * BLOCK)
    table.read()
    assert [(r.ok, "(0, 1)" in r.reason) for r in table.reports] == [(False, True)]


def test_rule_10_a_rank_that_sends_no_heads_is_no_load() -> None:

    table = Table(facts=decode_facts(heads=1))
    table.prefill = prefill_protocol(prefill_facts(heads=1, ranks=2, rank=1), P, table.time)
    table.pair()
    table.load(1, tokens=BLOCK)
    assert [r.ok for r in table.reports] == [False]


def test_a_reset_of_the_prefill_cache_ends_what_is_offered() -> None:
    """KV of old weights is not believed once vLLM has reset its cache: Done after the reset gets Gone."""
    table = offered()
    table.ask(1)
    table.admission.hand_over("r1")
    table.load(1)
    table.prefill.reset()
    table.exchange()
    while table.reads:
        table.read()
    assert [r.ok for r in table.reports] == [False]
    assert table.held() == {}
