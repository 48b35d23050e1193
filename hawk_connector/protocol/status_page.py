"""The Status message of a side, cut so that it always fits: what is left out is counted.

A status is asked for by people and probes, and answered from a thread that has transfers to care for: it is bounded
in size and in the work that making it takes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import TypeVar

import msgspec

from ..metrics import TransferReport
from .messages import PairingStatus, Status
from .snapshot import TransferSnapshot, clipped

__all__ = ["SHOWN_TRANSFERS", "status_page"]

# Of the 1 MiB that a message may have.
_BYTES = {"pairings": 128 * 1024, "transfers": 256 * 1024, "reports": 256 * 1024}
# A snapshot takes time in proportion to the transfer's parcels.
SHOWN_TRANSFERS = 128
_REASONS = 64

_encoder = msgspec.msgpack.Encoder()

Item = TypeVar("Item")


def status_page(
    *,
    epoch: str,
    role: str,
    held: Mapping[str, int],
    pairings: Sequence[PairingStatus],
    transfers: Iterable[TransferSnapshot],
    live: int,
    reports: Sequence[TransferReport],
    unready: Sequence[str] = (),
    dropped: Mapping[str, int] | None = None,
    uptime_s: float = 0.0,
) -> Status:
    """``transfers``: oldest first, of which no more than SHOWN_TRANSFERS are taken; ``live``: how many there are.

    ``reports``: oldest first, of which the newest are kept.
    """
    some_pairings = _fitting(pairings, _BYTES["pairings"])
    some_transfers = _fitting(islice(transfers, SHOWN_TRANSFERS), _BYTES["transfers"])
    some_reports = _fitting(map(_short, reversed(reports)), _BYTES["reports"])[::-1]
    left_out = {
        "pairings": len(pairings) - len(some_pairings),
        "transfers": max(0, live - len(some_transfers)),
        "reports": len(reports) - len(some_reports),
    }
    return Status(
        epoch=epoch,
        role=role,
        held=dict(held),
        pairings=tuple(some_pairings),
        reports=tuple(some_reports),
        transfers=tuple(some_transfers),
        unready=tuple(clipped(text, 1024) for text in unready[:_REASONS]),
        dropped=dict(dropped or {}),
        left_out={name: number for name, number in left_out.items() if number},
        uptime_s=uptime_s,
    )


def _fitting(items: Iterable[Item], nbytes: int) -> list[Item]:
    """The first of ``items``, as many as take ``nbytes`` as message."""
    fitting: list[Item] = []
    for item in items:
        nbytes -= len(_encoder.encode(item))
        if nbytes < 0:
            break
        fitting.append(item)
    return fitting


def _short(report: TransferReport) -> TransferReport:
    """A client's text is cut here, and not by the reader's limits."""
    request, reason = clipped(report.request_id), clipped(report.reason, 1024)
    if (request, reason) == (report.request_id, report.reason):
        return report
    return msgspec.structs.replace(report, request_id=request, reason=reason)
