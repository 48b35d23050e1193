"""What the decode worker's state machine asks for, and the limits it works within."""

from __future__ import annotations

from dataclasses import dataclass

from ..plan.any_plan import Plan
from ..series import Failure
from .link import LinkLimits
from .messages import DecodeMessage

__all__ = [
    "DecodeAction",
    "DecodeLimits",
    "Disconnect",
    "Fence",
    "PeerOutcome",
    "Read",
    "Report",
    "SendTo",
    "StopRead",
]


@dataclass(frozen=True, slots=True)
class SendTo:
    """Send ``message`` to the prefill rank at ``address``."""

    address: str
    message: DecodeMessage


@dataclass(frozen=True, slots=True)
class Disconnect:
    """The rank at ``address`` is forgotten: drop the connection.  A later SendTo connects again."""

    address: str


@dataclass(frozen=True, slots=True)
class Read:
    """Read a parcel: ``region`` is its address in engine ``session`` of the rank at ``address``.

    Of a BlockPlan there is no region: the plan says where its blocks lie.
    ``block_ids``: decode's block for each block of the plan; the first ``skip_blocks`` are placeholders.
    ``digest``: what the bytes of the others must have, empty where nobody asked for one.  Answer with ``read_ended``.
    """

    id: int
    request: str
    address: str
    session: str
    region: int
    plan: Plan
    block_ids: tuple[int, ...]
    skip_blocks: int
    digest: str = ""


@dataclass(frozen=True, slots=True)
class StopRead:
    """Nobody wants read ``id`` any more: start no more of its batches.  It is still answered with ``read_ended``."""

    id: int


@dataclass(frozen=True, slots=True)
class Fence:
    """Drop the engine that reads from ``address``; no read of it is running.  Answer with ``fenced``."""

    address: str


@dataclass(frozen=True, slots=True)
class Report:
    """The load of ``request`` has ended.  ``ok``: its blocks hold the KV.  Otherwise no byte can arrive any more.

    ``failure``: ``reason`` in one word.  ``handover_s``: seconds since the prefill request had ended, where known.
    """

    request: str
    ok: bool
    aborted: bool
    reason: str
    block_ids: tuple[int, ...]
    parcels: int
    failure: Failure | None = None
    handover_s: float | None = None


DecodeAction = SendTo | Disconnect | Read | StopRead | Fence | Report


@dataclass(frozen=True, slots=True)
class PeerOutcome:
    """How one rank did its part of a load, for its circuit: True, False, or None where the load's end says nothing.

    ``epoch``: the life of the rank that it is about.
    """

    request: str
    address: str
    epoch: str
    served: bool | None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class DecodeLimits:
    """Times in seconds; ``reads``: reads in flight from one peer, so that a peer that hangs holds up nobody else."""

    link: LinkLimits
    admission_deadline_s: float
    load_deadline_s: float
    reads: int
