"""What one peer may have: transfers, send buffer, places in the books; and Pulls that come before their transfers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hawk_connector.protocol.early_pulls import EarlyPulls
from hawk_connector.protocol.messages import PROTOCOL_VERSION, Abort, Claimed, Done, Gone, Hello, Pull, Ready, Stale
from hawk_connector.protocol.prefill import PrefillProtocol
from hawk_connector.protocol.prefill_actions import Pack, Send
from tests.protocol.table import DIGEST, OTHER, P, T, Time, claim
from tests.protocol.world import BLOCK, LIMITS, decode_facts, prefill_facts, prefill_protocol

A, B, C = "a1" * 16, "b2" * 16, "c3" * 16
BLOCK_BYTES = 2 * 2 * 1088  # pools x heads x bytes of a bfp8 tile
PARCEL_BYTES = 2 * BLOCK_BYTES  # two blocks


class Rank:
    """One prefill rank, spoken to by hand; every pack ends well at once."""

    def __init__(self, *, buffer_parcels: int = 8, ranks: int = 1, rank: int = 0, **limits: Any) -> None:
        self.time = Time()
        size = buffer_parcels * (-(-PARCEL_BYTES // 256) * 256)
        facts = prefill_facts(buffer_bytes=size, ranks=ranks, rank=rank)
        self.machine: PrefillProtocol = prefill_protocol(facts, P, self.time, replace(LIMITS, **limits))
        self.packs: list[Pack] = []

    def hear(self, identity: str, message: Any) -> list[Any]:
        """The message comes; what is said because of it, to anybody."""
        self.machine.receive(identity, message)
        return self.said()

    def said(self) -> list[Any]:
        said = []
        while actions := self.machine.take_actions():
            for action in actions:
                if isinstance(action, Send):
                    said.append(action.message)
                elif isinstance(action, Pack):
                    self.packs.append(action)
                    self.machine.packed(action.job, True)
        return said

    def hello(self, epoch: str, identity: str = "") -> list[Any]:
        message = Hello(epoch=epoch, version=PROTOCOL_VERSION, facts=decode_facts(), number=1)
        return self.hear(identity or epoch, message)

    def compute(self, transfer: str, blocks: int = 2) -> None:
        self.machine.begin(transfer, DIGEST, blocks * BLOCK)
        self.machine.computed(transfer, blocks * BLOCK)
        self.machine.finished(transfer)
        self.said()

    def pull(self, epoch: str, transfer: str, blocks: int = 2, *, deliver: bool = True, n: int = 1) -> list[Any]:
        return self.hear(
            epoch,
            Pull(
                epoch=epoch,
                to=P,
                transfer=transfer,
                claim=claim(n),
                digest=DIGEST,
                tokens=blocks * BLOCK,
                deliver=deliver,
            ),
        )

    def done(self, epoch: str, ready: Ready) -> list[Any]:
        fields = {name: getattr(ready, name) for name in ("transfer", "claim", "parcel", "generation")}
        return self.hear(epoch, Done(epoch=epoch, to=P, **fields))


def kinds(said: list[Any], kind: type) -> list[Any]:
    return [message for message in said if isinstance(message, kind)]


def transfers(count: int, first: int = 1) -> list[str]:
    return [f"{n:032x}" for n in range(first, first + count)]


# --- transfers


def test_a_decode_side_may_claim_so_many_transfers_and_the_others_notice_nothing() -> None:
    rank = Rank(max_transfers_per_peer=3)
    rank.hello(A), rank.hello(B)
    for transfer in transfers(5):
        rank.compute(transfer)
    answers = [rank.pull(A, transfer, deliver=False) for transfer in transfers(4)]
    assert [len(kinds(said, Claimed)) for said in answers] == [1, 1, 1, 0]
    assert [m.reason for m in answers[3]] == ["busy"]
    assert len(kinds(rank.pull(A, transfers(1)[0], deliver=False), Claimed)) == 1  # a repetition is no further one
    assert len(kinds(rank.pull(B, transfers(1, 5)[0], deliver=False), Claimed)) == 1
    # What it has given back it may have again.
    gone = Abort(epoch=A, to=P, transfer=transfers(1)[0], claim=claim(1), digest=DIGEST)
    assert [m.reason for m in rank.hear(A, gone)] == ["aborted"]
    assert len(kinds(rank.pull(A, transfers(4)[3], deliver=False), Claimed)) == 1


# --- the send buffer


def test_one_that_reads_nothing_does_not_keep_another_from_the_buffer() -> None:
    """Eight parcels fit.  A claims a transfer of 16 parcels and never reads; B's parcels still come one by one."""
    rank = Rank(buffer_parcels=8, peer_buffer_share=0.5)
    rank.hello(A), rank.hello(B)
    rank.machine.begin(T, DIGEST, 32 * BLOCK)
    rank.machine.begin(OTHER, DIGEST, 8 * BLOCK)
    assert len(kinds(rank.pull(A, T, 32), Claimed)) == 1 and len(kinds(rank.pull(B, OTHER, 8), Claimed)) == 1
    rank.machine.computed(T, 32 * BLOCK)
    rank.said()
    assert [p.transfer for p in rank.packs] == [T] * 4  # half of eight
    rank.machine.computed(OTHER, 8 * BLOCK)
    offered = kinds(rank.said(), Ready)
    assert [m.transfer for m in offered] == [OTHER] * 4
    for ready in offered:
        rank.done(B, ready)
    assert rank.machine.held()["transfers"] == 2  # B's has not finished for vLLM yet
    rank.machine.finished(OTHER)
    rank.said()
    assert rank.machine.held()["transfers"] == 1 and rank.machine.held()["regions"] == 4


