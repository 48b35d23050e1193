"""The host: memory, clock, ports, peers, keys, and what no look from here can tell."""

from __future__ import annotations

from pathlib import Path

from hawk_connector.address import Address, is_loopback
from hawk_connector.config import DecodeConfig, PrefillConfig
from hawk_connector.errors import ConfigError
from hawk_connector.transport.curve import load_curve_keys

from .findings import Need, Outcome, failed, passed, unknown
from .machine import Machine
from .needs import Needs
from .npu import size_text

__all__ = ["Clock", "CurveKeyFiles", "Firewall", "Memory", "Peers", "Ports"]


class Memory:
    """The send buffer is taken in one piece when a rank starts (in GPU memory where RDMA reads it from there)."""

    name = "memory"

    def need(self, needs: Needs) -> Need | None:
        return Need.REQUIRED if needs.side == "prefill" else None

    def look(self, machine: Machine, needs: Needs) -> Outcome:
        assert isinstance(needs.hawk, PrefillConfig)
        wanted = needs.hawk.send_buffer_bytes
        for line in (machine.text("proc/meminfo") or "").splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
                text = f"{size_text(available)} available, send buffer {size_text(wanted)} on each rank"
                if available < wanted:
                    return failed(text, "Lower send_buffer_bytes, or stop what holds the memory.")
                return passed(text)
        return unknown("/proc/meminfo does not tell what is available")


class Clock:
    """Deadlines do not depend on it (they are spans of one machine's own clock), but reports of both sides do."""

    name = "clock"

    def need(self, needs: Needs) -> Need | None:
        return Need.ADVISED

    def look(self, machine: Machine, needs: Needs) -> Outcome:
        state = machine.clock()
        if state is None:
            return unknown("the C library has no adjtimex")
        if not state.synchronised:
            return failed(
                "no time service keeps it right",
                "Run chrony or systemd-timesyncd on both sides: otherwise their reports' times cannot be compared.",
            )
        return passed(f"synchronised, error about {state.error_s * 1e3:.3g} ms")


class Ports:
    """Whether what this side is to listen on is free."""

    name = "ports"

    def need(self, needs: Needs) -> Need | None:
        return Need.REQUIRED if needs.ports else None

    def look(self, machine: Machine, needs: Needs) -> Outcome:
        text, taken = [], False
        for key, host, port in needs.ports:
            error = machine.bind_error(host, port)
            taken |= error is not None
            text.append(f"{key} {Address(host, port)}: {error or 'free'}")
        if taken:
            return failed(
                "; ".join(text), "`ss -ltnp` names who listens there. If it is this deployment, running, all is well."
            )
        return passed("; ".join(text))


class Peers:
    """Whether the prefill sides that decode is to pair with at start answer."""

    name = "peers"

    def need(self, needs: Needs) -> Need | None:
        return Need.ADVISED if isinstance(needs.hawk, DecodeConfig) and needs.hawk.peers else None

    def look(self, machine: Machine, needs: Needs) -> Outcome:
        assert isinstance(needs.hawk, DecodeConfig)
        text, silent = [], False
        for peer in needs.hawk.peers:
            address = Address.parse(peer)
            error = machine.connect_error(address.host, address.port)
            silent |= error is not None
            text.append(f"{peer}: {error or 'answers'}")
        if silent:
            return failed("; ".join(text), "Start the prefill side; if it runs, look for a firewall between the two.")
        return passed("; ".join(text))


class CurveKeyFiles:
    """The side channel's keys: files, permissions, and a listed key for each prefill side that is connected to."""

    name = "keys"

    def need(self, needs: Needs) -> Need | None:
        return Need.REQUIRED if needs.hawk.uses_curve else Need.NONE

    def look(self, machine: Machine, needs: Needs) -> Outcome:
        hawk = needs.hawk
        if not hawk.uses_curve:
            return failed("none: the side channel listens on loopback alone", "")
        try:
            keys = load_curve_keys(_below(machine, hawk.curve_key_file), _below(machine, hawk.curve_known_keys_file))
            assert keys is not None
            if isinstance(hawk, DecodeConfig):
                for peer in hawk.peers:
                    keys.key_of(Address.parse(peer))
        except ConfigError as error:
            return failed(
                error.what + (f": {error.got}" if error.got else ""), error.fix or "Write them again: `hawk keys`."
            )
        return passed(f"{hawk.curve_key_file}, {hawk.curve_known_keys_file}")


def _below(machine: Machine, path: str | None) -> str | None:
    """``path`` below the machine's root, where it is absolute."""
    if path is None or not Path(path).is_absolute():
        return path
    return str(machine.root / Path(path).relative_to("/"))


class Firewall:
    """Mooncake listens on every interface and asks nobody for a key; only a firewall guards the KV."""

    name = "firewall"

    def need(self, needs: Needs) -> Need | None:
        apart = needs.hawk.protocol == "local" or is_loopback(needs.hawk.peer_host)
        return Need.NONE if apart else Need.ADVISED

    def look(self, machine: Machine, needs: Needs) -> Outcome:
        lowest = machine.environment.get("MC_MIN_RPC_PORT", "15000")
        highest = machine.environment.get("MC_MAX_RPC_PORT", "17000")
        return unknown(
            f"Mooncake's ports {lowest}-{highest}",
            "Let a firewall keep them to the two machines: whoever reaches them can read the send buffer.",
        )
