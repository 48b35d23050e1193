"""Parcels over time: chunked prefill, a send buffer smaller than a prompt, preemption, restarts, several peers."""

from __future__ import annotations

import pytest

from hawk_connector.decode.worker import LoadEnd
from hawk_connector.errors import ConfigError
from hawk_connector.transport.memory import MemoryFabric
from tests.oracle import scalar
from tests.transport.waiting import eventually
from tests.tt_plugin.pools import oracle_pool
from tests.workers.gate import Gate
from tests.workers.sides import DecodeSide, PrefillSide, Sides, wait_idle
from tests.workers.source import Geometry, Prompt

pytestmark = pytest.mark.slow

GEOMETRY = Geometry()


def pair(prefill: PrefillSide, decode: DecodeSide) -> None:
    """One small transfer, so that the prefill side knows the destination's layout and packs eagerly."""
    decode.pull(prefill, running := prefill.run(Prompt(prefill.geometry, 1, seed=99)), [0])
    prefill.wait_released(running)
    decode.wipe()


def block_bytes(decode: DecodeSide) -> int:
    """Bytes of one decode block on all chips, counted from the oracle's pages."""
    pool = oracle_pool(decode.pools)
    pages = 2 * pool.layers * pool.tiles_per_block()
    return pages * scalar.PAGE_BYTES[pool.codec] * decode.layout.chips


def order_of_blocks(fabric: MemoryFabric, decode: DecodeSide, after: int) -> list[int]:
    """Decode's blocks in the order in which they were first read, of the batches from ``after`` on."""
    owner: dict[int, int] = {}
    pool = oracle_pool(decode.pools)
    for block in range(decode.pools.num_blocks):
        for stream in scalar.stream_pages(pool, [block]):
            for bank, address in stream:
                base = decode.pools.device.table.bases[bank]
                owner[int(decode.pools.device.origins[0, bank]) + address - base] = block
    order: list[int] = []
    for record in fabric.records[after:]:
        for local in record.segments.local.tolist():
            if owner[local] not in order:
                order.append(owner[local])
    return order


def test_parcels_are_packed_while_the_request_is_still_computed(sides: Sides, fabric: MemoryFabric) -> None:
    prefill = sides.prefill(GEOMETRY, fabric.factory(), parcel_tokens=64)
    decode = sides.decode(GEOMETRY, fabric.factory(), codec="bfp8")
    pair(prefill, decode)
    running = prefill.begin(Prompt(GEOMETRY, 200, seed=2))
    for upto, packed in ((40, 0), (64, 1), (127, 1), (190, 2)):
        prefill.compute(running, upto)
        eventually(lambda: prefill.held("packs") == [0] and prefill.held("parcels_queued") == [0], "packs end")
        assert prefill.held("regions") == [packed]
        # Not finished: vLLM has not been given anything back.
        assert prefill.held("requests_with_blocks") == [1]
        assert prefill.workers[0].take_finished({running.name}) is None
    prefill.compute(running, 200)
    prefill.finish(running)
    report = decode.pull(prefill, running, [5, 6, 7, 8])
    # Parcels of one block each; the blocks are consecutive, but each parcel is read by itself.
    assert report.parcels == 4
    assert report.segments == scalar.expected_segments(oracle_pool(decode.pools), [5, 6, 7, 8], blocks_per_parcel=1)
    assert report.wire_bytes == decode.touched() == 4 * block_bytes(decode)
    prefill.wait_released(running)
    wait_idle(prefill, decode)


def test_blocks_come_back_when_packed_not_when_pulled(sides: Sides, fabric: MemoryFabric) -> None:
    prefill = sides.prefill(GEOMETRY, fabric.factory())
    decode = sides.decode(GEOMETRY, fabric.factory(), codec="bfp8")
    pair(prefill, decode)
    running = prefill.run(Prompt(GEOMETRY, 150, seed=3))
    prefill.wait_released(running)  # and overwrites them
    assert prefill.held("leases") == [1]
    decode.pull(prefill, running, [3, 1, 2])
    wait_idle(prefill, decode)


