"""What the decode scheduler tells its worker each step, and what the worker tells at start.  Plain, picklable."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..plan.pairing import DecodeFacts
from ..protocol.ticket import Ticket

__all__ = ["DecodeHandshake", "DecodeStep", "LoadRequest", "RefusedLoad"]


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """Load a claimed transfer's blocks ``first_block`` and up into vLLM's ``block_ids``."""

    request: str
    ticket: Ticket
    first_block: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RefusedLoad:
    """A load that failed before it began and that vLLM's failure policy must decide on."""

    request: str
    block_ids: tuple[int, ...]
    reason: str


@dataclass(slots=True)
class DecodeStep:
    """One step.  ``admissions``: requests that wait for a verdict, for the status report."""

    loads: list[LoadRequest] = field(default_factory=list)
    refused: list[RefusedLoad] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    admissions: int = 0


@dataclass(frozen=True, slots=True)
class DecodeHandshake:
    """The worker's life and facts, for the scheduler's own links."""

    epoch: str
    facts: DecodeFacts
    status_address: str
