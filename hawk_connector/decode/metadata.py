"""What the decode scheduler tells its worker each step, and what the worker tells at start.  Plain, picklable."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from ..plan.pairing import DecodeFacts
from ..protocol.decode_actions import PeerOutcome
from ..protocol.ticket import Ticket
from ..series import Failure

__all__ = ["DecodeFeedback", "DecodeHandshake", "DecodeStep", "LoadRequest", "RefusedLoad"]


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """Load a claimed transfer's blocks ``first_block`` and up into vLLM's ``block_ids``, the last ``left_out`` not."""

    request: str
    ticket: Ticket
    first_block: int
    block_ids: tuple[int, ...]
    left_out: int = 0


@dataclass(frozen=True, slots=True)
class RefusedLoad:
    """A load that failed before it began and that vLLM's failure policy must decide on."""

    request: str
    block_ids: tuple[int, ...]
    failure: Failure
    reason: str


@dataclass(slots=True)
class DecodeStep:
    """One step.  ``admissions``: requests that wait for a verdict, for the status report."""

    loads: list[LoadRequest] = field(default_factory=list)
    refused: list[RefusedLoad] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    admissions: int = 0

    def following(self, earlier: DecodeStep) -> DecodeStep:
        """This step with what an earlier one, which no worker has seen, had to say before it."""
        return replace(
            self,
            loads=[*earlier.loads, *self.loads],
            refused=[*earlier.refused, *self.refused],
            aborted=[*earlier.aborted, *self.aborted],
        )


@dataclass(frozen=True, slots=True)
class DecodeFeedback:
    """What the worker tells the scheduler after a step: how ranks did in loads, and whether this side drains."""

    outcomes: tuple[PeerOutcome, ...]
    draining: bool

    def following(self, earlier: DecodeFeedback) -> DecodeFeedback:
        """Both in one."""
        return DecodeFeedback((*earlier.outcomes, *self.outcomes), self.draining)


@dataclass(frozen=True, slots=True)
class DecodeHandshake:
    """The worker's life and facts, for the scheduler's own links."""

    epoch: str
    facts: DecodeFacts
    status_address: str