def test_a_prompt_larger_than_the_send_buffer(sides: Sides, fabric: MemoryFabric) -> None:
    decode = sides.decode(GEOMETRY, fabric.factory(), codec="bfp8", read_threads=1)
    size = 3 * block_bytes(decode)
    prefill = sides.prefill(GEOMETRY, fabric.factory(), parcel_tokens=64, send_buffer_bytes=size)
    pair(prefill, decode)
    before = len(fabric.records)
    block_ids = [12, 3, 9, 1, 6, 10, 2]
    running = prefill.run(Prompt(GEOMETRY, 7 * 64 - 5, seed=4))
    eventually(lambda: prefill.held("packs") == [0], "the buffer fills")
    # Room for one parcel is left to transfers that are being read.
    assert (prefill.held("regions"), prefill.held("parcels_queued")) == ([2], [5])
    report = decode.pull(prefill, running, block_ids)
    assert (report.parcels, report.wire_bytes) == (7, 7 * block_bytes(decode))
    assert order_of_blocks(fabric, decode, before) == block_ids
    prefill.wait_released(running)
    wait_idle(prefill, decode)


def test_requests_wait_for_the_send_buffer_in_order(sides: Sides, fabric: MemoryFabric) -> None:
    decode = sides.decode(GEOMETRY, fabric.factory(), codec="bfp8", read_threads=1)
    size = block_bytes(decode)
    prefill = sides.prefill(GEOMETRY, fabric.factory(), parcel_tokens=64, send_buffer_bytes=size)
    pair(prefill, decode)
    before = len(fabric.records)
    queued = [prefill.run(Prompt(GEOMETRY, 180, seed=5 + i)) for i in range(3)]
    assert prefill.held("requests_with_blocks") == [3]
    blocks = [[4, 1, 13], [2, 8, 5], [11, 3, 6]]
    # Decode asks for the last one first; the buffer is given in the order in which prefill finished.
    loads = [decode.load(prefill.ticket(queued[i]), blocks[i]) for i in (2, 1, 0)]
    for load, i in zip(loads, (2, 1, 0), strict=True):
        assert decode.wait(load) == LoadEnd(load, True, tuple(blocks[i]))
        decode.check(queued[i].prompt, blocks[i])
    assert order_of_blocks(fabric, decode, before) == [b for each in blocks for b in each]
    prefill.wait_released(*queued)
    wait_idle(prefill, decode)
    assert [r.request_id for r in prefill.reports()][1:] == [r.name for r in queued]


def test_a_prompt_of_which_not_one_block_fits_is_refused_with_the_size(sides: Sides, fabric: MemoryFabric) -> None:
    decode = sides.decode(GEOMETRY, fabric.factory())
    prefill = sides.prefill(GEOMETRY, fabric.factory(), send_buffer_bytes=block_bytes(decode) - 1)
    request = decode.load(prefill.ticket(prefill.run(Prompt(GEOMETRY, 64, seed=1))), [1])
    assert not decode.wait(request).ok
    fix = f"set send_buffer_bytes on the prefill side to at least {block_bytes(decode)}"
    assert fix in decode.report(request).reason


@pytest.mark.parametrize("looks", [0, 1, 2, 3])
def test_preemption_discards_the_pack_that_is_out(sides: Sides, fabric: MemoryFabric, looks: int) -> None:
    """The pack has read ``looks`` of four (layer, K or V) when the blocks are taken and overwritten."""
    gate = Gate()
    prefill = sides.prefill(GEOMETRY, fabric.factory(), gate=gate.sources(), parcel_tokens=128)
    decode = sides.decode(GEOMETRY, fabric.factory())
    pair(prefill, decode)
    running = prefill.begin(Prompt(GEOMETRY, 300, seed=6))
    gate.shut(after=looks)
    prefill.compute(running, 130)
    gate.wait_for_a_pack()
    prefill.preempt(running)
    assert prefill.held("packs") == [1]
    gate.open()
    eventually(lambda: prefill.held("packs") == [0], "the stale pack ends")
    # It was discarded, region and all.
    assert prefill.held("regions") == [0]
    prefill.resume(running)
    prefill.compute(running, 200)
    prefill.compute(running, 300)
    prefill.finish(running)
    prefill.wait_released(running)
    decode.pull(prefill, running, [5, 2, 9, 8, 1])
    wait_idle(prefill, decode)


