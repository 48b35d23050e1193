"""What is seen of real workers while they work: live transfers, readiness, stalls, log lines, series."""

from __future__ import annotations

import logging
import re

import pytest

from hawk_connector.decode.metadata import DecodeStep, RefusedLoad
from hawk_connector.protocol.ticket import RankAddress, Ticket
from hawk_connector.transport.memory import Fail, Hang, MemoryFabric
from hawk_connector.transport.side_channel import SideChannelClient
from tests.transport.waiting import eventually
from tests.workers.sides import DecodeSide, PrefillSide, Sides, wait_idle
from tests.workers.source import Geometry, Prompt

pytestmark = pytest.mark.slow

GEOMETRY = Geometry()
BLOCKS = [9, 2, 13, 4]
TOKENS = 200


def pair(prefill: PrefillSide, decode: DecodeSide) -> None:
    decode.pull(prefill, running := prefill.run(Prompt(GEOMETRY, 1, seed=99)), [0])
    prefill.wait_released(running)
    prefill.workers[0].log.take()
    decode.worker.log.take()


def both(sides: Sides, fabric: MemoryFabric, **config: float) -> tuple[PrefillSide, DecodeSide]:
    prefill = sides.prefill(GEOMETRY, fabric.factory(), parcel_tokens=64, **config)
    decode = sides.decode(GEOMETRY, fabric.factory(timeout_s=60.0), read_threads=1, **config)
    pair(prefill, decode)
    return prefill, decode


def test_a_live_transfer_is_shown_by_both_sides(sides: Sides, fabric: MemoryFabric) -> None:
    prefill, decode = both(sides, fabric)
    running = prefill.begin(Prompt(GEOMETRY, TOKENS, seed=1))
    prefill.compute(running, 100)
    (seen,) = prefill.statuses()[0].transfers
    assert (seen.transfer, seen.request, seen.phase) == (running.transfer, running.name, "computing")
    assert seen.detail.startswith("100 of 200 tokens computed")
    assert (seen.parcels, seen.parcels_done, seen.deadline_in_s) == (4, 0, None)
    prefill.compute(running, TOKENS)
    prefill.finish(running)
    eventually(lambda: prefill.statuses()[0].transfers[0].phase == "offered", "all is packed")
    (seen,) = prefill.statuses()[0].transfers
    assert (seen.waits_for, seen.deadline) == ("a decode side's Pull", "lease_s")
    assert 0 < (seen.deadline_in_s or 0) <= 60
    size = seen.nbytes
    assert size > 0 and seen.nbytes_done == 0

    fabric.inject(Hang())
    request = decode.load(prefill.ticket(running), BLOCKS)
    eventually(lambda: bool(decode.status().held["reads"]), "a read hangs")
    (load,) = decode.status().transfers
    assert (load.transfer, load.request, load.phase) == (running.transfer, request, "reading")
    assert load.peer == prefill.ranks[0].address
    assert (load.parcels, load.parcels_done, load.nbytes, load.nbytes_done) == (4, 0, size, 0)
    assert load.deadline == "load_deadline_s"
    (seen,) = prefill.statuses()[0].transfers
    assert (seen.phase, seen.waits_for, seen.peer) == (
        "delivering",
        "Done from the claimant",
        decode.worker.handshake.epoch,
    )
    fabric.release_hung()
    assert decode.wait(request).ok
    prefill.wait_released(running)
    wait_idle(prefill, decode)
    assert prefill.statuses()[0].transfers == decode.status().transfers == ()


