"""One transfer as the prefill side sees it: its parcels and its claim."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from ..plan.pairing import AnyPairing, DirectPairing
from .lease import Lease
from .messages import GoneReason

__all__ = ["Claim", "Parcel", "ParcelDigest", "ParcelState", "Transfer"]


class ParcelState(Enum):
    WAITING = auto()  # its tokens are not computed yet
    QUEUED = auto()  # computed; waits in order for send-buffer space
    PACKING = auto()  # a pack job of the current generation is out
    OFFERED = auto()  # packed, or in place; the claimant may read it
    ACCEPTED = auto()  # read and believed; the region is free again
    SKIPPED = auto()  # the claimant has these blocks already

    @property
    def needs_blocks(self) -> bool:
        """Whether vLLM's blocks must still be held for it, even where it is packed."""
        return self in (ParcelState.WAITING, ParcelState.QUEUED, ParcelState.PACKING)

    @property
    def ended(self) -> bool:
        return self in (ParcelState.ACCEPTED, ParcelState.SKIPPED)


@dataclass(frozen=True, slots=True)
class ParcelDigest:
    """The digest of the parcel's blocks ``skip_blocks`` and up."""

    skip_blocks: int
    value: str


@dataclass(slots=True, eq=False)
class Parcel:
    """A run of decode blocks of one transfer: ``first_block`` .. ``first_block + blocks``.

    ``tokens``: prompt tokens that must be computed before it can be packed.  ``job``: number of the pack job that is
    out, which alone may complete it.  ``hash_job``: likewise of the job that computes its digest.  ``in_place``: it is
    read in vLLM's cache (mode direct), and has no region.
    """

    index: int
    first_block: int
    blocks: int
    tokens: int
    nbytes: int
    in_place: bool = False
    state: ParcelState = ParcelState.WAITING
    region: int | None = None
    generation: int = 0
    job: int | None = None
    offered_at: float = 0.0
    digest: ParcelDigest | None = None
    hash_job: int | None = None

    @property
    def needs_blocks(self) -> bool:
        """Whether vLLM's blocks must still be held for it."""
        return self.state.needs_blocks or (self.in_place and self.state is ParcelState.OFFERED)


@dataclass(frozen=True, slots=True)
class Claim:
    """The decode side that pulled a transfer first."""

    epoch: str
    nonce: str


@dataclass(slots=True, eq=False)
class Transfer:
    """``generation`` rises with each preemption; a pack job of an older generation is discarded.

    ``block_ids``: vLLM's blocks that hold the ``computed`` tokens, from the first; empty where nobody has said.
    ``first_block``: the claimant has the blocks below it.  ``digests``: its Readys carry their parcels' digests.
    """

    id: str
    digest: str
    tokens: int
    begun_at: float
    computed: int = 0
    block_ids: tuple[int, ...] = ()
    generation: int = 0
    finished_at: float | None = None
    abandoned: bool = False
    blocks_released: bool = False
    pairing: AnyPairing | None = None
    parcel_blocks: int = 1
    parcels: list[Parcel] = field(default_factory=list)
    claim: Claim | None = None
    claimant: str | None = None
    first_block: int = 0
    digests: bool = False
    lease: Lease | None = None
    wait_until: float | None = None
    gone: GoneReason | None = None

    @property
    def blocks(self) -> int:
        return sum(parcel.blocks for parcel in self.parcels)

    @property
    def packed(self) -> bool:
        """Whether every parcel has been packed, or read where it lay, so that vLLM's blocks are no longer needed."""
        return self.pairing is not None and not any(p.needs_blocks for p in self.parcels)

    @property
    def in_place(self) -> bool:
        """Whether its parcels are read in vLLM's cache (mode direct)."""
        return isinstance(self.pairing, DirectPairing)

    @property
    def completed(self) -> bool:
        return self.pairing is not None and all(p.state.ended for p in self.parcels)
