"""What HAWK measures: one report a transfer, and counters, gauges and samples for vLLM and Prometheus.

The *payload* is a plain dict (vLLM sends it between its processes) of what happened since it was last
taken::

    {"counters": {name: int, "transfers": {outcome: int}},
     "gauges":   {source: {name: int}},
     "samples":  {name: [seconds, ...]}}

vLLM adds payloads up in two ways that it does not tell apart: of several ranks, and of one rank over time.
Counters and samples may be added either way. Gauges are kept by source (a rank), of which the latest holds.
"""

from __future__ import annotations

import copy
import statistics
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import msgspec

__all__ = [
    "GAUGES",
    "Outcome",
    "Payload",
    "PrometheusMetrics",
    "TransferLog",
    "TransferReport",
    "add_payloads",
    "is_empty",
    "summarise",
]

Payload: TypeAlias = dict[str, dict[str, Any]]

Outcome = Literal["completed", "gone", "failed", "aborted", "expired"]

COUNTERS = {
    "tokens": "Tokens of completed transfers",
    "blocks": "Blocks of completed transfers",
    "wire_bytes": "Bytes of KV that were read, completed or not",
    "segments": "Reads that carried them",
    "parcels": "Parcels that they came in",
    "samples_dropped": "Timings left out because too many came at once",
}
GAUGES = {
    "leases": "Parcels that are offered and not yet released",
    "regions": "Regions of the send buffer in use",
    "quarantined": "Destination regions that wait for a fence",
    "waiting": "Requests that wait for send-buffer space or for a peer",
}
SAMPLES = {
    "pack_s": "Seconds of packing one transfer",
    "pull_s": "Seconds of reading one transfer",
    "wait_s": "Seconds that one transfer waited for the other side",
    "handover_s": "Seconds from a transfer's end of prefill to its start of decode",
}

# Timings kept between two takings. vLLM takes each step; only a log that nobody takes from reaches it.
_SAMPLE_LIMIT = 1024

_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 120.0)


class TransferReport(msgspec.Struct, frozen=True, kw_only=True):
    """One transfer, as the side that writes the report saw it. A time that a side cannot know is None.

    ``pack_s``, ``pull_s``: work. ``wait_s``: waiting for the other side. ``handover_s``: from the end of
    prefill to the start of decode. ``reason`` says why when the outcome is not "completed". ``bank_fill``:
    (chip, bank, bytes landed), for every bank that got any. ``prefilled_at`` (when the step that computed the
    last prompt token had ended on the prefill side) and ``landed_at`` (when decode's load ended) are Unix times,
    each by its own machine's clock.
    """

    transfer_id: str
    request_id: str
    outcome: Outcome
    reason: str = ""
    tokens: int = 0
    blocks: int = 0
    wire_bytes: int = 0
    segments: int = 0
    parcels: int = 0
    pack_s: float | None = None
    pull_s: float | None = None
    wait_s: float | None = None
    handover_s: float | None = None
    bank_fill: tuple[tuple[int, int, int], ...] = ()
    prefilled_at: float | None = None
    landed_at: float | None = None


class TransferLog:
    """Takes reports and gauges from any thread; gives out payloads and the most recent reports.

    ``source`` names the rank ("decode/0"); ``history`` bounds how many reports are remembered.
    """

    def __init__(self, source: str, *, history: int) -> None:
        self._source = source
        self._lock = threading.Lock()
        self._recent: deque[TransferReport] = deque(maxlen=history)
        self._gauges: dict[str, int] = {}
        self._gauges_taken: dict[str, int] = {}
        self._payload = _empty()

    def record(self, report: TransferReport) -> None:
        with self._lock:
            self._recent.append(report)
            counters = self._payload["counters"]
            transfers = counters.setdefault("transfers", {})
            transfers[report.outcome] = transfers.get(report.outcome, 0) + 1
            completed = report.outcome == "completed"
            for name in ("wire_bytes", "segments", "parcels", *(("tokens", "blocks") if completed else ())):
                counters[name] = counters.get(name, 0) + getattr(report, name)
            for name in SAMPLES:
                seconds = getattr(report, name)
                if seconds is not None:
                    _append(self._payload, name, [seconds])

    def set_gauges(self, **values: int) -> None:
        """Set some of GAUGES; raises KeyError for another name."""
        unknown = values.keys() - GAUGES.keys()
        if unknown:
            raise KeyError(f"no such gauge: {', '.join(sorted(unknown))}")
        with self._lock:
            self._gauges.update(values)

    def take(self) -> Payload | None:
        """What happened since the last call, or None when nothing did."""
        with self._lock:
            payload, self._payload = self._payload, _empty()
            if self._gauges != self._gauges_taken:
                self._gauges_taken = dict(self._gauges)
                payload["gauges"][self._source] = dict(self._gauges)
        return None if is_empty(payload) else payload

    def recent(self) -> tuple[TransferReport, ...]:
        """The last reports, oldest first."""
        with self._lock:
            return tuple(self._recent)

    def gauges(self) -> dict[str, int]:
        with self._lock:
            return dict(self._gauges)


