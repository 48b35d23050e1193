"""What the prefill scheduler tells its workers each step, and what the workers tell at start.  Plain, picklable."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["BeginTransfer", "PrefillStep", "RankHandshake", "RequestProgress"]


@dataclass(frozen=True, slots=True)
class BeginTransfer:
    """A request whose KV is wanted elsewhere: its transfer, the digest of its prompt and the prompt's tokens."""

    request: str
    transfer: str
    digest: str
    tokens: int


@dataclass(frozen=True, slots=True)
class RequestProgress:
    """After this step the first ``tokens`` tokens of the request are in ``block_ids`` (vLLM's blocks, in order)."""

    request: str
    tokens: int
    block_ids: tuple[int, ...]


@dataclass(slots=True)
class PrefillStep:
    """One step.

    ``preempted`` and ``reset`` take effect before it, ``progress``, ``finished`` and ``abandoned`` after it.
    """

    begun: list[BeginTransfer] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    progress: list[RequestProgress] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)
    abandoned: list[str] = field(default_factory=list)
    reset: bool = False


@dataclass(frozen=True, slots=True)
class RankHandshake:
    """Where one prefill rank listens, and which life it is."""

    address: str
    epoch: str
