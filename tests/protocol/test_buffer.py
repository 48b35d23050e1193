"""The send buffer and vLLM's blocks: waiting in order, parcels, skipping, repacking, preemption and aborts."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hawk_connector.errors import LocalError
from hawk_connector.plan.pairing import DecodeFacts
from hawk_connector.protocol.messages import PROTOCOL_VERSION, Abort, Claimed, Gone, Hello, Pull, Ready
from hawk_connector.protocol.regions import REGION_ALIGNMENT, RegionAllocator
from tests.protocol.table import DIGEST, OTHER, D, P, T, Table, claim
from tests.protocol.world import BLOCK, LIMITS, decode_facts

BLOCK_BYTES = 2 * 2 * 1088  # pools x heads x bytes of a bfp8 tile
THIRD = "3" * 32
D2 = "e" * 32


def pull(n: int = 1, *, epoch: str = D, first_block: int = 0, tokens: int = 4 * BLOCK, transfer: str = T) -> Pull:
    return Pull(
        epoch=epoch,
        to=P,
        transfer=transfer,
        claim=claim(n),
        digest=DIGEST,
        tokens=tokens,
        deliver=True,
        first_block=first_block,
    )


def hello(table: Table, facts: DecodeFacts, epoch: str = D2) -> None:
    """Another decode side appears."""
    table.prefill.receive("other", Hello(epoch=epoch, version=PROTOCOL_VERSION, facts=facts, number=1))
    table.prefill.take_actions()


# --- the buffer is full


def test_requests_wait_in_order_with_their_blocks_held() -> None:
    table = Table(buffer_bytes=2 * BLOCK_BYTES).pair()
    for transfer in (T, OTHER, THIRD):
        table.compute(transfer, 2 * BLOCK)
    table.pack()
    assert table.released == [T]
    assert table.prefill.held()["parcels_queued"] == 2 and table.prefill.held()["requests_with_blocks"] == 2
    for n, transfer in enumerate((T, OTHER, THIRD), start=1):
        table.load(n, transfer=transfer, tokens=2 * BLOCK)
        table.read()
        table.pack()
    assert table.released == [T, OTHER, THIRD] and [r.ok for r in table.reports] == [True] * 3
    assert table.held() == {}


def test_a_small_parcel_does_not_overtake_a_large_one() -> None:
    table = Table(buffer_bytes=5 * BLOCK_BYTES).pair()
    table.compute(T, 2 * BLOCK)
    table.compute(OTHER, 2 * BLOCK)  # beside T it would leave no room for a parcel
    table.compute(THIRD, BLOCK)  # would leave it
    table.pack()
    assert table.released == [T]
    table.load(1, tokens=2 * BLOCK)
    table.read()
    assert [job.transfer for job in table.packs] == [OTHER, THIRD]


def test_a_transfer_that_is_being_read_is_packed_before_others_and_finds_room() -> None:
    """Decode has given T its blocks and none are left for OTHER and THIRD: T must not wait for them."""
    table = Table(buffer_bytes=6 * BLOCK_BYTES).pair()
    for transfer, tokens in ((T, 6 * BLOCK), (OTHER, 2 * BLOCK), (THIRD, 2 * BLOCK)):
        table.compute(transfer, tokens)
    table.pack()
    # Two of T's three parcels fit with room for one more; everything else waits.
    assert table.prefill.held()["regions"] == 2 and table.prefill.held()["parcels_queued"] == 3
    table.load(1, tokens=6 * BLOCK)
    # Being read, T may take the room that is left, before OTHER and THIRD and before anything was given back.
    assert [(job.transfer, job.first_block) for job in table.packs] == [(T, 4)]
    table.pack()
    while table.reads:
        table.read()
    assert [r.ok for r in table.reports] == [True]
    assert [job.transfer for job in table.packs] == [OTHER, THIRD]


def test_small_parcels_leave_room_for_a_full_one() -> None:
    """Short prompts that nobody reads must not fill the gaps that a long one, being read, needs."""
    table = Table(buffer_bytes=4 * BLOCK_BYTES).pair()
    for digit in "678":
        table.compute(digit * 32, BLOCK)
    assert table.prefill.held()["regions"] == 2 and table.prefill.held()["parcels_queued"] == 1
    table.pack()
    table.compute(T, 2 * BLOCK)
    table.load(1, tokens=2 * BLOCK)
    assert [job.transfer for job in table.packs] == [T]
    table.pack()
    table.read()
    assert [r.ok for r in table.reports] == [True]


def test_who_waits_too_long_is_given_up_and_gives_its_blocks_back() -> None:
    limits = replace(LIMITS, lease_s=20.0, buffer_wait_s=4.0)
    table = Table(buffer_bytes=2 * BLOCK_BYTES, limits=limits).pair()
    table.compute(T, 2 * BLOCK)
    table.compute(OTHER, 2 * BLOCK)
    table.pack()
    table.load(2, transfer=OTHER, tokens=2 * BLOCK)
    table.wait(3.9)
    assert table.released == [T] and table.reports == []
    table.wait(0.3)
    assert table.released == [T, OTHER]
    assert [(r.request, r.ok, "expired" in r.reason) for r in table.reports] == [("r2", False, True)]


@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_a_prompt_longer_than_the_buffer_is_served_by_parcels(blocks: int) -> None:
    limits = replace(LIMITS, parcel_tokens=64 * BLOCK)
    table = Table(buffer_bytes=blocks * BLOCK_BYTES, limits=limits).pair()
    table.compute(tokens=7 * BLOCK)
    table.load(tokens=7 * BLOCK)
    seen: list[tuple[int, int]] = []
    while not table.reports:
        table.pack()
        assert len(table.reads) == 1
        seen.append((table.reads[0].block_ids[0] - 100, table.reads[0].plan.blocks))
        table.read()
    assert seen == [(first, min(blocks, 7 - first)) for first in range(0, 7, blocks)]
    assert [r.ok for r in table.reports] == [True] and table.released == [T] and table.held() == {}


# --- blocks that decode has


@pytest.mark.parametrize("first_block", range(5))
def test_parcels_below_first_block_are_skipped_and_a_cut_one_is_read_from_there(first_block: int) -> None:
    table = Table().pair()
    table.compute(tokens=5 * BLOCK)  # parcels of 2, 2 and 1 blocks
    table.pack()
    table.load(tokens=5 * BLOCK, first_block=first_block)
    landed: list[int] = []
    while table.reads:
        read = table.reads[0]
        landed += read.block_ids[read.skip_blocks :]
        assert read.plan.blocks == len(read.block_ids)
        table.read()
    assert landed == [100 + i for i in range(5 - first_block)]
    assert [(r.ok, r.parcels) for r in table.reports] == [(True, 3 - first_block // 2)]
    assert table.held() == {}


def test_skipping_gives_back_what_is_packed_queued_or_being_packed() -> None:
    table = Table(buffer_bytes=6 * BLOCK_BYTES).pair()
    table.compute(tokens=6 * BLOCK)
    first, second = table.packs
    table.packs.clear()
    table.prefill.packed(first.job, True)  # OFFERED, PACKING, QUEUED
    table.prefill.receive("d", pull(first_block=6, tokens=6 * BLOCK))
    table.exchange()
    assert table.prefill.held()["regions"] == 1 and table.released == []
    table.prefill.packed(second.job, False)  # nobody wants it: its failure fails nothing
    table.exchange()
    assert table.released == [T] and [e.reason for e in table.ended] == [None] and table.held() == {}


# --- two layouts


def test_a_pull_in_another_layout_repacks_while_blocks_are_held() -> None:
    table = Table().pair()
    table.compute(finish=False)
    table.pack()
    hello(table, decode_facts(codec="bfp4"))
    table.prefill.receive("other", pull(epoch=D2))
    sent = [a for a in table.prefill.take_actions()]
    packs = [a for a in sent if hasattr(a, "plan")]
    assert [p.plan.layout.codec for p in packs] == ["bfp4", "bfp4"]
    assert [type(a.message) for a in sent if hasattr(a, "message")] == [Claimed]
    assert table.prefill.held()["regions"] == 2  # the old ones are free
    for job in packs:
        assert table.prefill.packed(job.job, True)
    ready = [a.message for a in table.prefill.take_actions() if hasattr(a, "message")]
    assert [type(m) for m in ready] == [Ready, Ready] and [m.nbytes for m in ready] == [2 * 2 * 2 * 576] * 2


def test_a_pack_of_the_old_layout_that_ends_late_is_discarded() -> None:
    table = Table().pair()
    table.compute()
    old = list(table.packs)
    table.packs.clear()
    hello(table, decode_facts(codec="bfp4"))
    table.prefill.receive("other", pull(epoch=D2))
    table.exchange()
    assert [table.prefill.packed(job.job, True) for job in old] == [False, False]
    assert [table.prefill.packed(job.job, True) for job in table.packs] == [True, True]
    table.exchange()
    assert table.released == [T]


def test_a_pull_in_another_layout_is_gone_once_blocks_are_released() -> None:
    table = Table().pair()
    table.compute()
    table.pack()
    hello(table, decode_facts(codec="bfp4"))
    table.prefill.receive("other", pull(2, epoch=D2))
    (answer,) = table.prefill.take_actions()
    assert isinstance(answer.message, Gone) and answer.message.reason == "layout"  # type: ignore[union-attr]
    table.load(1)
    table.read(), table.read()
    assert [r.ok for r in table.reports] == [True]


def test_with_two_layouts_nothing_is_packed_before_it_is_asked_for() -> None:
    table = Table().pair()
    hello(table, decode_facts(codec="bfp4"))
    table.compute()
    assert table.packs == [] and table.released == []
    table.load(1)
    assert [job.plan.layout.codec for job in table.packs] == ["bfp8", "bfp8"]


# --- preemption


def test_preemption_in_every_parcel_state() -> None:
    """Four parcels are OFFERED, PACKING, QUEUED and WAITING when vLLM takes the blocks away."""
    table = Table(buffer_bytes=6 * BLOCK_BYTES).pair()
    table.prefill.begin(T, DIGEST, 8 * BLOCK)
    table.prefill.computed(T, 6 * BLOCK)
    table.exchange()
    first, second = table.packs
    table.packs.clear()
    table.prefill.packed(first.job, True)
    assert [p.state.name for p in table.prefill._transfers[T].parcels] == ["OFFERED", "PACKING", "QUEUED", "WAITING"]
    table.prefill.preempted(T)
    table.exchange()
    held = table.prefill.held()
    assert held["regions"] == 1 and held["parcels_queued"] == 0 and table.packs == []
    # It is computed again, in other blocks, while the stale pack is still out.
    table.prefill.computed(T, 8 * BLOCK)
    table.prefill.finished(T)
    table.exchange()
    assert table.prefill.packed(second.job, True) is False
    table.load(tokens=8 * BLOCK)
    packed = []
    while not table.reports:
        packed += [job.first_block for job in table.packs]
        table.pack()
        table.read()
    assert sorted(set(packed)) == [0, 2, 4, 6] and [r.ok for r in table.reports] == [True]
    assert table.released == [T] and table.held() == {}


def test_a_preempted_request_does_not_hold_the_buffer_for_which_a_finished_one_waits() -> None:
    """Otherwise the two wait for each other: one for vLLM's blocks, the other for the send buffer."""
    table = Table(buffer_bytes=2 * BLOCK_BYTES).pair()
    table.prefill.begin(T, DIGEST, 4 * BLOCK)
    table.prefill.computed(T, 2 * BLOCK)
    table.exchange()
    table.pack()
    table.compute(OTHER, 2 * BLOCK)
    assert table.packs == []
    table.prefill.preempted(T)
    table.exchange()
    table.pack()
    assert table.released == [OTHER]


