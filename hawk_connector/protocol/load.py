"""One load as the decode worker sees it: the ranks that feed it and their parcels."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from ..plan.any_plan import Plan
from ..plan.pairing import AnyPairing
from ..series import Failure
from .lease import Resend
from .messages import Accepted, Claimed, Gone, Ready, Renewed
from .ticket import RankAddress, Ticket

__all__ = ["Fetch", "FetchState", "Load", "RankFetches", "about"]


class FetchState(Enum):
    AWAITED = auto()  # not offered yet
    OFFERED = auto()  # can be read
    READING = auto()
    READ = auto()  # read; Done is out
    ACCEPTED = auto()
    SKIPPED = auto()  # decode has these blocks

    @property
    def ended(self) -> bool:
        return self in (FetchState.ACCEPTED, FetchState.SKIPPED)


@dataclass(slots=True)
class Fetch:
    """One parcel of one rank: blocks ``first_block`` .. ``first_block + blocks`` of the transfer.

    ``plan``: what is read for it, once it is offered, from ``address`` on or wherever the plan says.
    """

    index: int
    first_block: int
    blocks: int
    state: FetchState = FetchState.AWAITED
    generation: int = 0
    address: int = 0
    digest: str = ""
    plan: Plan | None = None
    read_failed: bool = False
    done: Resend | None = None


@dataclass(slots=True)
class RankFetches:
    """What one prefill rank sends of a load.

    ``fetches`` is None until the rank has said how it cuts, ``pairing`` until the link with this life of it stands.
    ``judged``: its circuit has been told how it did.
    """

    rank: RankAddress
    pull: Resend | None = None
    fetches: list[Fetch] | None = None
    needless: bool = False
    judged: bool = False
    pairing: AnyPairing | None = None

    @property
    def complete(self) -> bool:
        return self.needless or (self.fetches is not None and all(f.state.ended for f in self.fetches))

    @property
    def wants_offers(self) -> bool:
        return self.fetches is None or any(f.state is FetchState.AWAITED for f in self.fetches)

    @property
    def all_read(self) -> bool:
        """Whether nothing but verdicts is awaited."""
        read = (FetchState.READ, FetchState.ACCEPTED, FetchState.SKIPPED)
        return self.fetches is not None and all(f.state in read for f in self.fetches)

    @property
    def reading(self) -> bool:
        return any(f.state is FetchState.READING for f in self.fetches or ())

    @property
    def read_failed(self) -> bool:
        return any(f.read_failed for f in self.fetches or ())


@dataclass(slots=True)
class Load:
    """A request's KV on its way into decode's blocks.

    ``block_ids``: decode's blocks for transfer blocks ``first_block`` and up; the transfer's last ``left_out`` blocks
    have none and are not read, though their parcels are taken off the rank's hands.  ``failure``: why it can no longer
    succeed; while reads of it run or a fence is awaited its blocks are in quarantine.  ``prefilled_at``: when the
    prefill request had ended, by decode's clock.
    """

    request: str
    ticket: Ticket
    first_block: int
    block_ids: tuple[int, ...]
    begun_at: float
    deadline: float
    renew_at: float
    ranks: list[RankFetches] = field(default_factory=list)
    failure: str | None = None
    failure_kind: Failure | None = None
    prefilled_at: float | None = None
    aborted: bool = False
    left_out: int = 0

    @property
    def complete(self) -> bool:
        return all(rank.complete for rank in self.ranks)


def about(
    ticket: Ticket, rank: RankAddress, address: str, message: Claimed | Ready | Renewed | Accepted | Gone
) -> bool:
    """Whether ``message``, which came from ``address``, answers the ticket's claim on this life of ``rank``."""
    return (
        rank.address == address
        and rank.epoch == message.epoch
        and ticket.transfer == message.transfer
        and ticket.claim == message.claim
    )