def test_claims_that_wait_for_blocks_do_not_keep_what_is_being_read_from_the_buffer() -> None:
    """A's share is full of parcels that it cannot take before the transfer that it reads has ended."""
    rank = Rank(buffer_parcels=8, peer_buffer_share=0.5)
    rank.hello(A), rank.hello(B)
    waiting = transfers(4, 100)
    for transfer in waiting:
        rank.compute(transfer)
        rank.pull(A, transfer, deliver=False)
    assert [p.transfer for p in rank.packs] == waiting  # half of eight
    rank.machine.begin(T, DIGEST, 6 * BLOCK)
    rank.pull(A, T, 6)
    rank.machine.computed(T, 6 * BLOCK)
    (first,) = kinds(rank.said(), Ready)
    (second,) = kinds(rank.done(A, first), Ready)
    (third,) = kinds(rank.done(A, second), Ready)
    assert [m.parcel for m in (first, second, third)] == [0, 1, 2]


def test_alone_a_decode_side_may_have_all_of_the_buffer() -> None:
    rank = Rank(buffer_parcels=8, peer_buffer_share=0.5)
    rank.hello(A)
    rank.machine.begin(T, DIGEST, 32 * BLOCK)
    rank.pull(A, T, 32)
    rank.machine.computed(T, 32 * BLOCK)
    rank.said()
    assert len(rank.packs) == 8


def test_a_share_smaller_than_a_parcel_allows_one() -> None:
    rank = Rank(buffer_parcels=8, peer_buffer_share=0.01)
    rank.hello(A), rank.hello(B)
    rank.machine.begin(T, DIGEST, 6 * BLOCK)
    rank.pull(A, T, 6)
    rank.machine.computed(T, 6 * BLOCK)
    (first,) = kinds(rank.said(), Ready)
    (second,) = kinds(rank.done(A, first), Ready)
    (third,) = kinds(rank.done(A, second), Ready)
    assert [m.parcel for m in (first, second, third)] == [0, 1, 2]