# --- aborts in every phase


def test_abort_before_admission() -> None:
    """Asked, not answered: the transfer is told when its prefill side can be reached."""
    table = Table().pair()
    table.compute()
    table.pack()
    table.lose = lambda message: isinstance(message, Pull)
    table.ask(1)
    table.admission.drop("r1")
    table.exchange()
    assert [e.reason for e in table.ended] == ["aborted"] and table.held() == {}


@pytest.mark.parametrize("phase", ["waiting", "queued", "packing", "offered"])
def test_abort_by_the_claimant_while_the_parcel_is(phase: str) -> None:
    table = Table(buffer_bytes=2 * BLOCK_BYTES).pair()
    if phase == "queued":
        table.compute(OTHER, 2 * BLOCK)
        table.pack()
    table.prefill.begin(T, DIGEST, 2 * BLOCK)
    if phase != "waiting":
        table.prefill.computed(T, 2 * BLOCK)
    table.exchange()
    if phase == "offered":
        table.pack()
    table.load(1, tokens=2 * BLOCK)
    if phase == "offered":
        table.reads.clear()
        table.worker.read_ended(0, True)
        table.worker.take_actions()  # Done is lost
    table.worker.abort("r1")
    table.exchange()
    assert [(r.ok, r.aborted) for r in table.reports] == [(False, True)]
    assert len(table.said(Abort)) == 1 and T not in table.released  # vLLM has not finished the request yet
    table.prefill.finished(T)
    table.exchange()
    assert (T in table.released) == (phase != "packing")
    table.pack()
    assert T in table.released and [e.reason for e in table.ended if e.transfer == T] == ["aborted"]


