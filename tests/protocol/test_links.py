"""Peers come and go, and clients name what they like: links are forgotten, and no peer holds up another."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from hawk_connector.protocol.admission import AdmissionProtocol, VerdictKind
from hawk_connector.protocol.decode import DecodeProtocol
from hawk_connector.protocol.decode_actions import Disconnect, Fence, Read, SendTo
from hawk_connector.protocol.link import LinkState
from hawk_connector.protocol.messages import Abort, Hello, Renew, Welcome
from hawk_connector.protocol.prefill import PrefillProtocol
from hawk_connector.protocol.prefill_actions import Pack, Send
from hawk_connector.protocol.ticket import RankAddress, Ticket
from tests.protocol.table import ADDRESS, ADMISSION, DECODE, DIGEST, LINK, P2, D, P, T, Table, Time, claim
from tests.protocol.world import BLOCK, decode_facts, prefill_facts, prefill_protocol

FEW = replace(ADMISSION, link=replace(LINK, max_links=4))


def _ticket(address: str, n: int = 1) -> Ticket:
    return Ticket(T, claim(n), DIGEST, BLOCK, (RankAddress(address, P),))


def _pass(machine: AdmissionProtocol, time: Time, seconds: float, step: float = 0.25) -> list[SendTo | Disconnect]:
    said = machine.take_actions()
    end = time.now + seconds
    while time.now < end:
        time.now += step
        machine.tick()
        said += machine.take_actions()
    return said


def _disconnected(said: list[SendTo | Disconnect]) -> list[str]:
    return sorted(action.address for action in said if isinstance(action, Disconnect))


@pytest.mark.parametrize("step", [0.25, 5.0])
def test_a_peer_that_never_answers_is_forgotten_and_disconnected_once(step: float) -> None:
    """Whatever the step: one in which both its next Hello and its forgetting are due must not connect to it again."""
    time = Time()
    admission = AdmissionProtocol(D, decode_facts(), ADMISSION, time)
    for n in range(3):
        admission.ask(f"r{n}", _ticket(f"p:{n}"))
    said = _pass(admission, time, LINK.hello_deadline_s + 1)
    assert [admission.links[f"p:{n}"].state for n in range(3)] == [LinkState.DOWN] * 3
    for n in range(3):
        admission.drop(f"r{n}")
    said = _pass(admission, time, 200, step)
    assert admission.links == {}
    assert _disconnected(said) == ["p:0", "p:1", "p:2"]
    # The last thing said of an address is that it is left: a message after it would connect again.
    assert [next(a for a in reversed(said) if a.address == f"p:{n}") for n in range(3)] == [
        Disconnect(f"p:{n}") for n in range(3)
    ]


def test_a_configured_peer_is_never_forgotten() -> None:
    time = Time()
    admission = AdmissionProtocol(D, decode_facts(), ADMISSION, time)
    admission.connect("p:1")
    assert _disconnected(_pass(admission, time, 3600)) == []
    assert admission.links["p:1"].state is LinkState.DOWN


def test_a_peer_that_answers_is_kept() -> None:
    table = Table()
    table.compute()
    assert table.ask().kind is VerdictKind.CLAIMED
    table.admission.drop("r1")
    table.exchange()
    table.wait(600)
    assert table.disconnects == [] and table.admission.links[ADDRESS].state is LinkState.PAIRED


def test_past_the_limit_the_least_recently_used_idle_link_makes_room() -> None:
    time = Time()
    admission = AdmissionProtocol(D, decode_facts(), FEW, time)
    for n in range(4):
        admission.ask(f"r{n}", _ticket(f"p:{n}"))
        time.now += 0.1
    # All four are awaited: there is no room for a fifth, but for requests to the same peers.
    assert not admission.has_room(["p:9"]) and admission.has_room(["p:1", "p:2"])
    _pass(admission, time, 30)
    assert {admission.verdict(f"r{n}").kind for n in range(4)} == {VerdictKind.FAILED}  # type: ignore[union-attr]
    assert len(admission.links) == 4
    assert admission.has_room(["p:9"])
    admission.ask("r0", _ticket("p:0"))  # used again
    admission.ask("new", _ticket("p:9"))
    assert _disconnected(admission.take_actions()) == ["p:1"]
    assert sorted(admission.links) == ["p:0", "p:2", "p:3", "p:9"]


def test_peers_that_are_down_make_room_before_one_that_answers() -> None:
    time = Time()
    rank = prefill_protocol(prefill_facts(), P, time)
    admission = AdmissionProtocol(D, decode_facts(), FEW, time)
    admission.ask("live", _ticket("p:0"))
    _answer(admission, {"p:0": rank})
    admission.drop("live")
    for n in range(1, 4):
        admission.ask(f"r{n}", _ticket(f"p:{n}"))
    for _ in range(100):
        time.now += 0.25
        admission.tick()
        _answer(admission, {"p:0": rank})
    assert Counter(link.state for link in admission.links.values()) == {LinkState.PAIRED: 1, LinkState.DOWN: 3}
    for n in range(4, 7):
        admission.ask(f"r{n}", _ticket(f"p:{n}"))
    assert sorted(admission.links) == ["p:0", "p:4", "p:5", "p:6"]


def _answer(admission: AdmissionProtocol, ranks: dict[str, PrefillProtocol]) -> None:
    for action in admission.take_actions():
        if isinstance(action, SendTo) and action.address in ranks:
            ranks[action.address].receive("d", action.message)  # type: ignore[arg-type]
    for address, rank in ranks.items():
        for said in rank.take_actions():
            if isinstance(said, Send):
                admission.receive(address, said.message)


def test_a_link_made_anew_takes_no_answer_to_its_forerunner() -> None:
    """Both ask with their first Hello; the late answer to the forgotten one names a life that may be over."""
    time = Time()
    admission = AdmissionProtocol(D, decode_facts(), replace(ADMISSION, link=replace(LINK, max_links=1)), time)
    admission.ask("r1", _ticket("p:0"))
    first = _hello(admission)
    _pass(admission, time, 30)
    admission.ask("r2", _ticket("p:1"))  # displaces it
    _pass(admission, time, 30)
    admission.ask("r3", _ticket("p:0"))
    second = _hello(admission)
    old, new = (prefill_protocol(prefill_facts(), epoch, time) for epoch in (P, P2))
    for rank, hello in ((old, first), (new, second)):
        rank.receive("d", hello)
    late, answer = (next(a.message for a in r.take_actions() if isinstance(a, Send)) for r in (old, new))
    assert isinstance(late, Welcome) and isinstance(answer, Welcome)
    admission.receive("p:0", late)
    assert admission.links["p:0"].state is LinkState.CONNECTING
    admission.receive("p:0", answer)
    assert admission.links["p:0"].remote_epoch == P2


def _hello(admission: AdmissionProtocol) -> Hello:
    return next(a.message for a in admission.take_actions() if isinstance(a, SendTo) and isinstance(a.message, Hello))


def test_the_engine_of_a_peer_that_left_for_good_is_dropped() -> None:
    table = Table()
    table.compute()
    table.ask()
    table.admission.hand_over("r1")
    table.load()
    table.pack()
    while table.reads:
        table.read()
    assert [report.ok for report in table.reports] == [True]
    table.wait(300)
    assert table.fences == []  # it answers: its engine is kept
    table.lose = lambda message: True
    table.wait(300)
    assert table.fences == [Fence(ADDRESS)]
    assert sorted(table.disconnects) == [ADDRESS, ADDRESS]  # the worker's connection and the scheduler's
    table.worker.fenced(ADDRESS)
    table.wait(300)
    assert len(table.fences) == 1 and table.worker.held()["fences"] == 0 and table.worker.links == {}


def test_the_engine_of_a_configured_peer_that_left_is_dropped_too() -> None:
    table = Table().pair()
    table.compute()
    table.load()
    table.pack()
    while table.reads:
        table.read()
    table.lose = lambda message: True
    table.wait(300)
    assert table.fences == [Fence(ADDRESS)]
    assert table.worker.links[ADDRESS].state is LinkState.DOWN


def test_a_claim_is_not_held_for_ever() -> None:
    """Decode has no blocks: the prefill side's buffer must not wait for them without end."""
    table = Table()
    table.compute()
    assert table.ask().kind is VerdictKind.CLAIMED
    table.pack()
    table.wait(ADMISSION.claim_hold_s + 20)
    verdict = table.admission.verdict("r1")
    assert verdict is not None and verdict.kind is VerdictKind.GONE
    assert "waited too long for blocks" in verdict.reason
    assert len(table.said(Abort)) == 1
    renewals = len(table.said(Renew))
    table.admission.drop("r1")
    table.wait(60)
    assert len(table.said(Renew)) == renewals and table.held() == {}


