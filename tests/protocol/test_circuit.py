"""The circuit: failures in a row open it, time or an answer half-opens it, one request tries, others do not wait."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hawk_connector.protocol.admission import AdmissionProtocol, VerdictKind
from hawk_connector.protocol.circuit import Circuit, CircuitLimits, CircuitState
from hawk_connector.protocol.decode_actions import PeerOutcome
from hawk_connector.protocol.link import LinkState, PeerLink
from hawk_connector.protocol.messages import Abort, Claimed, Hello, Pull, Welcome
from tests.protocol.table import ADDRESS, LINK, OTHER, P2, P, T, Table, Time, claim
from tests.protocol.world import BLOCK, decode_facts, prefill_facts, prefill_protocol

LIMITS = CircuitLimits(failures=3, open_s=5.0, open_max_s=20.0)


def opened(time: Time) -> Circuit:
    circuit = Circuit(LIMITS, time)
    circuit.heard(P)
    for _ in range(3):
        circuit.failed("broken")
    return circuit


# --- the circuit alone


def test_it_opens_at_the_third_failure_in_a_row() -> None:
    circuit = Circuit(LIMITS, Time())
    circuit.heard(P)
    seen = []
    for _ in range(2):
        circuit.failed("broken")
        seen.append(circuit.state)
    circuit.succeeded()
    for _ in range(3):
        circuit.failed("broken")
        seen.append(circuit.state)
    assert [state.value for state in seen] == ["closed", "closed", "closed", "closed", "open"]
    assert not circuit.admit("r")
    assert circuit.detail == "failed 3 times in a row, last: broken; tried again in 5.0 s"


def test_half_open_admits_one_probe_whose_success_closes_it() -> None:
    time = Time()
    circuit = opened(time)
    time.now += 4.9
    assert not circuit.admit("r1")
    time.now += 0.1
    assert circuit.state is CircuitState.HALF_OPEN
    assert [circuit.admit(name) for name in ("r1", "r2", "r3")] == [True, False, False]
    circuit.ended("r1", True)
    assert circuit.state is CircuitState.CLOSED and circuit.admit("r2") and circuit.detail == ""
    circuit.failed("broken")
    assert circuit.state is CircuitState.CLOSED  # the count begins anew


def test_each_failed_probe_doubles_the_time_up_to_its_limit() -> None:
    """5, 10, 20, 20 seconds, by hand from open_s 5 and open_max_s 20."""
    time = Time()
    circuit = opened(time)
    waits = []
    for _ in range(4):
        begun = time.now
        while circuit.state is CircuitState.OPEN:
            time.now += 0.5
        waits.append(time.now - begun)
        assert circuit.admit("probe")
        circuit.ended("probe", False, "broken again")
    assert waits == [5.0, 10.0, 20.0, 20.0]


def test_a_probe_that_says_nothing_makes_way_for_the_next_and_only_the_probe_does() -> None:
    time = Time()
    circuit = opened(time)
    time.now += 5
    assert circuit.admit("r1")
    circuit.ended("another", None)
    assert not circuit.admit("r2")
    circuit.ended("r1", None)
    assert circuit.admit("r2")


def test_a_probe_whose_end_is_lost_makes_way_in_time() -> None:
    time = Time()
    circuit = opened(time)
    time.now += 5
    assert circuit.admit("r1")
    time.now += LIMITS.open_max_s - 0.1
    assert not circuit.admit("r2")
    time.now += 0.1
    assert circuit.admit("r2")


def test_what_began_before_it_opened_does_not_keep_it_open() -> None:
    time = Time()
    circuit = opened(time)
    time.now += 4
    circuit.failed("a straggler")
    time.now += 1
    assert circuit.state is CircuitState.HALF_OPEN


def test_a_silent_peer_is_tried_when_it_answers_and_not_before() -> None:
    time = Time()
    circuit = Circuit(LIMITS, time)
    circuit.heard(P)
    for _ in range(3):
        circuit.failed("no answer", silent=True)
    time.now += 1e6
    assert circuit.state is CircuitState.OPEN and not circuit.admit("r")
    circuit.heard(P)
    assert circuit.state is CircuitState.HALF_OPEN and circuit.admit("r") and not circuit.admit("r2")


def test_an_answer_after_silence_ends_the_time_of_what_failed_before() -> None:
    """Reads fail first when a network is cut; their doubled time must not outlast the cut."""
    time = Time()
    circuit = opened(time)
    time.now += 5
    assert circuit.admit("r")
    circuit.ended("r", False, "broken")
    assert circuit.detail.endswith("tried again in 10.0 s")
    circuit.failed("no answer", silent=True)
    circuit.heard(P)
    assert circuit.state is CircuitState.HALF_OPEN


def test_silence_does_not_lengthen_the_time_of_a_failed_probe() -> None:
    time = Time()
    circuit = Circuit(LIMITS, time)
    circuit.heard(P)
    for _ in range(5):
        circuit.failed("no answer", silent=True)
    circuit.heard(P)
    assert circuit.admit("r")
    circuit.ended("r", False, "broken")
    assert circuit.detail == "failed 6 times in a row, last: broken; tried again in 5.0 s"


def test_while_half_open_only_the_probe_can_fail() -> None:
    time = Time()
    circuit = opened(time)
    time.now += 5
    circuit.ended("begun before it opened", False, "past its deadline")
    assert circuit.state is CircuitState.HALF_OPEN and circuit.admit("r1")
    circuit.ended("begun before it opened", False, "past its deadline")
    assert circuit.state is CircuitState.HALF_OPEN and not circuit.admit("r2")
    circuit.ended("r1", False, "broken")
    assert circuit.state is CircuitState.OPEN


def test_an_answer_does_not_cut_the_time_of_one_that_answers_but_fails() -> None:
    time = Time()
    circuit = opened(time)
    circuit.heard(P)
    assert circuit.state is CircuitState.OPEN


def test_a_new_life_begins_with_a_closed_circuit() -> None:
    time = Time()
    circuit = opened(time)
    circuit.heard(P2)
    assert circuit.state is CircuitState.CLOSED
    circuit.failed("broken")
    assert circuit.state is CircuitState.CLOSED


def test_the_power_of_two_stays_a_number() -> None:
    time = Time()
    circuit = opened(time)
    for _ in range(2000):
        time.now += LIMITS.open_max_s
        circuit.failed("broken")
    time.now += LIMITS.open_max_s
    assert circuit.state is CircuitState.HALF_OPEN


# --- in the two machines


def fail_loads(table: Table, count: int, first: int = 1) -> None:
    """Loads whose reads fail, one after another, each fenced; the scheduler is told."""
    for n in range(first, first + count):
        transfer = f"{n:032x}"
        table.compute(transfer, 2 * BLOCK)
        table.pack()
        assert table.ask(n, transfer=transfer, tokens=2 * BLOCK).kind is VerdictKind.CLAIMED
        table.admission.hand_over(f"r{n}")
        table.load(n, transfer=transfer, tokens=2 * BLOCK)
        table.read(ok=False)
        table.worker.fenced(ADDRESS)
        table.exchange()
        tell(table)


def tell(table: Table) -> list[PeerOutcome]:
    outcomes = table.worker.take_outcomes()
    for outcome in outcomes:
        table.admission.peer_outcome(outcome)
    return outcomes


def test_after_failed_reads_a_request_fails_at_once_and_the_prefill_side_is_told() -> None:
    table = Table().pair()
    fail_loads(table, 3)
    assert table.admission.links[ADDRESS].circuit.state is CircuitState.OPEN
    table.compute(OTHER, 2 * BLOCK)
    table.pack()
    table.sent.clear()
    verdict = table.ask(7, transfer=OTHER, tokens=2 * BLOCK)
    assert (verdict.kind, verdict.failure) == (VerdictKind.FAILED, "circuit")
    assert f"the circuit of {ADDRESS} is open: it failed 3 times in a row" in verdict.reason
    assert table.said(Pull) == [] and len(table.said(Abort)) == 1  # its buffer is free again, not at the lease's end
    assert table.prefill.held()["regions"] == 0


def test_a_load_is_refused_at_once_too_where_no_scheduler_asks_first() -> None:
    table = Table().pair()
    fail_loads(table, 3)
    table.compute(OTHER, 2 * BLOCK)
    table.pack()
    table.load(9, transfer=OTHER, tokens=2 * BLOCK)
    report = table.reports[-1]
    assert (report.request, report.ok, report.failure) == ("r9", False, "circuit") and table.reads == []


def test_one_request_tries_again_and_its_success_serves_the_rest() -> None:
    table = Table().pair()
    fail_loads(table, 3)
    table.wait(LINK.circuit.open_s)
    for n in (10, 11):
        table.compute(f"{n:032x}", 2 * BLOCK)
        table.pack()
    assert table.ask(10, transfer=f"{10:032x}", tokens=2 * BLOCK).kind is VerdictKind.CLAIMED
    assert table.ask(11, transfer=f"{11:032x}", tokens=2 * BLOCK).failure == "circuit"  # the probe is out
    table.admission.hand_over("r10")
    table.load(10, transfer=f"{10:032x}", tokens=2 * BLOCK)
    table.read()
    assert table.reports[-1].ok
    assert [(o.request, o.served) for o in tell(table)] == [("r10", True)]
    assert table.admission.links[ADDRESS].circuit.state is CircuitState.CLOSED
    assert table.worker.links[ADDRESS].circuit.state is CircuitState.CLOSED
    table.admission.drop("r11")
    table.compute(OTHER, 2 * BLOCK)
    table.pack()
    assert table.ask(12, transfer=OTHER, tokens=2 * BLOCK).kind is VerdictKind.CLAIMED


def test_a_probe_that_is_dropped_or_gone_makes_way() -> None:
    table = Table().pair()
    fail_loads(table, 3)
    table.wait(LINK.circuit.open_s)
    assert table.ask(20, transfer="9" * 32).failure == "unknown"  # the probe, and no fault of the peer's
    table.compute(OTHER, 2 * BLOCK)
    table.pack()
    assert table.ask(21, transfer=OTHER, tokens=2 * BLOCK).kind is VerdictKind.CLAIMED
    table.admission.drop("r21")
    table.exchange()
    table.compute(T, 2 * BLOCK)
    table.pack()
    assert table.ask(22, tokens=2 * BLOCK).kind is VerdictKind.CLAIMED


def test_aborted_and_gone_loads_say_nothing_about_the_peer() -> None:
    table = Table().pair()
    for n in range(1, 6):
        transfer = f"{n:032x}"
        table.compute(transfer, 2 * BLOCK)
        table.pack()
        table.load(n, transfer=transfer, tokens=2 * BLOCK)
        table.worker.abort(f"r{n}")
        table.read()
    assert [o.served for o in tell(table)] == [None] * 5
    assert table.admission.links[ADDRESS].circuit.state is CircuitState.CLOSED


def test_pulls_that_nobody_answers_open_it() -> None:
    table = Table().pair()
    table.lose = lambda message: isinstance(message, Claimed)
    for n in (1, 2, 3):
        table.compute(f"{n:032x}", BLOCK)
        table.pack()
        table.ask(n, transfer=f"{n:032x}", tokens=BLOCK)
    table.wait(10.5)
    assert {table.admission.verdict(f"r{n}").kind for n in (1, 2, 3)} == {VerdictKind.FAILED}  # type: ignore[union-attr]
    assert table.ask(4).failure == "circuit"


def test_a_silent_peer_costs_the_first_requests_their_wait_and_the_later_ones_none() -> None:
    """Hello goes on being said, so the circuit opens after three unanswered ones whether or not anybody asks."""
    time = Time()
    admission = AdmissionProtocol(claim(7), decode_facts(), Table().admission._limits, time)
    table = Table()
    ticket = table.ticket(1)
    admission.ask("r1", ticket)
    begun = time.now
    while admission.verdict("r1").kind is VerdictKind.PENDING:  # type: ignore[union-attr]
        time.now += 0.25
        admission.tick()
    assert time.now - begun == pytest.approx(LINK.hello_deadline_s, abs=0.3)
    admission.drop("r1")
    for _ in range(4 * 20):
        time.now += 0.25
        admission.tick()
    admission.take_actions()
    admission.ask("r2", table.ticket(2))
    verdict = admission.verdict("r2")
    assert verdict is not None and verdict.failure == "circuit" and "as soon as it answers" in verdict.reason


def test_a_peer_that_comes_back_as_another_life_is_served_with_nobody_asking() -> None:
    """Rule 7 with the circuit open: what is new at the old address is paired with by itself, its circuit is closed."""
    table = Table().pair()
    table.lose = lambda message: True
    table.wait(60.0)
    for machine in (table.worker, table.admission):
        link = machine.links[ADDRESS]
        assert (link.state, link.circuit.state) == (LinkState.DOWN, CircuitState.OPEN)
    table.prefill = table.new_prefill(P2)
    table.lose = lambda message: False
    back = table.time.now
    while any(m.links[ADDRESS].state is not LinkState.PAIRED for m in (table.worker, table.admission)):
        table.wait(0.25)
        assert table.time.now - back < 5.0, "it must not take longer than that until a restarted peer is used"
    assert table.said(Welcome)[-1].epoch == P2
    table.compute(OTHER, 2 * BLOCK)
    table.pack()
    assert table.ask(3, transfer=OTHER, tokens=2 * BLOCK, epoch=P2).kind is VerdictKind.CLAIMED
    table.admission.hand_over("r3")
    table.load(3, transfer=OTHER, tokens=2 * BLOCK, epoch=P2)
    table.read()
    assert table.reports[-1].ok


def test_a_link_whose_network_was_cut_is_half_open_once_the_same_life_answers() -> None:
    table = Table().pair()
    table.lose = lambda message: True
    table.wait(60.0)
    table.lose = lambda message: False
    table.wait(5.0)
    link = table.admission.links[ADDRESS]
    assert (link.state, link.circuit.state) == (LinkState.PAIRED, CircuitState.HALF_OPEN)


def test_a_peer_that_fails_and_falls_silent_is_tried_once_it_answers_and_not_before() -> None:
    """Its time is over long before it answers; a probe of the silent peer would only wait."""
    time = Time()
    limits = replace(LINK, circuit=CircuitLimits(failures=1, open_s=40.0, open_max_s=60.0))
    link = PeerLink(ADDRESS, claim(7), decode_facts(), limits, time)
    hello = link.refresh()
    assert hello is not None
    rank = prefill_protocol(prefill_facts(), P, time)

    def answer(hello: Hello) -> None:
        rank.receive("d", hello)
        (said,) = rank.take_actions()
        link.receive(said.message)  # type: ignore[union-attr,arg-type]

    answer(hello)
    assert link.state is LinkState.PAIRED
    link.circuit.failed("broken")
    for _ in range(4 * 60):
        time.now += 0.25
        link.tick()
    assert link.state is LinkState.DOWN
    assert link.admit("r1", P) == (
        f"the circuit of {ADDRESS} is open: it failed {link.circuit._failures} times in a row, "
        "last: no answer within 5 s; tried again as soon as it answers"
    )
    while (again := link.tick()) is None:
        time.now += 0.25
    answer(again)
    assert link.state is LinkState.PAIRED
    assert link.admit("r1", P) is None and link.admit("r2", P) is not None


# Hello is asked for 5 s, then 1 s is paused: every moment of that at which the first request may come.
PHASES = [0.25 * n for n in range(24)]


def back_as_another_life(phase: float) -> Table:
    """A peer that died, of whose return nothing has been heard here yet: its network takes a little longer."""
    table = Table().pair()
    table.lose = lambda message: True
    table.wait(60.0 + phase)
    table.prefill = table.new_prefill(P2)
    table.compute(T, 2 * BLOCK)
    return table


@pytest.mark.parametrize("phase", PHASES)
def test_the_first_request_that_names_the_new_life_is_served(phase: float) -> None:
    """It comes before any answer: the open circuit is the dead life's, and so is a question that ends just then."""
    table = back_as_another_life(phase)
    link = table.admission.links[ADDRESS]
    assert (link.state, link.circuit.state) == (LinkState.DOWN, CircuitState.OPEN)
    assert table.ask(1, tokens=2 * BLOCK).failure == "circuit"  # it names the life that died
    assert table.ask(2, tokens=2 * BLOCK, epoch=P2).kind is VerdictKind.PENDING
    table.wait(1.5)
    assert table.admission.verdict("r2").kind is VerdictKind.PENDING  # type: ignore[union-attr]
    table.lose = lambda message: False
    table.wait(4.0)  # the longest pause between two Hellos, 8 * resend_s
    assert table.admission.verdict("r2").kind is VerdictKind.CLAIMED  # type: ignore[union-attr]
    table.admission.hand_over("r2")
    table.load(2, tokens=2 * BLOCK, epoch=P2)
    table.pack()
    table.read()
    assert table.reports[-1].ok