def test_its_share_is_free_again_with_what_is_given_back() -> None:
    rank = Rank(buffer_parcels=8, peer_buffer_share=0.5)
    rank.hello(A), rank.hello(B)
    for transfer in (T, OTHER):
        rank.machine.begin(transfer, DIGEST, 8 * BLOCK)
        rank.pull(A, transfer, 8)
        rank.machine.computed(transfer, 8 * BLOCK)
        rank.said()
    assert [p.transfer for p in rank.packs] == [T] * 4
    rank.hear(A, Abort(epoch=A, to=P, transfer=T, claim=claim(1), digest=DIGEST))
    assert [p.transfer for p in rank.packs] == [T] * 4 + [OTHER] * 4


# --- the book of peers


def test_a_connection_that_says_many_epochs_takes_the_place_of_its_own_only() -> None:
    rank = Rank(max_peers=4)
    rank.hello(A)
    for n in range(50):
        rank.hello(f"{n + 100:032x}", identity="chatty")
    rank.compute(T)
    assert kinds(rank.pull(A, T), Stale) == [] and rank.machine.held()["transfers"] == 1
    assert len([v for v in rank.machine.peers().values() if not isinstance(v, tuple)]) == 2


# --- Pulls that come first


def test_with_several_ranks_a_pull_may_come_a_moment_before_its_transfer() -> None:
    rank = Rank(ranks=2, early_pull_s=1.0)
    rank.hello(A)
    assert rank.pull(A, T) == [] and rank.machine.held()["early_pulls"] == 1
    rank.time.now += 0.9
    rank.machine.tick()
    assert rank.said() == []
    rank.machine.begin(T, DIGEST, 2 * BLOCK)
    assert [type(m) for m in rank.said()] == [Claimed] and rank.machine.held()["early_pulls"] == 0


def test_it_is_answered_in_time_where_the_transfer_never_comes() -> None:
    rank = Rank(ranks=2, early_pull_s=1.0)
    rank.hello(A)
    rank.pull(A, T)
    rank.time.now += 0.6
    assert rank.pull(A, T) == []  # a repetition does not wait anew
    assert rank.machine.next_deadline() == pytest.approx(rank.time.now + 0.4)
    rank.time.now += 0.4
    rank.machine.tick()
    assert [m.reason for m in kinds(rank.said(), Gone)] == ["unknown"]
    assert rank.machine.held()["early_pulls"] == 0


def test_one_rank_alone_answers_at_once() -> None:
    rank = Rank(ranks=1)
    rank.hello(A)
    assert [m.reason for m in rank.pull(A, T)] == ["unknown"]


def test_an_abort_takes_its_early_pull_back() -> None:
    rank = Rank(ranks=2)
    rank.hello(A)
    rank.pull(A, T)
    rank.hear(A, Abort(epoch=A, to=P, transfer=T, claim=claim(1), digest=DIGEST))
    rank.machine.begin(T, DIGEST, 2 * BLOCK)
    assert kinds(rank.said(), Claimed) == []
    assert len(kinds(rank.pull(B, T), Stale)) == 1
    rank.hello(B)
    assert len(kinds(rank.pull(B, T), Claimed)) == 1


def test_early_pulls_are_bounded_and_the_second_claim_is_answered_at_once() -> None:
    time = Time()
    early = EarlyPulls(2, 1.0, time)

    def pull(transfer: str, n: int) -> Pull:
        return Pull(epoch=A, to=P, transfer=transfer, claim=claim(n), digest=DIGEST, tokens=1, deliver=False)

    kept = [early.keep(A, pull(t, n)) for t, n in ((T, 1), (T, 2), (T, 1), (OTHER, 1), (C, 1))]
    assert kept == [True, False, True, True, False] and len(early) == 2
    time.now += 1.0
    assert sorted(e.pull.transfer for e in early.take_late()) == sorted([T, OTHER]) and len(early) == 0
    assert not EarlyPulls(2, 0.0, time).keep(A, pull(T, 1))