def test_a_preempted_request_holds_no_send_buffer(sides: Sides, fabric: MemoryFabric) -> None:
    prefill = sides.prefill(GEOMETRY, fabric.factory(), parcel_tokens=64)
    decode = sides.decode(GEOMETRY, fabric.factory())
    pair(prefill, decode)
    running = prefill.begin(Prompt(GEOMETRY, 150, seed=7))
    prefill.compute(running, 100)
    eventually(lambda: prefill.held("regions") == [1] and prefill.held("packs") == [0], "the first parcel is packed")
    prefill.preempt(running)
    # It may wait for blocks that finished requests hold while they wait for the buffer.
    assert prefill.held("regions") == [0]
    prefill.resume(running)
    prefill.compute(running, 150)
    prefill.finish(running)
    decode.pull(prefill, running, [5, 2, 9])
    prefill.wait_released(running)
    wait_idle(prefill, decode)


def restarted(sides: Sides, prefill: PrefillSide, fabric: MemoryFabric) -> PrefillSide:
    """Another life of the prefill side at the same ports."""
    ports, found = prefill.ports, []
    prefill.close()

    def listens() -> bool:
        try:
            found.append(sides.prefill(prefill.geometry, fabric.factory(), ports=ports))
        except ConfigError:
            return False
        return True

    eventually(listens, f"ports {ports} are free again")
    return found[0]


@pytest.mark.parametrize("ranks", [1, 2])
def test_prefill_restarted_at_the_same_ports(sides: Sides, fabric: MemoryFabric, ranks: int) -> None:
    geometry = Geometry(ranks=ranks)
    first = sides.prefill(geometry, fabric.factory())
    decode = sides.decode(geometry, fabric.factory(), hello_deadline_s=2.0)
    decode.pull(first, first.run(Prompt(geometry, 100, seed=8)), [1, 2])
    lost = first.ticket(first.run(Prompt(geometry, 100, seed=9)))
    second = restarted(sides, first, fabric)
    assert [r.address for r in second.ranks] == [r.address for r in first.ranks]
    # What the old life offered is gone; the new one serves with no restart here.
    request = decode.load(lost, [3, 4])
    assert not decode.wait(request).ok
    assert "another life" in decode.report(request).reason
    decode.pull(second, second.run(Prompt(geometry, 100, seed=10)), [5, 6])
    wait_idle(second, decode)


def test_prefill_dies_under_a_load(sides: Sides, fabric: MemoryFabric) -> None:
    gate = Gate()
    first = sides.prefill(GEOMETRY, fabric.factory(), gate=gate.sources(), parcel_tokens=64)
    decode = sides.decode(GEOMETRY, fabric.factory(), hello_deadline_s=2.0)
    pair(first, decode)
    running = first.begin(Prompt(GEOMETRY, 200, seed=11))
    first.compute(running, 100)
    request = decode.load(first.ticket(running), [1, 2, 3, 4])
    eventually(lambda: decode.touched() == block_bytes(decode), "the first parcel lands")
    second = restarted(sides, first, fabric)
    end = decode.wait(request)
    assert end == LoadEnd(request, False, (1, 2, 3, 4))
    decode.pull(second, second.run(Prompt(GEOMETRY, 200, seed=12)), [4, 3, 2, 1])
    wait_idle(second, decode)