def test_deadlines_are_judged_when_vllm_asks_though_nobody_ticks() -> None:
    table = Table()
    table.compute()
    assert table.ask().kind is VerdictKind.CLAIMED
    table.lose = lambda message: True
    assert table.ask(2, transfer="2" * 32).kind is VerdictKind.PENDING
    table.time.now += ADMISSION.admission_deadline_s
    late = table.admission.verdict("r2")
    assert late is not None and late.kind is VerdictKind.FAILED and "within 10 s" in late.reason
    table.time.now += ADMISSION.claim_hold_s
    held = table.admission.verdict("r1")
    assert held is not None and held.kind is VerdictKind.GONE


def test_a_claim_that_vllm_has_just_been_told_of_is_there_when_it_gives_blocks() -> None:
    table = Table()
    table.compute()
    table.ask()
    table.pack()
    table.wait(ADMISSION.claim_hold_s - 0.01, step=0.5)
    verdict = table.admission.verdict("r1")
    assert verdict is not None and verdict.kind is VerdictKind.CLAIMED
    table.wait(1.0)
    assert table.admission.hand_over("r1") == table.ticket()


def test_only_a_claim_is_handed_over() -> None:
    table = Table()
    assert table.ask().kind is VerdictKind.GONE  # prefill knows of no such transfer
    assert table.admission.hand_over("r1") is None
    table.compute(finish=False)
    table.lose = lambda message: True
    table.ask(2)
    assert table.admission.hand_over("r2") is None
    assert table.admission.verdict("r2") is None


