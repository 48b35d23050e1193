"""What a check can find, and what a check is."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from .machine import Machine
from .needs import Needs

__all__ = ["Check", "Finding", "Need", "Outcome", "Status", "examine", "failed", "passed", "unknown"]


class Status(str, Enum):
    """The verdict on one point."""

    PASS = "pass"
    FAIL = "fail"
    NOT_APPLICABLE = "not applicable"
    UNKNOWN = "could not check"


class Need(Enum):
    """How much a configuration depends on a point."""

    REQUIRED = 0  # without it the configuration does not work
    ADVISED = 1  # without it something is slower, or harder to read
    NONE = 2


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a look at the machine gave; ``mend`` says what to do, empty where nothing is to be done."""

    status: Status
    found: str
    mend: str = ""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report.  ``side``: prefill, decode, or both where both sides found the same."""

    name: str
    side: str
    status: Status
    required: bool
    found: str
    mend: str

    @property
    def sick(self) -> bool:
        """Whether the configuration cannot work like this."""
        return self.status is Status.FAIL and self.required


class Check(Protocol):
    """One point.  ``look`` may raise OSError where the machine does not let it look."""

    @property
    def name(self) -> str: ...

    def need(self, needs: Needs) -> Need | None:
        """How much ``needs`` depends on it; None where the point has no meaning on that side."""
        ...

    def look(self, machine: Machine, needs: Needs) -> Outcome: ...


def passed(found: str) -> Outcome:
    return Outcome(Status.PASS, found)


def failed(found: str, mend: str) -> Outcome:
    return Outcome(Status.FAIL, found, mend)


def unknown(found: str, mend: str = "") -> Outcome:
    return Outcome(Status.UNKNOWN, found, mend)


def examine(check: Check, machine: Machine, needs: Needs) -> Finding | None:
    """The finding of one check for one side, None where the point has no meaning there.

    What a configuration does not need cannot fail: a machine that lacks it is told as not applicable.
    """
    need = check.need(needs)
    if need is None:
        return None
    try:
        outcome = check.look(machine, needs)
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        outcome = unknown(f"{place}{error.strerror or error}", "Run `hawk doctor` as a user that may look there.")
    if need is Need.NONE and outcome.status in (Status.FAIL, Status.UNKNOWN):
        outcome = Outcome(Status.NOT_APPLICABLE, outcome.found)
    return Finding(check.name, needs.side, outcome.status, need is Need.REQUIRED, outcome.found, outcome.mend)
