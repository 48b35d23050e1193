"""A load of the decode side as a snapshot."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from .load import FetchState, Load, RankFetches
from .snapshot import TransferSnapshot, clipped

__all__ = ["load_snapshot"]

_ENDED = tuple(state for state in FetchState if state.ended)


def load_snapshot(load: Load, now: float) -> TransferSnapshot:
    """``load`` at ``now`` (the protocol's clock)."""
    # Lists and not sets or counters: hashing an Enum is slow, and there may be hundreds of parcels.
    states = [fetch.state for rank in load.ranks for fetch in rank.fetches or ()]
    numbers = {state: states.count(state) for state in FetchState}
    counts = ", ".join(f"{number} {state.name.lower()}" for state, number in numbers.items() if number)
    sizes = [size for rank in load.ranks for size in _parcel_bytes(rank, load.ticket.tokens)]
    ended = [size for size, state in zip(sizes, states, strict=True) if state in _ENDED]
    phase, waits_for = _phase(load, states)
    failed = load.failure is not None
    return TransferSnapshot(
        transfer=load.ticket.transfer,
        request=clipped(load.request),
        phase=phase,
        peer=clipped(", ".join(rank.rank.address for rank in load.ranks), 1024),
        age_s=max(0.0, now - load.begun_at),
        waits_for=clipped(waits_for, 1024),
        detail=f"{len(load.block_ids)} blocks" + (f", parcels: {counts}" if counts else ""),
        parcels=len(states),
        parcels_done=len(ended),
        nbytes=sum(sizes),
        nbytes_done=sum(ended),
        # What has failed waits for its reads, which their own time-out ends, and for the fence.
        deadline="transfer_timeout_s" if failed else "load_deadline_s",
        deadline_in_s=None if failed else load.deadline - now,
    )


def _parcel_bytes(rank: RankFetches, tokens: int) -> list[int]:
    """Bytes of each of the rank's parcels.  A plan takes time, and all parcels but the last have one size."""
    fetches = rank.fetches or []
    if rank.pairing is None or not fetches:
        return [0] * len(fetches)
    first, last = (rank.pairing.parcel(f.first_block, f.blocks, tokens).nbytes for f in (fetches[0], fetches[-1]))
    return [first] * (len(fetches) - 1) + [last]


def _phase(load: Load, states: Collection[FetchState]) -> tuple[str, str]:
    """(phase, what it waits for); ``states`` of its parcels."""
    ranks = [rank for rank in load.ranks if not rank.complete]
    if load.failure is not None:
        why = clipped(load.failure, 512)
        if any(rank.reading for rank in load.ranks):
            return "quarantined", f"reads that run (it failed: {why})"
        return "quarantined", f"the fence (it failed: {why})"
    unpaired = [rank.rank.address for rank in ranks if rank.pairing is None]
    if unpaired:
        return "connecting", f"a pairing with {_some(unpaired)}"
    silent = [rank.rank.address for rank in ranks if rank.fetches is None]
    if silent:
        return "pulling", f"Claimed from {_some(silent)}"
    if FetchState.READING in states:
        return "reading", "reads that run"
    if FetchState.OFFERED in states:
        return "offered", "a reader that is free"
    if FetchState.AWAITED in states:
        return "awaiting", "parcels that the prefill side has not packed"
    return "confirming", "Accepted from the prefill side"


def _some(addresses: Iterable[str]) -> str:
    known = sorted(set(addresses))
    return ", ".join(known[:4]) + (f" and {len(known) - 4} more" if len(known) > 4 else "")