def test_decode_restarted(sides: Sides, fabric: MemoryFabric) -> None:
    gate = Gate()
    prefill = sides.prefill(
        GEOMETRY, fabric.factory(), gate=gate.sources(), parcel_tokens=64, lease_s=3.0, buffer_wait_s=3.0
    )
    first = sides.decode(GEOMETRY, fabric.factory())
    pair(prefill, first)
    gate.shut()
    claimed = prefill.run(Prompt(GEOMETRY, 200, seed=13))
    first.load(prefill.ticket(claimed), [1, 2, 3, 4])
    gate.wait_for_a_pack()
    first.close()
    gate.open()
    # Other banks: what is packed for the dead side's layout is not what the new one is given.
    peers = [prefill.ranks[0].address]
    second = sides.decode(GEOMETRY, fabric.factory(), device="blackhole-p100", codec="bfp8", peers=peers)
    # It is known before anything more is packed: what is packed for the dead side alone would be gone for it.
    eventually(lambda: len(prefill.statuses()[0].pairings) == 2, "the new side is paired")
    second.pull(prefill, prefill.run(Prompt(GEOMETRY, 200, seed=14)), [4, 3, 2, 1])
    # The old claim runs out by its lease.
    eventually(lambda: "expired" in [r.outcome for r in prefill.reports()], "the dead side's lease runs out")
    prefill.wait_released(claimed)
    wait_idle(prefill, second)


def test_two_decode_sides_with_different_layouts(sides: Sides, fabric: MemoryFabric) -> None:
    prefill = sides.prefill(GEOMETRY, fabric.factory())
    peers = [prefill.ranks[0].address]
    first = sides.decode(GEOMETRY, fabric.factory(), device="blackhole-p150", codec="bfp8", peers=peers)
    second = sides.decode(GEOMETRY, fabric.factory(), device="wormhole-n150", codec="float32", chips=2, peers=peers)
    # Both are known before anything is packed: what is packed for one would be gone for the other.
    eventually(lambda: len(prefill.statuses()[0].pairings) == 2, "both are paired")
    for seed, decode in enumerate((first, second, first, second)):
        running = prefill.run(Prompt(GEOMETRY, 129, seed=seed))
        decode.wipe()
        decode.pull(prefill, running, [4 + seed, 2, 1])
        prefill.wait_released(running)
    wait_idle(prefill, first, second)


def test_two_prefill_sides_feed_one_decode_side(sides: Sides, fabric: MemoryFabric) -> None:
    one, two = (sides.prefill(GEOMETRY, fabric.factory()) for _ in range(2))
    decode = sides.decode(GEOMETRY, fabric.factory())
    runs = [(side, side.run(Prompt(GEOMETRY, 100, seed=i))) for i, side in enumerate((one, two, one, two))]
    blocks = [[1, 2], [3, 4], [5, 6], [7, 8]]
    loads = [decode.load(side.ticket(r), b) for (side, r), b in zip(runs, blocks, strict=True)]
    for load, (_, running), ids in zip(loads, runs, blocks, strict=True):
        assert decode.wait(load).ok
        decode.check(running.prompt, ids)
    wait_idle(one, two, decode)


def test_unclaimed_transfers_and_their_blocks_are_given_up_in_time(sides: Sides, fabric: MemoryFabric) -> None:
    """No decode side has ever come, so nothing can be packed: blocks are held to the deadline and not longer."""
    prefill = sides.prefill(GEOMETRY, fabric.factory(), buffer_wait_s=1.0, lease_s=30.0)
    running = prefill.run(Prompt(GEOMETRY, 100, seed=1))
    assert prefill.held("requests_with_blocks") == [1]
    prefill.wait_released(running)
    assert [r.outcome for r in prefill.reports()] == ["expired"]
    wait_idle(prefill)


def test_past_max_transfers_a_request_is_simply_not_offered(sides: Sides, fabric: MemoryFabric) -> None:
    prefill = sides.prefill(GEOMETRY, fabric.factory(), max_transfers=1)
    decode = sides.decode(GEOMETRY, fabric.factory())
    pair(prefill, decode)
    kept, refused = (prefill.run(Prompt(GEOMETRY, 100, seed=i)) for i in (1, 2))
    prefill.wait_released(kept, refused)
    request = decode.load(prefill.ticket(refused), [1, 2])
    assert not decode.wait(request).ok
    assert decode.report(request).reason.endswith("gave the transfer up: unknown")
    decode.pull(prefill, kept, [3, 4])
    wait_idle(prefill, decode)