def test_abort_while_reading_keeps_the_region_until_the_read_has_ended() -> None:
    table = Table(buffer_bytes=2 * BLOCK_BYTES).pair()
    table.compute(T, 2 * BLOCK)
    table.pack()
    table.load(1, tokens=2 * BLOCK)
    table.compute(OTHER, 2 * BLOCK)
    table.worker.abort("r1")
    table.exchange()
    assert table.packs == [] and table.reports == []
    table.read()
    assert [job.transfer for job in table.packs] == [OTHER] and len(table.reports) == 1


def test_abort_between_done_and_accepted_reports_once() -> None:
    table = Table().pair()
    table.compute(T, 2 * BLOCK)
    table.pack()
    table.load(1, tokens=2 * BLOCK)
    table.worker.read_ended(table.reads.pop().id, True)
    done = table.worker.take_actions()
    table.worker.abort("r1")
    table.exchange()
    for action in done:
        table.prefill.receive("worker", action.message)  # type: ignore[union-attr, arg-type]
    table.exchange()
    table.worker.abort("r1")
    table.exchange()
    assert [(r.ok, r.aborted) for r in table.reports] == [(False, True)] and table.held() == {}


@pytest.mark.parametrize("phase", ["waiting", "queued", "packing", "offered"])
def test_vllm_aborts_the_prefill_request_while_the_parcel_is(phase: str) -> None:
    table = Table(buffer_bytes=2 * BLOCK_BYTES).pair()
    if phase == "queued":
        table.compute(OTHER, 2 * BLOCK)
        table.pack()
    table.prefill.begin(T, DIGEST, 2 * BLOCK)
    if phase != "waiting":
        table.prefill.computed(T, 2 * BLOCK)
    table.exchange()
    if phase == "offered":
        table.pack()
    assert table.prefill.abandoned(T)
    table.exchange()
    assert (T in table.released) == (phase != "packing")
    table.pack()
    assert T in table.released and T not in table.prefill._transfers
    assert table.ask(1, tokens=2 * BLOCK).reason == "aborted"


