"""What the prefill side's state machine asks for, and the limits it works within."""

from __future__ import annotations

from dataclasses import dataclass

from ..plan.parcel import ParcelPlan
from ..plan.raw_plan import RawPlan
from .messages import Accepted, Claimed, Gone, GoneReason, Ready, Refused, Renewed, Stale, Welcome

__all__ = ["Action", "Ended", "Hash", "Pack", "PrefillLimits", "ReleaseBlocks", "Send", "Settle"]


@dataclass(frozen=True, slots=True)
class Send:
    """Send ``message`` to the peer behind the side channel's ``identity``."""

    identity: str
    message: Welcome | Refused | Stale | Claimed | Ready | Renewed | Accepted | Gone


@dataclass(frozen=True, slots=True)
class Pack:
    """Pack blocks ``first_block`` .. of a transfer into the send buffer at offset ``region``; answer with ``packed``.

    Rows of ``tokens`` and later are zeros.  A RawPlan's blocks are copied as they are.
    """

    job: int
    transfer: str
    first_block: int
    tokens: int
    region: int
    plan: ParcelPlan | RawPlan


@dataclass(frozen=True, slots=True)
class Settle:
    """Answer with ``packed`` once the transfer's blocks, as far as they are computed, are in memory for peers to read.

    On a CPU they are when the step has ended, on a GPU when its events have passed.
    """

    job: int
    transfer: str


@dataclass(frozen=True, slots=True)
class Hash:
    """Compute the digest of the packed parcel at offset ``region``, blocks below ``skip_blocks`` left out.

    Answer with ``hashed``.
    """

    job: int
    transfer: str
    region: int
    plan: ParcelPlan | RawPlan
    skip_blocks: int


@dataclass(frozen=True, slots=True)
class ReleaseBlocks:
    """vLLM may have the blocks of the finished request back."""

    transfer: str


@dataclass(frozen=True, slots=True)
class Ended:
    """The transfer is over; ``reason`` is None where every parcel was accepted or skipped.

    ``read_in_place``: bytes of the accepted ones that no pack has counted.
    """

    transfer: str
    reason: GoneReason | None
    parcels: int
    read_in_place: int = 0


Action = Send | Pack | Settle | Hash | ReleaseBlocks | Ended


@dataclass(frozen=True, slots=True)
class PrefillLimits:
    """Times in seconds; see the configuration reference for their meaning.

    ``early_pull_s``: how long the Pull of a transfer that this rank has not begun may wait for it.
    """

    parcel_tokens: int
    lease_s: float
    buffer_wait_s: float
    verdict_keep_s: float
    max_transfers: int
    max_peers: int
    peer_keep_s: float = 60.0
    max_transfers_per_peer: int = 1024
    peer_buffer_share: float = 0.5
    digests: bool = False
    early_pull_s: float = 1.0
    parcel_bytes: int = 32 << 20