def test_a_transfer_that_does_not_move_is_dumped_by_both_sides(
    sides: Sides, fabric: MemoryFabric, caplog: pytest.LogCaptureFixture
) -> None:
    prefill, decode = both(sides, fabric, stall_report_s=0.4)
    fabric.inject(Hang())
    running = prefill.run(Prompt(GEOMETRY, TOKENS, seed=1))

    def stalls(logger: str) -> list[str]:
        lines = [r.getMessage() for r in caplog.records if r.name == logger and "event=stall" in r.getMessage()]
        return [line for line in lines if running.transfer in line]

    with caplog.at_level(logging.WARNING):
        request = decode.load(prefill.ticket(running), BLOCKS)
        eventually(lambda: len(stalls("hawk_connector.decode.worker")) >= 2, "decode says it twice")
        eventually(lambda: "waits for Done" in str(stalls("hawk_connector.prefill.worker")), "prefill says it")
    (first, second, *_) = stalls("hawk_connector.decode.worker")
    assert re.search(r"not moved for 0\.\d s: reading, begun .* s ago, waits for reads that run, 0 of 4 parcels", first)
    assert "load_deadline_s ends it in" in first
    assert f"transfer={running.transfer} request={request} peer={prefill.ranks[0].address}" in first
    still = [float(re.findall(r"not moved for ([\d.]+) s", line)[0]) for line in (first, second)]
    assert still[1] >= 2 * still[0] - 0.1  # as printed, to a tenth
    fabric.release_hung()
    assert decode.wait(request).ok
    for log in (prefill.workers[0].log, decode.worker.log):
        payload = log.take()
        assert payload is not None
        assert payload["counters"]["stalls"] >= 1
    wait_idle(prefill, decode)


def test_one_id_finds_a_failure_in_both_logs(
    sides: Sides, fabric: MemoryFabric, caplog: pytest.LogCaptureFixture
) -> None:
    prefill, decode = both(sides, fabric)
    fabric.inject(Fail())
    running = prefill.run(Prompt(GEOMETRY, TOKENS, seed=1))
    with caplog.at_level(logging.DEBUG, logger="hawk_connector"):
        request = decode.load(prefill.ticket(running), BLOCKS)
        assert not decode.wait(request).ok
        prefill.wait_released(running)
        wait_idle(prefill, decode)
    lines = [(r.name, r.getMessage()) for r in caplog.records if running.transfer in r.getMessage()]
    assert {name for name, _ in lines} == {"hawk_connector.prefill.worker", "hawk_connector.decode.worker"}
    (failed,) = [text for name, text in lines if "load failed" in text]
    assert f"[event=read transfer={running.transfer} request={request}" in failed


def test_what_a_transfer_adds_to_the_series_of_both_sides(sides: Sides, fabric: MemoryFabric) -> None:
    prefill, decode = both(sides, fabric)
    running = prefill.run(Prompt(GEOMETRY, TOKENS, seed=1))
    report = decode.pull(prefill, running, BLOCKS)
    prefill.wait_released(running)
    wait_idle(prefill, decode)
    taken = decode.worker.log.take()
    assert taken is not None
    counters, samples = taken["counters"], taken["samples"]
    assert counters["transfers"] == {"completed": 1}
    assert (counters["external_tokens"], counters["tokens"], counters["parcels"]) == (TOKENS, TOKENS, 4)
    assert samples["segment_bytes"] == [report.wire_bytes / report.segments]
    assert {name: len(values) for name, values in samples.items()} == dict.fromkeys(
        ("pull_s", "land_s", "wait_s", "handover_s", "segment_bytes"), 1
    )
    # The hand-over has all of the load in it and some of the wait before.
    assert samples["handover_s"][0] >= samples["pull_s"][0] >= samples["land_s"][0] >= 0
    taken = prefill.workers[0].log.take()
    assert taken is not None
    assert taken["counters"]["transfers"] == {"completed": 1}
    assert taken["counters"]["wire_bytes"] == report.wire_bytes
    assert len(taken["samples"]["pack_s"]) == 1
    gauges = prefill.workers[0].log.gauges()
    assert gauges["send_buffer_bytes"] == prefill.config.send_buffer_bytes  # type: ignore[union-attr]
    assert (gauges["ready"], gauges["leases"], gauges["send_buffer_used_bytes"]) == (1, 0, 0)
    peers = gauges["peers"]
    assert isinstance(peers, dict) and peers["paired"] == 1


