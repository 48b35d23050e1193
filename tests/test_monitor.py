"""SideMonitor by itself: what it counts, what it says, how often it may be asked."""

from __future__ import annotations

import logging

import pytest

from hawk_connector.metrics import TransferLog, TransferReport
from hawk_connector.monitor import SideMonitor
from hawk_connector.protocol.messages import PairingStatus, Status, decode_message
from hawk_connector.protocol.snapshot import TransferSnapshot

LOGGER = logging.getLogger("tests.monitor")
EPOCH = "e" * 32


def view(name: str, phase: str) -> TransferSnapshot:
    return TransferSnapshot(transfer=f"t-{name}", request=f"r-{name}", peer="p:1", phase=phase, age_s=1.0)


class Bench:
    def __init__(self) -> None:
        self.now = 100.0
        self.log = TransferLog("decode/0", history=4)
        self.monitor: SideMonitor[str] = SideMonitor(
            "decode", EPOCH, self.log, view, stall_s=4.0, clock=lambda: self.now, logger=LOGGER
        )

    def counters(self) -> dict[str, object]:
        taken = self.log.take()
        return {} if taken is None else taken["counters"]


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_a_stall_is_written_with_its_ids_and_counted_once(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        for second in range(100, 113):
            bench.now = float(second)
            bench.monitor.say(bench.monitor.watch({"a": "reading", "b": "reading" if second % 3 else "offered"}))
    lines = [record.getMessage() for record in caplog.records]
    assert lines == [
        f"has not moved for {still}.0 s: reading, begun 1.0 s ago [event=stall transfer=t-a request=r-a peer=p:1]"
        for still in (4, 8)
    ]
    assert bench.counters() == {"stalls": 1}


def test_drops_are_counted_from_running_totals(bench: Bench) -> None:
    bench.monitor.count_drops({"rate": 3, "oversize": 0})
    bench.monitor.count_drops({"rate": 3, "oversize": 0})
    assert bench.counters() == {"messages_dropped": {"rate": 3}}
    bench.monitor.count_drops({"rate": 5, "oversize": 1})
    assert bench.counters() == {"messages_dropped": {"rate": 2, "oversize": 1}}


def test_each_life_of_a_peer_is_counted_once(bench: Bench) -> None:
    for epochs in (["a"], ["a", "b"], ["b"], [], ["a", "c"]):
        bench.monitor.count_epochs(epochs)
    assert bench.counters() == {"peer_epochs": 3}


def test_an_asker_without_end_is_held_back_and_nobody_else(bench: Bench) -> None:
    assert [bench.monitor.may_ask("loud") for _ in range(100)] == [True] * 40 + [False] * 60
    assert bench.monitor.may_ask("quiet")
    bench.now += 1.0
    assert [bench.monitor.may_ask("loud") for _ in range(30)] == [True] * 20 + [False] * 10


def test_the_status_has_what_was_handed_in_and_what_the_watchdog_knows(bench: Bench) -> None:
    bench.monitor.watch({"a": "reading"})
    bench.now += 3.0
    bench.log.record(TransferReport(transfer_id="t-0", request_id="r-0", outcome="completed"))
    pairings = [PairingStatus("p:1", "paired", "", "half_open")]
    data = bench.monitor.status({"loads": 2}, pairings, {"a": "reading", "b": "offered"}, ["p:2 is down"], {"rate": 7})
    status = decode_message(data, (Status,))
    assert isinstance(status, Status)
    assert (status.epoch, status.role, status.uptime_s) == (EPOCH, "decode", 3.0)
    assert [(t.transfer, t.phase, t.still_s) for t in status.transfers] == [
        ("t-a", "reading", 3.0),
        ("t-b", "offered", 0),
    ]
    assert (status.held, status.unready, status.dropped) == ({"loads": 2}, ("p:2 is down",), {"rate": 7})
    assert status.pairings[0].circuit == "half_open"
    assert [report.transfer_id for report in status.reports] == ["t-0"]


def test_what_becomes_of_peers_is_said_once(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    looks: list[dict[str, tuple[str, str]]] = [
        {"a": ("connecting", "closed")},
        {"a": ("paired", "closed"), "b": ("refused", "closed")},
        {"a": ("paired", "closed"), "b": ("refused", "closed")},
        {"a": ("paired", "open")},
        {"a": ("down", "half_open"), "b": ("refused", "closed")},
        {"a": ("connecting", "half_open"), "b": ("refused", "closed")},
        {"a": ("paired", "closed"), "b": ("refused", "closed")},
    ]
    with caplog.at_level(logging.INFO):
        for states in looks:
            bench.monitor.say_peers(bench.monitor.peer_changes(states, lambda peer: f"detail of {peer}"))
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("INFO", "paired: detail of a [event=peer peer=a]"),
        ("WARNING", "refused: detail of b [event=peer peer=b]"),
        ("WARNING", "circuit open: detail of a [event=peer peer=a]"),
        ("WARNING", "down: detail of a [event=peer peer=a]"),
        ("INFO", "circuit half-open: detail of a [event=peer peer=a]"),
        ("WARNING", "refused: detail of b [event=peer peer=b]"),
        ("INFO", "paired: detail of a [event=peer peer=a]"),
        ("INFO", "circuit closed: detail of a [event=peer peer=a]"),
    ]
