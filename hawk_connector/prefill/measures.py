"""What is read off a prefill rank's protocol: gauges, and what its peers are."""

from __future__ import annotations

from ..errors import Mismatch
from ..plan.pairing import AnyPairing
from ..protocol.messages import PairingStatus
from ..protocol.prefill import PrefillProtocol
from ..protocol.snapshot import clipped

__all__ = ["peer_detail", "peer_states", "prefill_gauges", "prefill_pairings"]


def prefill_gauges(protocol: PrefillProtocol, connections: int) -> dict[str, int | dict[str, int]]:
    """Values for ``TransferLog.set_gauges``; ``connections`` of the side channel."""
    held = protocol.held()
    states = [link for link, _ in peer_states(protocol).values()]
    return {
        "leases": held["leases"],
        "regions": held["regions"],
        "waiting": held["parcels_queued"],
        "transfers_live": held["transfers"],
        "requests_held": held["requests_with_blocks"],
        "send_buffer_used_bytes": held["region_bytes"],
        "send_buffer_bytes": protocol.facts.send_buffer_bytes,
        "peers": {state: states.count(state) for state in ("paired", "refused")},
        "draining": int(protocol.draining),
        "connections": connections,
        # Decode sides come by themselves, so that none is there does not make this side unready.
        "ready": int(not protocol.draining),
    }


def peer_states(protocol: PrefillProtocol) -> dict[str, tuple[str, str]]:
    """(state of the pairing, of the circuit) of each decode side; prefill has no circuits."""
    return {
        epoch: ("refused" if isinstance(verdict, tuple) else "paired", "closed")
        for epoch, verdict in protocol.peers().items()
    }


def peer_detail(protocol: PrefillProtocol, epoch: str) -> str:
    """A decode side in words: its layout, or why it is refused."""
    return _detail(protocol.peers()[epoch])


def prefill_pairings(protocol: PrefillProtocol) -> list[PairingStatus]:
    """The decode sides as a status shows them."""
    verdicts = protocol.peers()
    return [
        PairingStatus(epoch, link, _detail(verdicts[epoch]), circuit)
        for epoch, (link, circuit) in peer_states(protocol).items()
    ]


def _detail(verdict: AnyPairing | tuple[Mismatch, ...]) -> str:
    if isinstance(verdict, tuple):
        return clipped("; ".join(str(mismatch) for mismatch in verdict), 1024)
    return verdict.detail