def test_a_peer_whose_reads_hang_does_not_hold_up_another() -> None:
    time = Time()
    worker = DecodeProtocol(D, decode_facts(), DECODE, time)
    ranks = {"a:1": prefill_protocol(prefill_facts(), P, time), "b:1": prefill_protocol(prefill_facts(), P2, time)}
    reads: list[Read] = []

    def exchange() -> None:
        for _ in range(20):
            for action in worker.take_actions():
                if isinstance(action, SendTo):
                    ranks[action.address].receive("w", action.message)  # type: ignore[arg-type]
                elif isinstance(action, Read):
                    reads.append(action)
            for address, rank in ranks.items():
                for done in rank.take_actions():
                    if isinstance(done, Pack):
                        rank.packed(done.job, True)
                    elif isinstance(done, Send):
                        worker.receive(address, done.message)

    for n, (address, rank) in enumerate(ranks.items()):
        worker.connect(address)
        exchange()
        transfer = str(n + 1) * 32
        rank.begin(transfer, DIGEST, 8 * BLOCK)
        rank.computed(transfer, 8 * BLOCK)
        rank.finished(transfer)
        ranks_of = (RankAddress(address, rank.epoch),)
        worker.load(f"r{n}", Ticket(transfer, claim(n), DIGEST, 8 * BLOCK, ranks_of), 0, tuple(range(8 * n, 8 * n + 8)))
        exchange()
    # Four parcels each, two reads at a time and peer; nothing of a:1 ever ends.
    assert Counter(read.address for read in reads) == {"a:1": 2, "b:1": 2}
    ended: set[int] = set()
    for _ in range(4):
        of_b = [read for read in reads if read.address == "b:1" and read.id not in ended]
        ended.add(of_b[0].id)
        worker.read_ended(of_b[0].id, True)
        exchange()
    assert Counter(read.address for read in reads) == {"a:1": 2, "b:1": 4}
    assert worker.held()["loads"] == 1
