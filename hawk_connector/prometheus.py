"""The hawk_* series of one API server, made from :mod:`hawk_connector.series` and filled from payloads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .metrics import Payload, gauge_totals
from .series import COUNTERS, GAUGES, SAMPLES, Series

__all__ = ["PrometheusMetrics"]


class PrometheusMetrics:
    """One time series for each engine, and for each value of a series' label.

    The three classes are prometheus_client's Counter, Gauge and Histogram or vLLM's stand-ins for them
    (``metric_types`` of ``build_prom_metrics``); ``engines`` maps an engine's index to its label values.
    ``side`` ("prefill", "decode") is a label of every series.
    """

    def __init__(
        self,
        counter: Callable[..., Any],
        gauge: Callable[..., Any],
        histogram: Callable[..., Any],
        labelnames: Sequence[str],
        engines: Mapping[int, Sequence[object]],
        side: str,
    ) -> None:
        self._labels = [*labelnames, "side"]
        self._engines = {index: (*values, side) for index, values in engines.items()}
        self._counters = {key: self._made(counter, each) for key, each in COUNTERS.items()}
        self._gauges = {
            # Of several API servers the one that was told last is right: sums would count a rank twice.
            key: self._made(gauge, each, multiprocess_mode="mostrecent")
            for key, each in GAUGES.items()
        }
        self._samples = {key: self._made(histogram, each, buckets=list(each.buckets)) for key, each in SAMPLES.items()}
        self._by_source: dict[int, Payload] = {}
        for labels in self._engines.values():
            for key, each in COUNTERS.items():
                # A counter that appears with its first event has no rate for that event.
                for value in each.values or ("",):
                    self._counters[key].labels(*labels, *([value] if each.label else []))

    def observe(self, payload: Payload, engine: int = 0) -> None:
        """Record a payload of the engine with this index.

        Names and label values that this release does not know (a rank of another one) are left out.
        """
        labels = self._engines[engine]
        for name, number in payload.get("counters", {}).items():
            for extra, count in _by_value(COUNTERS.get(name), number):
                self._counters[name].labels(*labels, *extra).inc(count)
        # A rank reports its gauges when they change, so the others' last values count on.
        known = self._by_source.setdefault(engine, {"gauges": {}})
        known["gauges"].update(payload.get("gauges", {}))
        for name, total in gauge_totals(known).items():
            for extra, count in _by_value(GAUGES.get(name), total):
                self._gauges[name].labels(*labels, *extra).set(count)
        for name, numbers in payload.get("samples", {}).items():
            if name in self._samples:
                for each in numbers:
                    self._samples[name].labels(*labels).observe(each)

    def _made(self, kind: Callable[..., Any], series: Series, **options: Any) -> Any:
        names = [*self._labels, series.label] if series.label else self._labels
        return kind(name=series.name, documentation=series.text, labelnames=names, **options)


def _by_value(series: Series | None, number: Any) -> list[tuple[tuple[str, ...], int]]:
    """(further label values, number) of what a payload says of ``series``; nothing where it does not fit."""
    if series is None or isinstance(number, Mapping) != (series.label is not None):
        return []
    if isinstance(number, Mapping):
        return [((value,), count) for value, count in number.items() if value in series.values]
    return [((), number)]
