"""A transfer of the prefill side as a snapshot."""

from __future__ import annotations

from collections.abc import Collection

from .snapshot import TransferSnapshot, clipped
from .transfer import ParcelState, Transfer

__all__ = ["prefill_snapshot"]

_ENDED = tuple(state for state in ParcelState if state.ended)


def prefill_snapshot(transfer: Transfer, now: float, request: str = "") -> TransferSnapshot:
    """``transfer`` at ``now`` (the protocol's clock); ``request`` is vLLM's id where it is known."""
    # Lists and not sets or counters: hashing an Enum is slow, and there may be hundreds of parcels.
    states = [parcel.state for parcel in transfer.parcels]
    ended = [parcel.nbytes for parcel in transfer.parcels if parcel.state in _ENDED]
    numbers = {state: states.count(state) for state in ParcelState}
    counts = ", ".join(f"{number} {state.name.lower()}" for state, number in numbers.items() if number)
    phase, waits_for = _phase(transfer, states)
    deadlines = [] if transfer.gone is not None else _deadlines(transfer)
    until, key = min(deadlines, default=(None, ""))
    return TransferSnapshot(
        transfer=transfer.id,
        request=clipped(request),
        phase=phase,
        peer=transfer.claim.epoch if transfer.claim is not None else "",
        age_s=max(0.0, now - transfer.begun_at),
        waits_for=waits_for,
        detail=f"{transfer.computed} of {transfer.tokens} tokens computed" + (f", parcels: {counts}" if counts else ""),
        parcels=len(states),
        parcels_done=len(ended),
        nbytes=sum(parcel.nbytes for parcel in transfer.parcels),
        nbytes_done=sum(ended),
        deadline=key,
        deadline_in_s=None if until is None else until - now,
    )


def _phase(transfer: Transfer, states: Collection[ParcelState]) -> tuple[str, str]:
    """(phase, what it waits for); ``states`` of its parcels."""
    if transfer.gone is not None:
        return "ending", f"vLLM's blocks to be given back (it ended: {transfer.gone})"
    if transfer.finished_at is None:
        return "computing", "vLLM to compute the prompt"
    if transfer.pairing is None:
        return "unpaired", "a decode side, to pack for its layout"
    if ParcelState.PACKING in states:
        return "packing", "the packer"
    if ParcelState.QUEUED in states:
        return "queued", "space in the send buffer"
    if ParcelState.WAITING in states:
        return "waiting", "its tokens to be computed again"
    if transfer.claim is None:
        return "offered", "a decode side's Pull"
    if transfer.claimant is None:
        return "claimed", "the claimant's vLLM to give the request blocks"
    return "delivering", "Done from the claimant"


def _deadlines(transfer: Transfer) -> list[tuple[float, str]]:
    found = [(transfer.lease.until, "lease_s")] if transfer.lease is not None else []
    if transfer.wait_until is not None and not transfer.packed:
        found.append((transfer.wait_until, "buffer_wait_s"))
    return found
