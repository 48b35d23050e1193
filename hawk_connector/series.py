"""Every series that HAWK shows: its name, kind, meaning and the closed set of its label's values.

This is the only list.  Reports and gauges are checked against it, Prometheus' metrics are made from it, and
docs/operations.md, the dashboard and the alert rules are compared with it by tests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

__all__ = ["CIRCUITS", "COUNTERS", "DROPS", "FAILURES", "GAUGES", "PEERS", "SAMPLES", "SERIES", "Failure", "Series"]

Failure = Literal[
    "unknown",
    "claimed",
    "digest",
    "expired",
    "aborted",
    "layout",
    "failed",
    "released",
    "draining",
    "busy",
    "read",
    "corrupt",
    "room",
    "deadline",
    "no_answer",
    "refused",
    "restarted",
    "offer",
    "heads",
    "blocks",
    "circuit",
    "parameters",
]

# The first ten are the reasons of Gone: the prefill side counts those it gave, the decode side those it was told.
FAILURES: Mapping[str, str] = {
    "unknown": "the prefill side has no such transfer, or has it no more",
    "claimed": "another decode side or request has claimed it",
    "digest": "it is the KV of other tokens",
    "expired": "its lease or its wait for space ran out, or the cache was reset",
    "aborted": "the prefill request was aborted",
    "layout": "it was packed for another layout",
    "failed": "packing failed, or a Done named what was not on offer",
    "released": "all of it had been accepted before",
    "draining": "a side is draining",
    "busy": "the decode side has claimed as many transfers as one may",
    "read": "a read failed or ran out of time",
    "corrupt": "the bytes that landed have another digest than those that were packed",
    "room": "the landing has no room for a parcel (bounce buffer or stages)",
    "deadline": "the load was not complete in time",
    "no_answer": "a prefill rank does not answer",
    "refused": "the two sides cannot be paired",
    "restarted": "the prefill rank is another life than the one that has the KV",
    "offer": "a rank cut or offered something that does not fit",
    "heads": "the ranks together do not send each head once",
    "blocks": "the claim was given up before vLLM had blocks for it",
    "circuit": "the circuit of the prefill rank is open",
    "parameters": "kv_transfer_params cannot be used",
}

DROPS: Mapping[str, str] = {
    "oversize": "larger than a message may be",
    "malformed": "not the frames, or not the message, that it should be",
    "refused_keys": "from a connection whose key is not listed, or no longer",
    "rate": "more than max_messages_per_s from one connection",
    "unsent": "for a connection that is gone, or whose queue is full",
    "connections": "connections closed because max_connections were open",
}

PEERS: Mapping[str, str] = {
    "idle": "known, not asked yet",
    "connecting": "Hello is out",
    "paired": "in use",
    "refused": "the two sides differ",
    "down": "no answer",
}

CIRCUITS: Mapping[str, str] = {
    "closed": "works",
    "open": "failed repeatedly, and is left alone for a while",
    "half_open": "one transfer is tried",
}

_OUTCOMES = {
    "completed": "decode has all of it",
    "gone": "it belongs to another, or is no more",
    "failed": "it should have worked",
    "aborted": "its request was dropped",
    "expired": "nobody asked for it in time",
}

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 120.0)
_BYTES = tuple(float(1 << power) for power in range(9, 28, 2))


@dataclass(frozen=True, slots=True)
class Series:
    """``key``: name in payloads.  ``name``: as Prometheus' library is given it.  ``values``: of ``label``, with their
    meaning; empty where there is no label."""

    key: str
    kind: Literal["counter", "gauge", "histogram"]
    text: str
    label: str | None = None
    values: Mapping[str, str] = field(default_factory=dict)
    buckets: tuple[float, ...] = ()

    @property
    def name(self) -> str:
        return f"hawk_{self.key.removesuffix('_s')}_seconds" if self.key.endswith("_s") else f"hawk_{self.key}"

    @property
    def exposed(self) -> tuple[str, ...]:
        """The names under which /metrics shows it."""
        if self.kind == "counter":
            return (f"{self.name}_total",)
        if self.kind == "histogram":
            return tuple(f"{self.name}_{part}" for part in ("bucket", "sum", "count"))
        return (self.name,)


SERIES: tuple[Series, ...] = (
    Series("transfers", "counter", "Transfers that ended, by outcome", "outcome", _OUTCOMES),
    Series("failures", "counter", "Transfers and loads that did not complete, by reason", "reason", FAILURES),
    Series(
        "recomputes",
        "counter",
        "Requests that named a transfer and computed their own KV instead, by reason",
        "reason",
        FAILURES,
    ),
    Series("tokens", "counter", "Tokens of completed transfers"),
    Series("external_tokens", "counter", "Prompt tokens that decode did not compute, since their KV came from prefill"),
    Series("blocks", "counter", "Blocks of completed transfers"),
    Series("wire_bytes", "counter", "Bytes of KV that were packed (prefill side) or read (decode side)"),
    Series("segments", "counter", "Reads that carried them"),
    Series("parcels", "counter", "Parcels that they came in"),
    Series("peer_epochs", "counter", "Lives of peers that were paired with: one more for each restart of a peer"),
    Series("fences", "counter", "Transfer engines dropped so that no late byte can arrive"),
    Series("stalls", "counter", "Transfers that the watchdog found not moving, each once"),
    Series("messages_dropped", "counter", "Messages of the side channel that were dropped", "reason", DROPS),
    Series("samples_dropped", "counter", "Observations left out because too many came at once"),
    Series("transfers_live", "gauge", "Transfers (prefill side) or loads (decode side) that have not ended"),
    Series("waiting", "gauge", "Parcels that wait for space (prefill side), loads that run (decode side)"),
    Series("leases", "gauge", "Transfers that are offered and not yet released"),
    Series("regions", "gauge", "Regions of the send buffer in use"),
    Series("send_buffer_used_bytes", "gauge", "Bytes of the send buffer in use"),
    Series("send_buffer_bytes", "gauge", "Size of the send buffer"),
    Series("requests_held", "gauge", "Requests whose blocks the prefill side's vLLM may not have back yet"),
    Series("admissions", "gauge", "Requests that wait for a claim, or with one for blocks"),
    Series("reads", "gauge", "Reads that run"),
    Series("quarantined", "gauge", "Blocks that wait for running reads or a fence before vLLM may have them"),
    Series("quarantined_bytes", "gauge", "Bytes of these blocks, on all chips"),
    Series("fences_awaited", "gauge", "Engines that are to be dropped and are not yet"),
    Series("peers", "gauge", "Peers by state of the link", "state", PEERS),
    Series("circuits", "gauge", "Circuits of prefill ranks by state", "state", CIRCUITS),
    Series("connections", "gauge", "Connections to the side channel"),
    Series("draining", "gauge", "1 while the side finishes what it owes and takes nothing new"),
    Series("ready", "gauge", "1 while the side can serve every configured peer"),
    Series("pack_s", "histogram", "Seconds of packing one transfer", buckets=_SECONDS),
    Series(
        "pull_s", "histogram", "Seconds of reading and landing one transfer, summed over its reads", buckets=_SECONDS
    ),
    Series("land_s", "histogram", "Of these, seconds after the bytes had arrived", buckets=_SECONDS),
    Series("wait_s", "histogram", "Seconds that one transfer waited for the other side", buckets=_SECONDS),
    Series("handover_s", "histogram", "Seconds from the end of prefill to KV that can be decoded on", buckets=_SECONDS),
    Series("segment_bytes", "histogram", "Mean bytes of a transfer's segments, once a transfer", buckets=_BYTES),
)

COUNTERS: Mapping[str, Series] = {each.key: each for each in SERIES if each.kind == "counter"}
GAUGES: Mapping[str, Series] = {each.key: each for each in SERIES if each.kind == "gauge"}
SAMPLES: Mapping[str, Series] = {each.key: each for each in SERIES if each.kind == "histogram"}
