"""Digests of parcels: one side asks, both compare, and bytes that changed on the way fail the load by name."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hawk_connector.protocol.admission import AdmissionProtocol
from hawk_connector.protocol.circuit import CircuitState
from hawk_connector.protocol.decode import DecodeProtocol
from hawk_connector.protocol.messages import Abort, Done, Hello, Ready
from tests.protocol.table import ADDRESS, ADMISSION, DECODE, DIGEST, LINK, OTHER, D, T, Table
from tests.protocol.world import BLOCK, LIMITS

ONE, TWO = "1" * 32, "2" * 32


def asking(table: Table) -> Table:
    """The table with a decode side that asks for digests."""
    link = replace(LINK, digests=True)
    table.worker = DecodeProtocol(D, table.facts, replace(DECODE, link=link), table.time)
    table.admission = AdmissionProtocol(D, table.facts, replace(ADMISSION, link=link), table.time)
    return table


def hashed(table: Table, value: str | None = ONE) -> None:
    table.prefill.hashed(table.hashes.pop(0).job, value)
    table.exchange()


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_one_side_that_asks_is_enough(side: str) -> None:
    table = asking(Table()) if side == "decode" else Table(limits=replace(LIMITS, digests=True))
    table.worker.connect(ADDRESS)
    table.exchange()
    assert [m.digests for m in table.said(Hello)] == [side == "decode"]
    table.compute(tokens=2 * BLOCK)
    table.pack()
    # Before anybody pulls: the first who does finds it there.
    assert [(h.transfer, h.skip_blocks) for h in table.hashes] == [(T, 0)]
    table.load(tokens=2 * BLOCK)
    assert table.said(Ready) == [] and table.reads == []
    hashed(table)
    assert [m.digest for m in table.said(Ready)] == [ONE] and [r.digest for r in table.reads] == [ONE]
    table.read()
    assert [r.ok for r in table.reports] == [True] and table.held() == {}


def test_nobody_asks_nobody_computes() -> None:
    table = Table().pair()
    table.compute(tokens=2 * BLOCK)
    table.pack()
    table.load(tokens=2 * BLOCK)
    assert table.hashes == [] and [m.digest for m in table.said(Ready)] == [""] and table.reads[0].digest == ""


def test_other_bytes_fail_the_load_after_the_fence_and_count_against_the_peer() -> None:
    table = asking(Table())
    table.worker.connect(ADDRESS)
    table.exchange()
    for n in (1, 2, 3):
        table.compute(f"{n:032x}", 2 * BLOCK)
        table.pack()
        hashed(table)
        table.load(n, transfer=f"{n:032x}", tokens=2 * BLOCK)
        table.worker.read_ended(table.reads.pop().id, False, "what came has digest 2..", failure="corrupt")
        table.exchange()
        assert len(table.reports) == n - 1 and table.said(Done) == []
        table.worker.fenced(ADDRESS)
        table.exchange()
    assert [(r.ok, r.failure) for r in table.reports] == [(False, "corrupt")] * 3
    assert len(table.said(Abort)) == 3 and table.held() == {}
    assert table.worker.links[ADDRESS].circuit.state is CircuitState.OPEN


def test_the_digest_leaves_out_what_decode_has() -> None:
    """Parcels of two blocks; decode has three: of the second parcel the second block alone counts."""
    table = asking(Table()).pair()
    table.compute(tokens=4 * BLOCK)
    table.pack()
    while table.hashes:
        hashed(table)
    table.load(first_block=3)
    assert [(h.skip_blocks, h.job) for h in table.hashes] == [(1, table.hashes[0].job)]
    hashed(table, TWO)
    (ready,) = table.said(Ready)
    assert (ready.parcel, ready.digest) == (1, TWO)
    table.read()
    assert [r.ok for r in table.reports] == [True]


def test_an_answer_for_other_blocks_or_an_older_pack_is_not_taken() -> None:
    table = asking(Table()).pair()
    table.compute(tokens=2 * BLOCK, finish=False)
    table.pack()
    first = table.hashes.pop()
    table.prefill.preempted(T)  # unclaimed: the pack is dropped, its region may be another's
    table.prefill.computed(T, 2 * BLOCK)
    table.exchange()
    table.pack()
    table.load(tokens=2 * BLOCK, first_block=1)
    stale, wanted = table.hashes
    assert (stale.skip_blocks, wanted.skip_blocks) == (0, 1)
    for job in (first, stale):
        table.prefill.hashed(job.job, TWO)
        table.exchange()
    assert table.said(Ready) == []
    table.prefill.hashed(wanted.job, ONE)
    table.exchange()
    assert [m.digest for m in table.said(Ready)] == [ONE]


def test_the_digest_of_an_older_pack_is_not_taken_for_the_new_one() -> None:
    table = asking(Table()).pair()
    table.compute(tokens=2 * BLOCK, finish=False)
    table.pack()
    old = table.hashes.pop()
    table.prefill.preempted(T)
    table.prefill.computed(T, 2 * BLOCK)
    table.exchange()
    table.pack()
    table.load(tokens=2 * BLOCK)
    (new,) = table.hashes
    table.prefill.hashed(old.job, TWO)
    table.exchange()
    assert table.said(Ready) == []
    table.prefill.hashed(new.job, ONE)
    table.exchange()
    assert [m.digest for m in table.said(Ready)] == [ONE]


def test_a_digest_that_cannot_be_computed_ends_its_transfer_alone() -> None:
    table = asking(Table()).pair()
    table.compute(T, 2 * BLOCK)
    table.compute(OTHER, 2 * BLOCK)
    table.pack()
    table.load(1, tokens=2 * BLOCK)
    table.load(2, transfer=OTHER, tokens=2 * BLOCK)
    hashed(table, None)
    hashed(table)
    table.read()
    assert {r.request: (r.ok, r.failure) for r in table.reports} == {"r1": (False, "failed"), "r2": (True, None)}
    assert table.held() == {}


def test_a_repeated_pull_asks_for_no_second_digest() -> None:
    table = asking(Table()).pair()
    table.compute(tokens=2 * BLOCK)
    table.pack()
    table.load(tokens=2 * BLOCK)
    table.wait(3.0)
    assert len(table.hashes) == 1
    hashed(table)
    assert len(table.reads) == 1


def test_an_abort_while_a_digest_is_computed_leaves_nothing() -> None:
    table = asking(Table()).pair()
    table.compute(tokens=2 * BLOCK)
    table.pack()
    table.load(tokens=2 * BLOCK)
    table.worker.abort("r1")
    table.exchange()
    assert table.held() == {}
    hashed(table)
    assert table.said(Ready) == [] and table.held() == {}


def test_a_prefill_side_that_gives_none_is_not_believed() -> None:
    """One of an older release knows no digests; who asked for them must not get bytes unlooked-at."""
    table = asking(Table()).pair()
    table.compute(tokens=2 * BLOCK)
    table.pack()
    table.load(tokens=2 * BLOCK)
    ready = Ready(
        epoch=table.prefill.epoch,
        to=D,
        transfer=T,
        claim=table.ticket().claim,
        parcel=0,
        generation=0,
        address=0,
        nbytes=table.hashes[0].plan.nbytes,
    )
    table.worker.receive(ADDRESS, ready)
    table.exchange()
    assert table.reads == []
    (report,) = table.reports
    assert (report.ok, report.failure) == (False, "offer") and "parcel_digest" in report.reason


def test_the_digest_of_tokens_and_that_of_bytes_are_two_things() -> None:
    table = asking(Table()).pair()
    table.compute(tokens=2 * BLOCK, digest=DIGEST)
    table.pack()
    hashed(table)
    assert table.ask(1, tokens=2 * BLOCK).kind.value == "claimed"
