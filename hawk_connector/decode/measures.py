"""What is read off a decode worker's protocol: gauges, what its peers are, and which of them cannot be served."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from ..protocol.circuit import CircuitState
from ..protocol.decode import DecodeProtocol
from ..protocol.link import LinkState, PeerLink
from ..protocol.messages import PairingStatus
from ..protocol.snapshot import clipped

__all__ = ["decode_gauges", "decode_pairings", "link_detail", "link_states", "unserved"]


def decode_gauges(
    protocol: DecodeProtocol, block_bytes: int, *, admissions: int, connections: int, draining: bool, ready: bool
) -> dict[str, int | dict[str, int]]:
    """Values for ``TransferLog.set_gauges``.

    ``block_bytes``: of one block on all chips; ``admissions`` of the scheduler, ``connections`` of the side channel.
    """
    held = protocol.held()
    links = protocol.links.values()
    return {
        "waiting": held["loads"],
        "transfers_live": held["loads"],
        "reads": held["reads"],
        "quarantined": held["quarantined_blocks"],
        "quarantined_bytes": held["quarantined_blocks"] * block_bytes,
        "fences_awaited": held["fences"],
        "admissions": admissions,
        "peers": Counter(link.state.value for link in links),
        "circuits": Counter(link.circuit.state.value for link in links),
        "draining": int(draining),
        "connections": connections,
        "ready": int(ready),
    }


def link_states(protocol: DecodeProtocol) -> dict[str, tuple[str, str]]:
    """(state of the link, of the circuit) of each prefill rank."""
    return {address: (link.state.value, link.circuit.state.value) for address, link in protocol.links.items()}


def link_detail(link: PeerLink) -> str:
    """A prefill rank in words."""
    return clipped("; ".join(text for text in (link.detail, link.circuit.detail) if text), 1024)


def decode_pairings(protocol: DecodeProtocol) -> list[PairingStatus]:
    """The prefill ranks as a status shows them."""
    return [
        PairingStatus(link.address, link.state.value, link_detail(link), link.circuit.state.value)
        for link in protocol.links.values()
    ]


def unserved(protocol: DecodeProtocol, peers: Iterable[str]) -> list[str]:
    """Why those of ``peers`` that cannot be served now cannot: not paired, or their circuit is open.

    A half-open circuit is no reason: only traffic can close it.
    """
    reasons: list[str] = []
    for peer in peers:
        link = protocol.links.get(peer)
        if link is None:
            continue
        if link.state is not LinkState.PAIRED:
            reasons.append(f"{peer} is {link.state.value}" + (f": {link.detail}" if link.detail else ""))
        elif link.circuit.state is CircuitState.OPEN:
            reasons.append(f"the circuit of {peer} is open: it {link.circuit.detail}")
    return [clipped(reason, 1024) for reason in reasons]
