"""What HAWK measures: one report a transfer, and counters, gauges and samples for vLLM and Prometheus.

The *payload* is a plain dict (vLLM sends it between its processes) of what happened since it was last
taken; the names are those of :mod:`hawk_connector.series`, and a series with a label has a dict by its values::

    {"counters": {name: int, "transfers": {outcome: int}},
     "gauges":   {source: {name: int, "peers": {state: int}}},
     "samples":  {name: [number, ...]}}

vLLM adds payloads up in two ways that it does not tell apart: of several ranks, and of one rank over time.
Counters and samples may be added either way. Gauges are kept by source (a rank), of which the latest holds.
"""

from __future__ import annotations

import copy
import statistics
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

import msgspec

from .series import COUNTERS, GAUGES, Failure, Series

__all__ = [
    "Outcome",
    "Payload",
    "TransferLog",
    "TransferReport",
    "add_payloads",
    "gauge_totals",
    "is_empty",
    "summarise",
]

Payload: TypeAlias = dict[str, dict[str, Any]]
Gauge: TypeAlias = int | dict[str, int]

Outcome = Literal["completed", "gone", "failed", "aborted", "expired"]

# Observations kept between two takings. vLLM takes each step; only a log that nobody takes from reaches it.
_SAMPLE_LIMIT = 1024


class TransferReport(msgspec.Struct, frozen=True, kw_only=True):
    """One transfer, as the side that writes the report saw it. A time that a side cannot know is None.

    ``pack_s``, ``pull_s``: work; ``land_s``: the part of ``pull_s`` after the bytes had arrived. ``wait_s``: waiting
    for the other side. ``handover_s``: from the end of prefill to the end of decode's load; the prefill side says
    how long ago its end was, so that no two clocks are compared. ``external_tokens``: prompt tokens whose KV came
    with it. ``reason`` says why when the outcome is not "completed", ``failure`` the same in one word. ``bank_fill``:
    (chip, bank, bytes landed), for every bank that got any. ``prefilled_at`` (when the step that computed the
    last prompt token had ended on the prefill side) and ``landed_at`` (when decode's load ended) are Unix times,
    each by its own machine's clock.
    """

    transfer_id: str
    request_id: str
    outcome: Outcome
    reason: str = ""
    failure: Failure | None = None
    tokens: int = 0
    external_tokens: int = 0
    blocks: int = 0
    wire_bytes: int = 0
    segments: int = 0
    parcels: int = 0
    pack_s: float | None = None
    pull_s: float | None = None
    land_s: float | None = None
    wait_s: float | None = None
    handover_s: float | None = None
    bank_fill: tuple[tuple[int, int, int], ...] = ()
    prefilled_at: float | None = None
    landed_at: float | None = None


class TransferLog:
    """Takes reports, counts and gauges from any thread; gives out payloads and the most recent reports.

    ``source`` names the rank ("decode/0"); ``history`` bounds how many reports are remembered.
    """

    def __init__(self, source: str, *, history: int) -> None:
        self._source = source
        self._lock = threading.Lock()
        self._recent: deque[TransferReport] = deque(maxlen=history)
        self._gauges: dict[str, Gauge] = {}
        self._gauges_taken: dict[str, Gauge] = {}
        self._payload = _empty()

    def record(self, report: TransferReport) -> None:
        completed = report.outcome == "completed"
        with self._lock:
            self._recent.append(report)
            self._add("transfers", 1, report.outcome)
            if report.failure is not None:
                self._add("failures", 1, report.failure)
            only_good = ("tokens", "blocks", "external_tokens") if completed else ()
            for name in ("wire_bytes", "segments", "parcels", *only_good):
                self._add(name, getattr(report, name), None)
            for name in ("pack_s", "pull_s", "land_s", "wait_s", "handover_s"):
                seconds = getattr(report, name)
                if seconds is not None:
                    _append(self._payload, name, [seconds])
            if report.segments:
                _append(self._payload, "segment_bytes", [report.wire_bytes / report.segments])

    def count(self, name: str, number: int = 1, value: str | None = None) -> None:
        """Adds ``number`` to a counter, of its label's ``value`` where it has a label; KeyError for another name or
        value."""
        _checked(COUNTERS, name, (value,))
        if number:
            with self._lock:
                self._add(name, number, value)

    def set_gauges(self, **values: int | Mapping[str, int]) -> None:
        """Sets some of the gauges; one with a label by its values, those left out being 0. KeyError for another name
        or value."""
        gauges: dict[str, Gauge] = {}
        for name, value in values.items():
            by_value = dict(value) if isinstance(value, Mapping) else None
            series = _checked(GAUGES, name, by_value if by_value is not None else (None,))
            if by_value is not None:
                gauges[name] = {each: by_value.get(each, 0) for each in series.values}
            else:
                assert isinstance(value, int)
                gauges[name] = value
        with self._lock:
            self._gauges.update(gauges)

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

    def gauges(self) -> dict[str, Gauge]:
        with self._lock:
            return dict(self._gauges)

    def _add(self, name: str, number: int, value: str | None) -> None:
        counters = self._payload["counters"]
        if value is None:
            counters[name] = counters.get(name, 0) + number
        else:
            by_value = counters.setdefault(name, {})
            by_value[value] = by_value.get(value, 0) + number


