"""TransferSnapshot: one transfer or load at one moment, as status pages and the watchdog show it."""

from __future__ import annotations

from typing import Annotated

import msgspec

__all__ = ["TransferSnapshot", "clipped", "describe"]

_WORD = 256
_LINE = 1024

Word = Annotated[str, msgspec.Meta(max_length=_WORD)]
Line = Annotated[str, msgspec.Meta(max_length=_LINE)]


class TransferSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """``phase`` is one word, ``waits_for`` a clause.  ``peer``: whom it is with, empty while that is not known.

    ``parcels``, ``nbytes``: of the whole, 0 while it is not cut; ``..._done``: accepted or not needed.  ``detail`` is
    all else that changes when it moves.  ``deadline``: the configuration key that ends it if nothing moves, and
    ``deadline_in_s`` when; None where only something else's deadline does.  ``still_s``: since it last moved.
    """

    transfer: Word
    phase: Word
    age_s: float
    request: Word = ""
    peer: Line = ""
    waits_for: Line = ""
    detail: Line = ""
    parcels: int = 0
    parcels_done: int = 0
    nbytes: int = 0
    nbytes_done: int = 0
    deadline: Word = ""
    deadline_in_s: float | None = None
    still_s: float = 0.0

    @property
    def mark(self) -> tuple[str | int, ...]:
        """What two looks at a transfer that has not moved have in common."""
        return (self.phase, self.detail, self.peer, self.parcels, self.parcels_done)


def clipped(text: str, limit: int = _WORD) -> str:
    """``text`` as a message can carry it: of at most ``limit`` characters, and none that has no UTF-8."""
    short = text if len(text) <= limit else text[: limit - 3] + "..."
    return short.encode("utf-8", "replace").decode("utf-8")


def describe(snapshot: TransferSnapshot) -> str:
    """The snapshot in one line, without the ids."""
    words = [f"{snapshot.phase}, begun {snapshot.age_s:.1f} s ago"]
    if snapshot.waits_for:
        words.append(f"waits for {snapshot.waits_for}")
    if snapshot.parcels:
        words.append(f"{snapshot.parcels_done} of {snapshot.parcels} parcels done")
    if snapshot.detail:
        words.append(snapshot.detail)
    if snapshot.deadline_in_s is not None:
        words.append(f"{snapshot.deadline} ends it in {max(0.0, snapshot.deadline_in_s):.1f} s")
    return ", ".join(words)
