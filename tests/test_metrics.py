"""Counters, gauges and timings, up to the numbers that Prometheus shows."""

from __future__ import annotations

from functools import partial
from typing import get_args

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from hawk_connector.metrics import (
    Outcome,
    TransferLog,
    TransferReport,
    add_payloads,
    is_empty,
    summarise,
)
from hawk_connector.prometheus import PrometheusMetrics
from hawk_connector.protocol.circuit import CircuitState
from hawk_connector.protocol.link import LinkState
from hawk_connector.protocol.messages import GoneReason
from hawk_connector.series import CIRCUITS, COUNTERS, FAILURES, GAUGES, PEERS, SAMPLES, SERIES, Failure
from hawk_connector.transport.side_channel import ChannelCounts


def report(number: int, outcome: Outcome = "completed", **values: float | str) -> TransferReport:
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
            "external_tokens": 0,
        },
        "gauges": {"decode/0": {"leases": 4}},
        "samples": {"pull_s": [0.5, 0.5, 0.5], "segment_bytes": [125.0] * 4},
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
    log.set_gauges(quarantined=1, peers={"paired": 2})
    log.count("messages_dropped", 2, "rate")
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
    assert payload["counters"]["samples_dropped"] == 2 * 6  # of two histograms
    assert payload["counters"]["transfers"] == {"completed": 1030}


@given(st.lists(st.floats(0, 1e3), min_size=1, max_size=50))
def test_percentile_agrees_with_numpy(values: list[float]) -> None:
    line = summarise({"samples": {"pull_s": values}})
    assert line["pull_s_p90"] == pytest.approx(np.quantile(values, 0.9, method="inverted_cdf"), abs=1e-6)


def test_empty() -> None:
    assert is_empty({})
    assert is_empty({"counters": {}, "gauges": {}, "samples": {}})
    assert not is_empty({"counters": {"segments": 1}})


def made(registry: CollectorRegistry, *engines: str, side: str = "decode") -> PrometheusMetrics:
    return PrometheusMetrics(
        partial(Counter, registry=registry),
        partial(Gauge, registry=registry),
        partial(Histogram, registry=registry),
        ["model", "engine"],
        {index: ["m", name] for index, name in enumerate(engines)},
        side,
    )


def test_prometheus_shows_totals_of_every_rank_and_engine() -> None:
    registry = CollectorRegistry()
    metrics = made(registry, "0", "1")
    log = TransferLog("decode/0", history=4)
    log.record(report(0, pull_s=0.2))
    log.record(report(1, "failed", failure="read"))
    log.set_gauges(leases=2, peers={"paired": 3, "down": 1})
    payload = log.take()
    assert payload is not None
    metrics.observe(payload, 0)
    metrics.observe(payload, 1)
    more = {"counters": {"segments": 5}, "gauges": {"decode/1": {"leases": 3, "peers": {"paired": 1, "down": 0}}}}
    metrics.observe(more, 0)

    def value(name: str, engine: str, **labels: str) -> float | None:
        return registry.get_sample_value(name, {"model": "m", "engine": engine, "side": "decode", **labels})

    assert value("hawk_transfers_total", "0", outcome="completed") == 1
    assert value("hawk_transfers_total", "1", outcome="failed") == 1
    assert value("hawk_failures_total", "1", reason="read") == 1
    assert value("hawk_failures_total", "1", reason="expired") == 0  # there before its first event
    assert value("hawk_segments_total", "0") == 21
    assert value("hawk_segments_total", "1") == 16
    assert value("hawk_leases", "0") == 5
    assert value("hawk_leases", "1") == 2
    assert value("hawk_peers", "0", state="paired") == 4
    assert value("hawk_peers", "0", state="down") == 1
    assert value("hawk_pull_seconds_count", "0") == 1
    assert value("hawk_pull_seconds_sum", "0") == pytest.approx(0.2)
    assert value("hawk_segment_bytes_bucket", "0", le="128.0") is None
    assert value("hawk_segment_bytes_bucket", "0", le="512.0") == 2  # 1000 bytes in 8 reads, twice


def test_every_series_is_exposed_under_the_names_that_it_says() -> None:
    registry = CollectorRegistry()
    metrics = made(registry, "0")
    numbers = {key: dict.fromkeys(each.values, 1) if each.label else 1 for key, each in COUNTERS.items()}
    gauges = {key: dict.fromkeys(each.values, 1) if each.label else 1 for key, each in GAUGES.items()}
    metrics.observe({"counters": numbers, "gauges": {"a": gauges}, "samples": {key: [1.0] for key in SAMPLES}})
    found = {sample.name: sample for family in registry.collect() for sample in family.samples}
    named = {name for each in SERIES for name in each.exposed}
    assert {name for name in found if not name.endswith("_created")} == named
    assert all(found[name].value == 1 for name in named)


def test_a_payload_of_another_release_is_taken_as_far_as_it_is_understood() -> None:
    registry = CollectorRegistry()
    metrics = made(registry, "0")
    metrics.observe(
        {
            "counters": {"segments": 5, "unheard_of": 1, "failures": {"read": 2, "unheard_of": 1}, "transfers": 3},
            "gauges": {"a": {"leases": 1, "unheard_of": 2}},
            "samples": {"unheard_of_s": [1.0]},
        }
    )
    labels = {"model": "m", "engine": "0", "side": "decode"}
    assert registry.get_sample_value("hawk_segments_total", labels) == 5
    assert registry.get_sample_value("hawk_failures_total", {**labels, "reason": "read"}) == 2
    assert registry.get_sample_value("hawk_leases", labels) == 1
    assert "unheard" not in str([sample for family in registry.collect() for sample in family.samples])


def test_only_what_is_listed_can_be_counted() -> None:
    log = TransferLog("decode/0", history=1)
    for name, value in (("transferz", None), ("failures", "because"), ("failures", None), ("fences", "read")):
        with pytest.raises(KeyError):
            log.count(name, 1, value)
    for gauges in ({"leases": {"a": 1}}, {"peers": 1}, {"peers": {"pared": 1}}):
        with pytest.raises(KeyError):
            log.set_gauges(**gauges)  # type: ignore[arg-type]
    assert log.take() is None


def test_a_labelled_gauge_says_zero_for_what_is_left_out() -> None:
    log = TransferLog("decode/0", history=1)
    log.set_gauges(peers={"paired": 1})
    log.set_gauges(peers={"down": 1})
    assert log.gauges()["peers"] == {"idle": 0, "connecting": 0, "paired": 0, "refused": 0, "down": 1}


def test_the_closed_sets_are_those_of_the_code() -> None:
    assert tuple(FAILURES) == get_args(Failure)
    assert set(get_args(GoneReason)) <= set(FAILURES)
    assert list(PEERS) == [state.value for state in LinkState]
    assert list(CIRCUITS) == [state.value for state in CircuitState]
    assert list(COUNTERS["messages_dropped"].values) == list(ChannelCounts.__dataclass_fields__)
    assert list(COUNTERS["transfers"].values) == list(get_args(Outcome))