@pytest.mark.parametrize("phase", PHASES)
def test_its_first_load_succeeds_where_the_worker_hears_of_the_new_life_last(phase: float) -> None:
    table = back_as_another_life(phase)
    table.load(2, tokens=2 * BLOCK, epoch=P2)
    table.wait(1.5)
    assert table.reports == []
    table.lose = lambda message: False
    table.wait(4.0)
    table.pack()
    table.read()
    assert [(r.request, r.ok) for r in table.reports] == [("r2", True)]


@pytest.mark.parametrize("phase", PHASES)
def test_a_life_that_is_named_but_not_there_is_waited_for_once(phase: float) -> None:
    """One whole question: 5 s from the next Hello on, and at most another 5 s for the one that is out."""
    table = back_as_another_life(phase)
    begun = table.time.now
    assert table.ask(1, tokens=2 * BLOCK, epoch=P2).kind is VerdictKind.PENDING
    while table.admission.verdict("r1").kind is VerdictKind.PENDING:  # type: ignore[union-attr]
        if table.time.now < begun + 4.75:  # those that come later wait with it, and do not make it longer
            n = int(100 * table.time.now)
            assert table.ask(n, tokens=2 * BLOCK, epoch=P2).kind is VerdictKind.PENDING
        table.wait(0.25)
    assert table.admission.verdict("r1").failure == "no_answer"  # type: ignore[union-attr]
    assert 5.0 <= table.time.now - begun <= 10.0
    assert table.ask(2, tokens=2 * BLOCK, epoch=P2).failure == "circuit"
    assert table.ask(3, tokens=2 * BLOCK).failure == "circuit"
    table.lose = lambda message: False
    table.wait(5.0)
    table.compute(OTHER, 2 * BLOCK)
    assert table.ask(4, transfer=OTHER, tokens=2 * BLOCK, epoch=P2).kind is VerdictKind.CLAIMED
