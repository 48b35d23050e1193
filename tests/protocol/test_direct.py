"""Mode direct at one table: what is offered and when, and what takes an offer back."""

from __future__ import annotations

import pytest

from hawk_connector.plan.block_plan import BlockPlan, RemoteBlocks
from hawk_connector.protocol.messages import Accepted, Gone, Hello, Ready, Refused, Welcome
from hawk_connector.protocol.prefill_actions import PrefillLimits
from hawk_connector.protocol.transfer import ParcelState
from tests.protocol.table import Table
from tests.protocol.world import BLOCK, CACHE_ADDRESS, LIMITS, direct_facts


def table(limits: PrefillLimits = LIMITS) -> Table:
    return Table(facts=direct_facts(), limits=limits).pair()


def read_plans(t: Table) -> list[BlockPlan]:
    plans = [read.plan for read in t.reads]
    assert all(isinstance(plan, BlockPlan) for plan in plans)
    return plans  # type: ignore[return-value]


def test_the_whole_way() -> None:
    t = table()
    (welcome,) = {m.cache for m in t.said(Welcome)}
    assert welcome == (CACHE_ADDRESS,)
    t.compute()
    assert t.packs == [] and len(t.settles) == 2
    t.settle()
    t.load()
    # Two parcels of two blocks each, named by the prefill side's ids.
    assert [ready.blocks for ready in t.said(Ready)] == [(7, 8), (9, 10)]
    assert {ready.address for ready in t.said(Ready)} == {0}
    assert [plan.remote for plan in read_plans(t)] == [
        RemoteBlocks((CACHE_ADDRESS,), (7, 8)),
        RemoteBlocks((CACHE_ADDRESS,), (9, 10)),
    ]
    assert t.released == []
    t.read()
    assert t.released == [] and t.held()["requests_with_blocks"] == 1
    t.read()
    # The last verdict, and vLLM has its blocks back; no byte has gone through the send buffer.
    assert len(t.said(Accepted)) == 2 and len(t.released) == 1 and t.held() == {}
    assert t.reports[0].ok
    assert t.ended[0].read_in_place == sum(ready.nbytes for ready in t.said(Ready))


def test_nothing_is_offered_before_it_is_in_memory() -> None:
    t = table()
    t.compute()
    t.load()
    assert t.said(Ready) == []
    t.settle()
    assert len(t.said(Ready)) == 2


@pytest.mark.parametrize("when", ["offered", "reading", "read"])
def test_preemption_takes_an_offer_back(when: str) -> None:
    t = table()
    t.compute(finish=False)
    t.settle()
    t.load()
    first = t.said(Ready)[0]
    if when == "read":
        t.lose = lambda message: isinstance(message, Accepted)
        t.read()
        t.lose = lambda message: False
    t.prefill.preempted(t.ticket().transfer)
    parcels = t.prefill.live[t.ticket().transfer].parcels
    kept = ParcelState.ACCEPTED if when == "read" else ParcelState.WAITING
    assert [p.state for p in parcels] == [kept, ParcelState.WAITING]
    if when != "offered":
        t.prefill.computed(t.ticket().transfer, 4 * BLOCK, (20, 21, 22, 23))
        t.exchange()
        t.settle()
        again = t.said(Ready)[-1]
        assert again.generation > first.generation and again.blocks == (22, 23)
    t.read()
    # The old bytes are disowned, whatever has been offered since.
    assert [gone.reason for gone in t.said(Gone)][:1] == ["failed"]
    assert not t.reports or not t.reports[0].ok


def test_a_transfer_that_nobody_reads_keeps_its_blocks_for_so_long_only() -> None:
    t = table()
    t.compute()
    t.settle()
    t.wait(LIMITS.lease_s + 1)
    assert len(t.released) == 1 and t.prefill.held()["transfers"] == 0


def test_a_claimant_that_renews_and_does_not_read_keeps_them_no_longer_than_the_wait() -> None:
    t = table()
    t.compute()
    t.settle()
    t.load()  # its reads never end, and it renews its lease
    t.wait(LIMITS.buffer_wait_s - 1)
    assert t.released == []
    t.wait(2)
    assert len(t.released) == 1
    assert {gone.reason for gone in t.said(Gone)} == {"expired"}


def test_blocks_that_were_not_told_of_fail_the_transfer_and_not_the_side() -> None:
    t = table()
    t.prefill.begin(t.ticket().transfer, t.ticket().digest, 4 * BLOCK)
    t.prefill.computed(t.ticket().transfer, 4 * BLOCK, (1, 2, 3))
    t.prefill.finished(t.ticket().transfer)
    t.exchange()
    t.settle()
    t.load()
    assert [gone.reason for gone in t.said(Gone)] == ["failed"]
    assert len(t.released) == 1


def test_a_cache_that_could_not_be_registered_is_refused() -> None:
    t = Table(facts=direct_facts())
    t.prefill._peers.exposed = False
    t.pair()
    (refused,) = {m.mismatches for m in t.said(Refused)}
    assert [m.field for m in refused] == ["kv cache"] and "ulimit -l" in refused[0].fix
    assert t.said(Welcome) == [] and len(t.said(Hello)) == 2
