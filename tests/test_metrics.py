"""Counters, gauges and timings, up to the numbers that Prometheus shows."""

from __future__ import annotations

from functools import partial

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from hawk_connector.metrics import (
    Outcome,
    PrometheusMetrics,
    TransferLog,
    TransferReport,
    add_payloads,
    is_empty,
    summarise,
)


def report(number: int, outcome: Outcome = "completed", **values: float) -> TransferReport:
    return TransferReport(
        transfer_id=f"t{number}",
        request_id=f"r{number}",
        outcome=outcome,
        tokens=100,
        blocks=2,
        wire_bytes=1000,
        segments=8,
        parcels=1,
        **values,  # type: ignore[arg-type]
    )


def test_taking_gives_each_thing_once() -> None:
    log = TransferLog("decode/0", history=2)
    assert log.take() is None
    for number in range(3):
        log.record(report(number, pull_s=0.5))
    log.record(report(3, "gone"))
    log.set_gauges(leases=4)
    assert log.take() == {
        "counters": {
            "transfers": {"completed": 3, "gone": 1},
            "wire_bytes": 4000,
            "segments": 32,
            "parcels": 4,
            "tokens": 300,
            "blocks": 6,
        },
        "gauges": {"decode/0": {"leases": 4}},
        "samples": {"pull_s": [0.5, 0.5, 0.5]},
    }
    assert log.take() is None
    assert [each.transfer_id for each in log.recent()] == ["t2", "t3"]


def test_gauges_come_again_only_when_they_change() -> None:
    log = TransferLog("prefill/0", history=1)
    log.set_gauges(leases=1, regions=2)
    assert log.take() is not None
    log.set_gauges(leases=1)
    assert log.take() is None
    log.set_gauges(leases=0)
    assert log.take() == {"counters": {}, "gauges": {"prefill/0": {"leases": 0, "regions": 2}}, "samples": {}}
    with pytest.raises(KeyError, match="leasses"):
        log.set_gauges(leasses=1)


def test_adding_sums_ranks_and_keeps_the_latest_gauge_of_each() -> None:
    first = {
        "counters": {"segments": 1, "transfers": {"gone": 1}},
        "gauges": {"a": {"leases": 5}},
        "samples": {},
    }
    second = {
        "counters": {"segments": 2, "transfers": {"gone": 2, "failed": 1}},
        "gauges": {"b": {"leases": 1}},
    }
    third = {"gauges": {"a": {"leases": 3}}, "samples": {"pull_s": [1.0, 2.0]}}
    total = add_payloads(add_payloads(first, second), third)
    assert total["counters"] == {"segments": 3, "transfers": {"gone": 3, "failed": 1}}
    assert summarise(total) == {
        "segments": 3,
        "transfers_gone": 3,
        "transfers_failed": 1,
        "leases": 4,
        "pull_s_mean": 1.5,
        "pull_s_p90": 2.0,
    }
    assert first["counters"] == {"segments": 1, "transfers": {"gone": 1}}
    assert first["gauges"] == {"a": {"leases": 5}}


def test_payloads_go_between_processes() -> None:
    log = TransferLog("decode/0", history=4)
    log.record(report(0, pack_s=0.25, handover_s=1.5))
    log.set_gauges(quarantined=1)
    payload = log.take()
    assert payload is not None
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(payload)) == payload


def test_samples_are_bounded_and_say_so() -> None:
    log = TransferLog("decode/0", history=1)
    for number in range(1030):
        log.record(report(number, pull_s=0.5))
    payload = log.take()
    assert payload is not None
    assert len(payload["samples"]["pull_s"]) == 1024
    assert payload["counters"]["samples_dropped"] == 6
    assert payload["counters"]["transfers"] == {"completed": 1030}


@given(st.lists(st.floats(0, 1e3), min_size=1, max_size=50))
def test_percentile_agrees_with_numpy(values: list[float]) -> None:
    line = summarise({"samples": {"pull_s": values}})
    assert line["pull_s_p90"] == pytest.approx(np.quantile(values, 0.9, method="inverted_cdf"), abs=1e-6)


def test_empty() -> None:
    assert is_empty({})
    assert is_empty({"counters": {}, "gauges": {}, "samples": {}})
    assert not is_empty({"counters": {"segments": 1}})


def test_prometheus_shows_totals_of_every_rank_and_engine() -> None:
    registry = CollectorRegistry()
    metrics = PrometheusMetrics(
        partial(Counter, registry=registry),
        partial(Gauge, registry=registry),
        partial(Histogram, registry=registry),
        ["model", "engine"],
        {0: ["m", "0"], 1: ["m", "1"]},
    )
    log = TransferLog("decode/0", history=4)
    log.record(report(0, pull_s=0.2))
    log.record(report(1, "failed"))
    log.set_gauges(leases=2)
    payload = log.take()
    assert payload is not None
    metrics.observe(payload, 0)
    metrics.observe(payload, 1)
    metrics.observe({"counters": {"segments": 5}, "gauges": {"decode/1": {"leases": 3}}}, 0)

    def value(name: str, engine: str, **labels: str) -> float | None:
        return registry.get_sample_value(name, {"model": "m", "engine": engine, **labels})

    assert value("hawk_transfers_total", "0", outcome="completed") == 1
    assert value("hawk_transfers_total", "1", outcome="failed") == 1
    assert value("hawk_segments_total", "0") == 21
    assert value("hawk_segments_total", "1") == 16
    assert value("hawk_leases", "0") == 5
    assert value("hawk_leases", "1") == 2
    assert value("hawk_pull_seconds_count", "0") == 1
    assert value("hawk_pull_seconds_sum", "0") == pytest.approx(0.2)
