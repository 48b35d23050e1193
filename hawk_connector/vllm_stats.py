"""HAWK's metrics in vLLM's classes.  Imports vLLM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from prometheus_client import Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from .config import PREFILL_ROLE
from .metrics import add_payloads, is_empty, summarise
from .prometheus import PrometheusMetrics

__all__ = ["HawkPromMetrics", "HawkStats"]


@dataclass
class HawkStats(KVConnectorStats):
    """``data`` is a payload of ``hawk_connector.metrics``."""

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        return HawkStats(data=add_payloads(self.data, other.data))

    def reduce(self) -> dict[str, int | float]:
        return summarise(self.data)

    def is_empty(self) -> bool:
        return is_empty(self.data)


class HawkPromMetrics(KVConnectorPromMetrics):
    """The ``hawk_*`` series of vLLM's /metrics."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._metrics = PrometheusMetrics(
            metric_types[Counter],
            metric_types[Gauge],
            metric_types[Histogram],
            labelnames,
            per_engine_labelvalues,
            "prefill" if vllm_config.kv_transfer_config.kv_role == PREFILL_ROLE else "decode",
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        self._metrics.observe(transfer_stats_data, engine_idx)