def is_empty(payload: Payload) -> bool:
    return not any(payload.get(part) for part in ("counters", "gauges", "samples"))


def add_payloads(first: Payload, second: Payload) -> Payload:
    """Both together, as a new payload; ``second`` is the later one."""
    total = _empty()
    for payload in (first, second):
        _add_all(total["counters"], payload.get("counters", {}))
        total["gauges"].update(copy.deepcopy(payload.get("gauges", {})))
        for name, numbers in payload.get("samples", {}).items():
            _append(total, name, numbers)
    return total


def summarise(payload: Payload) -> dict[str, int | float]:
    """One flat line for vLLM's log: counts, gauge totals, mean and 90th percentile of each histogram."""
    line: dict[str, int | float] = {}
    for name, value in (*payload.get("counters", {}).items(), *gauge_totals(payload).items()):
        if isinstance(value, Mapping):
            line |= {f"{name}_{label}": count for label, count in value.items() if count}
        else:
            line[name] = value
    for name, numbers in payload.get("samples", {}).items():
        if numbers:
            line[f"{name}_mean"] = round(statistics.fmean(numbers), 6)
            line[f"{name}_p90"] = round(_percentile(numbers, 0.9), 6)
    return line


def gauge_totals(payload: Payload) -> dict[str, Gauge]:
    """The gauges of all sources together."""
    totals: dict[str, Gauge] = {}
    for gauges in payload.get("gauges", {}).values():
        _add_all(totals, gauges)
    return totals


def _checked(known: Mapping[str, Series], name: str, values: Mapping[str, int] | tuple[str | None]) -> Series:
    """The series ``name``; KeyError where it is not there or ``values`` are not of its label."""
    if name not in known:
        raise KeyError(f"no such series: {name}")
    series = known[name]
    wrong = [v for v in values if (v is None) != (series.label is None) or (v is not None and v not in series.values)]
    if wrong:
        raise KeyError(f"no such {series.label or 'label'} of {name}: {wrong[0]}")
    return series


def _empty() -> Payload:
    return {"counters": {}, "gauges": {}, "samples": {}}


def _add_all(total: dict[str, Any], more: Mapping[str, Any]) -> None:
    """Adds ``more`` to ``total``, name by name and within them value by value."""
    for name, number in more.items():
        if isinstance(number, Mapping):
            by_value = total.setdefault(name, {})
            for value, count in number.items():
                by_value[value] = by_value.get(value, 0) + count
        else:
            total[name] = total.get(name, 0) + number


def _append(payload: Payload, name: str, numbers: Sequence[float]) -> None:
    kept = payload["samples"].setdefault(name, [])
    room = max(0, _SAMPLE_LIMIT - len(kept))
    kept.extend(numbers[:room])
    if len(numbers) > room:
        counters = payload["counters"]
        counters["samples_dropped"] = counters.get("samples_dropped", 0) + len(numbers) - room


def _percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least ``share`` of all values do not exceed (nearest rank)."""
    ordered = sorted(values)
    return ordered[max(0, -int(-share * len(ordered) // 1) - 1)]