def is_empty(payload: Payload) -> bool:
    return not any(payload.get(part) for part in ("counters", "gauges", "samples"))


def add_payloads(first: Payload, second: Payload) -> Payload:
    """Both together, as a new payload; ``second`` is the later one."""
    total = _empty()
    for payload in (first, second):
        counters = total["counters"]
        for name, value in payload.get("counters", {}).items():
            if isinstance(value, Mapping):
                outcomes = counters.setdefault(name, {})
                for outcome, count in value.items():
                    outcomes[outcome] = outcomes.get(outcome, 0) + count
            else:
                counters[name] = counters.get(name, 0) + value
        total["gauges"].update(copy.deepcopy(payload.get("gauges", {})))
        for name, seconds in payload.get("samples", {}).items():
            _append(total, name, seconds)
    return total


def summarise(payload: Payload) -> dict[str, int | float]:
    """One flat line for vLLM's log: counts, gauge totals, mean and 90th percentile of each timing."""
    line: dict[str, int | float] = {}
    for name, value in payload.get("counters", {}).items():
        if isinstance(value, Mapping):
            line |= {f"{name}_{outcome}": count for outcome, count in value.items()}
        else:
            line[name] = value
    line |= _gauge_totals(payload)
    for name, seconds in payload.get("samples", {}).items():
        if seconds:
            line[f"{name}_mean"] = round(statistics.fmean(seconds), 6)
            line[f"{name}_p90"] = round(_percentile(seconds, 0.9), 6)
    return line


class PrometheusMetrics:
    """The hawk_* metrics of one API server, one time series for each engine.

    The three classes are prometheus_client's Counter, Gauge and Histogram or vLLM's stand-ins for them
    (``metric_types`` of ``build_prom_metrics``); ``engines`` maps an engine's index to its label values.
    """

    def __init__(
        self,
        counter: Callable[..., Any],
        gauge: Callable[..., Any],
        histogram: Callable[..., Any],
        labelnames: Sequence[str],
        engines: Mapping[int, Sequence[object]],
    ) -> None:
        labels = list(labelnames)
        self._engines = {index: tuple(values) for index, values in engines.items()}
        self._transfers = counter(
            name="hawk_transfers", documentation="Transfers by outcome", labelnames=[*labels, "outcome"]
        )
        self._counters = {
            name: counter(name=f"hawk_{name}", documentation=text, labelnames=labels) for name, text in COUNTERS.items()
        }
        self._gauges = {
            # Of several API servers the one that was told last is right: sums would count a rank twice.
            name: gauge(name=f"hawk_{name}", documentation=text, labelnames=labels, multiprocess_mode="mostrecent")
            for name, text in GAUGES.items()
        }
        self._samples = {
            name: histogram(
                name=f"hawk_{name.removesuffix('_s')}_seconds",
                documentation=text,
                labelnames=labels,
                buckets=list(_BUCKETS_S),
            )
            for name, text in SAMPLES.items()
        }
        self._by_source: dict[int, Payload] = {}

    def observe(self, payload: Payload, engine: int = 0) -> None:
        """Record a payload of the engine with this index."""
        labels = self._engines[engine]
        counters = payload.get("counters", {})
        for outcome, count in counters.get("transfers", {}).items():
            self._transfers.labels(*labels, outcome).inc(count)
        for name, metric in self._counters.items():
            if counters.get(name):
                metric.labels(*labels).inc(counters[name])
        # A rank reports its gauges when they change, so the others' last values count on.
        known = self._by_source.setdefault(engine, _empty())
        known["gauges"].update(payload.get("gauges", {}))
        for name, total in _gauge_totals(known).items():
            self._gauges[name].labels(*labels).set(total)
        for name, seconds in payload.get("samples", {}).items():
            for each in seconds:
                self._samples[name].labels(*labels).observe(each)


def _empty() -> Payload:
    return {"counters": {}, "gauges": {}, "samples": {}}


def _append(payload: Payload, name: str, seconds: Sequence[float]) -> None:
    kept = payload["samples"].setdefault(name, [])
    room = max(0, _SAMPLE_LIMIT - len(kept))
    kept.extend(seconds[:room])
    if len(seconds) > room:
        counters = payload["counters"]
        counters["samples_dropped"] = counters.get("samples_dropped", 0) + len(seconds) - room


def _gauge_totals(payload: Payload) -> dict[str, int]:
    totals: dict[str, int] = {}
    for gauges in payload.get("gauges", {}).values():
        for name, value in gauges.items():
            totals[name] = totals.get(name, 0) + value
    return totals


def _percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least ``share`` of all values do not exceed (nearest rank)."""
    ordered = sorted(values)
    return ordered[max(0, -int(-share * len(ordered) // 1) - 1)]