# --- the allocator


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5000)), max_size=60), st.integers(0, 20_000))
def test_regions_never_overlap_and_all_comes_back(moves: list[tuple[bool, int]], capacity: int) -> None:
    """Against the plainest bookkeeping there is: one flag for each granule."""
    allocator = RegionAllocator(capacity)
    granules = [False] * (capacity // REGION_ALIGNMENT)
    held: list[tuple[int, int]] = []
    for allocate, n in moves:
        if allocate:
            need = max(1, -(-n // REGION_ALIGNMENT))
            fits = [i for i in range(len(granules) - need + 1) if not any(granules[i : i + need])]
            offset = allocator.allocate(n)
            assert offset == (fits[0] * REGION_ALIGNMENT if fits else None)
            if offset is not None:
                held.append((offset, need))
                first = offset // REGION_ALIGNMENT
                granules[first : first + need] = [True] * need
        elif held:
            offset, need = held.pop(n % len(held))
            allocator.release(offset)
            first = offset // REGION_ALIGNMENT
            granules[first : first + need] = [False] * need
        assert (allocator.held_regions, allocator.held_bytes) == (len(held), sum(granules) * REGION_ALIGNMENT)
    for offset, _ in held:
        allocator.release(offset)
    if granules:
        assert allocator.allocate(len(granules) * REGION_ALIGNMENT) == 0


def test_releasing_what_is_not_held_is_a_local_error() -> None:
    with pytest.raises(LocalError, match="no region is held at offset 256"):
        RegionAllocator(1024).release(256)