def test_a_load_from_the_middle_counts_only_what_it_loaded(sides: Sides, fabric: MemoryFabric) -> None:
    prefill, decode = both(sides, fabric)
    running = prefill.run(Prompt(GEOMETRY, TOKENS, seed=1))
    request = decode.load(prefill.ticket(running), BLOCKS[2:], first_block=2)
    assert decode.wait(request).ok
    assert decode.report(request).external_tokens == TOKENS - 2 * decode.layout.block_size
    prefill.wait_released(running)


def test_failures_are_counted_by_reason_and_what_follows_from_the_policy(sides: Sides, fabric: MemoryFabric) -> None:
    prefill, decode = both(sides, fabric)
    decode.worker._recompute = True
    fabric.inject(Fail())
    running = prefill.run(Prompt(GEOMETRY, TOKENS, seed=1))
    request = decode.load(prefill.ticket(running), BLOCKS)
    assert not decode.wait(request).ok
    decode.worker.step(DecodeStep(refused=[RefusedLoad("r", (4, 5), "no_answer", "nobody there")]))
    assert not decode.wait("r").ok
    wait_idle(prefill, decode)
    taken = decode.worker.log.take()
    assert taken is not None
    assert taken["counters"]["failures"] == {"read": 1, "no_answer": 1}
    assert taken["counters"]["recomputes"] == {"read": 1, "no_answer": 1}
    assert taken["counters"]["fences"] == 1
    (ended,) = [r for r in prefill.reports() if r.transfer_id == running.transfer]
    assert (ended.outcome, ended.failure) == ("aborted", "aborted")


def test_readiness_turns_red_with_a_configured_peer_and_green_again(
    sides: Sides, fabric: MemoryFabric, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="hawk_connector")
    prefill = sides.prefill(GEOMETRY, fabric.factory())
    (rank,) = prefill.ranks
    decode = sides.decode(GEOMETRY, fabric.factory(), peers=[rank.address], hello_deadline_s=0.6, resend_s=0.1)
    eventually(lambda: decode.status().unready == (), "they pair")
    assert prefill.statuses()[0].unready == ()
    ports = prefill.ports
    prefill.close()
    decode.load(Ticket("1" * 32, "2" * 32, "3" * 64, TOKENS, (RankAddress(rank.address, rank.epoch),)), BLOCKS)
    eventually(lambda: decode.status().unready != (), "its absence is noticed")
    (why,) = decode.status().unready
    assert why.startswith(f"{rank.address} is down: no answer within 0.6 s")
    eventually(lambda: decode.worker.log.gauges()["ready"] == 0, "the gauge says so")
    sides.prefill(GEOMETRY, fabric.factory(), ports=ports)
    eventually(lambda: decode.status().unready == (), "another life of it serves")
    taken = decode.worker.log.take()
    assert taken is not None
    assert taken["counters"]["peer_epochs"] == 2
    said = [r.getMessage() for r in caplog.records if f"event=peer peer={rank.address}" in r.getMessage()]
    links = [line.split()[0].rstrip(":") for line in said if not line.startswith("circuit")]
    assert links == ["paired", "down", "paired"]


def test_what_peers_send_wrong_is_counted(sides: Sides, fabric: MemoryFabric) -> None:
    prefill = sides.prefill(GEOMETRY, fabric.factory())
    client = SideChannelClient()
    peer = client.connect(prefill.workers[0]._server.address)
    try:
        for payload in (b"", b"\x00garbage", b"\xdf\xff\xff\xff\xff", bytes(40_000)):
            client.send(peer, payload)
        eventually(lambda: prefill.statuses()[0].dropped.get("malformed") == 3, "three are malformed")
        assert prefill.statuses()[0].dropped["oversize"] == 1
    finally:
        client.close()
    eventually(lambda: prefill.workers[0].log.gauges().get("connections") is not None, "a turn passes")
    taken = prefill.workers[0].log.take()
    assert taken is not None
    dropped = taken["counters"]["messages_dropped"]
    assert (dropped["malformed"], dropped["oversize"]) == (3, 1)
