"""The NPU under the decode side: driver, chips, bank windows, and what a network card needs to reach them.

Facts about tt-kmd: /sys/module/tenstorrent, /dev/tenstorrent/N, and for each node /sys/class/tenstorrent/tenstorrent!N
with the PCI device behind it; /proc/driver/tenstorrent/N/pids lists who has it open.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from .findings import Need, Outcome, failed, passed, unknown
from .machine import Machine
from .needs import Needs

__all__ = ["BankWindows", "BarSizes", "DmaBuf", "Hugepages", "Iommu", "NpuChips", "NpuDriver", "PeerMemory"]

_GIB = 1 << 30
_WINDOW = 4 * _GIB
_OLDEST_DRIVER = (2, 0, 0)
_OLDEST_EXPORTER = (2, 10, 0)
_CHIPS = {0x401E: "Wormhole", 0xB140: "Blackhole"}

_LOAD = "Install tt-kmd and load it: modprobe tenstorrent."
_BIG_BARS = "In the firmware's setup enable 'above 4G decoding' and large BARs (resizable BAR)."

# PCI driver of a network card -> the RDMA driver beside it that can register a dma-buf.
_DMA_BUF_DRIVERS = {
    "mlx5_core": "mlx5_ib",
    "ice": "irdma",
    "i40e": "irdma",
    "idpf": "irdma",
    "bnxt_en": "bnxt_re",
    "mana": "mana_ib",
}


@dataclass(frozen=True, slots=True)
class Chip:
    """One device node.  ``bars``: bytes of each BAR, by its number, 0 where it is not mapped."""

    number: int
    device_id: int | None
    bars: tuple[int, ...]
    users: tuple[str, ...]

    @property
    def kind(self) -> str:
        return _CHIPS.get(self.device_id or 0, "unknown chip")

    @property
    def windows(self) -> int:
        """Windows as large as a DRAM channel: as many as whole ones fit BAR4 (eight in full)."""
        return self.bars[4] // _WINDOW if self.kind == "Blackhole" and len(self.bars) > 4 else 0


def chips_of(machine: Machine) -> list[Chip]:
    """The chips that have a node, by number."""
    found = []
    for number in sorted(int(name) for name in machine.names("dev/tenstorrent") if name.isdecimal()):
        place = f"sys/class/tenstorrent/tenstorrent!{number}/device"
        device = machine.text(f"{place}/device")
        bars = []
        for line in (machine.text(f"{place}/resource") or "").splitlines()[:6]:
            start, end, _ = (int(word, 16) for word in line.split())
            bars.append(end - start + 1 if end else 0)
        users = (machine.text(f"proc/driver/tenstorrent/{number}/pids") or "").split()
        found.append(Chip(number, int(device, 16) if device else None, tuple(bars), tuple(users)))
    return found


def chips_in_use(chips: list[Chip], needs: Needs) -> list[Chip]:
    """Those whose nodes the configuration names; all where it names none."""
    return [chip for chip in chips if not needs.nodes or f"/dev/tenstorrent/{chip.number}" in needs.nodes]


def iommu_kinds(machine: Machine, chips: list[Chip]) -> list[str]:
    """Type of each chip's IOMMU group: "DMA", "DMA-FQ", "identity" and others; empty where it is in none."""
    places = (f"sys/class/tenstorrent/tenstorrent!{chip.number}/device/iommu_group/type" for chip in chips)
    return [machine.text(place) or "" for place in places]


def driver_version(machine: Machine) -> tuple[int, int, int] | None:
    """The loaded tt-kmd's version; None where it is not loaded or says nothing that can be read."""
    numbers = re.match(r"(\d+)\.(\d+)\.(\d+)", machine.text("sys/module/tenstorrent/version") or "")
    return (int(numbers[1]), int(numbers[2]), int(numbers[3])) if numbers else None


def size_text(nbytes: int) -> str:
    for unit, name in ((_GIB, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.4g} {name}"
    return f"{nbytes} B"


class _OfTheNpu:
    """Points that only a decode side on real chips depends on."""

    def need(self, needs: Needs) -> Need | None:
        if needs.side != "decode":
            return None
        return Need.REQUIRED if needs.silicon else Need.NONE


class _OfTheDirectPath:
    """Points that only reads into bank windows depend on."""

    def need(self, needs: Needs) -> Need | None:
        if needs.side != "decode":
            return None
        return Need.REQUIRED if needs.direct else Need.NONE


class NpuDriver(_OfTheNpu):
    name = "NPU driver"

    def look(self, machine: Machine, needs: Needs) -> Outcome:
        if "tenstorrent" not in machine.names("sys/module"):
            return failed("tt-kmd is not loaded", _LOAD)
        version = driver_version(machine)
        text = machine.text("sys/module/tenstorrent/version")
        if version is None:
            return unknown(f"a module tenstorrent whose version is {text or 'not told'}")
        if version < _OLDEST_DRIVER:
            return failed(f"tt-kmd {text}", "Upgrade tt-kmd to 2.0.0 or newer; older ones speak another interface.")
        return passed(f"tt-kmd {text}")


class NpuChips(_OfTheNpu):
    name = "NPU chips"

    def look(self, machine: Machine, needs: Needs) -> Outcome:
        chips = chips_of(machine)
        if not chips:
            return failed("no node in /dev/tenstorrent", f"{_LOAD} Then look with `lspci -d 1e52:` for the cards.")
        found = ", ".join(f"/dev/tenstorrent/{chip.number} {chip.kind}" for chip in chips)
        closed = [chip.number for chip in chips if not machine.may_use(f"dev/tenstorrent/{chip.number}")]
        if closed:
            return failed(
                f"{found}; no permission for {', '.join(map(str, closed))}",
                "Add this user to the nodes' group or install tt-kmd's udev rule; pass the nodes into a container.",
            )
        missing = [node for node in needs.nodes if node not in [f"/dev/tenstorrent/{chip.number}" for chip in chips]]
        if missing:
            return failed(f"{found}; not {', '.join(missing)}", "Name nodes that are there in landing.device_nodes.")
        if len(chips) < needs.chips:
            return failed(f"{found}; {needs.chips} are configured", "Configure fewer chips, or add cards.")
        if needs.direct and not needs.nodes:
            return failed(
                f"{found}; none is named", "The direct path needs landing.device_nodes, in TTNN's order of chips."
            )
        others = [chip for chip in chips_in_use(chips, needs) if chip.kind != "Blackhole"]
        if needs.direct and others:
            return failed(found, "The direct path needs Blackhole. Set npu.config.landing.path to bounce.")
        return passed(found)


class BankWindows(_OfTheDirectPath):
    """One window of 4 GiB for each bank: counted from BAR4; who has a chip open may hold some of them."""

    name = "bank windows"

    def look(self, machine: Machine, needs: Needs) -> Outcome:
        chips = chips_in_use(chips_of(machine), needs)
        if not chips:
            return failed("no chip", _LOAD)
        found = ", ".join(f"chip {chip.number}: {chip.windows}" for chip in chips)
        users = ", ".join(f"chip {chip.number}: {' '.join(chip.users)}" for chip in chips if chip.users)
        text = f"windows of 4 GiB: {found}" + (f"; processes that may hold some: {users}" if users else "")
        if any(chip.windows < needs.banks for chip in chips):
            return failed(
                f"{text}; each chip needs {needs.banks}",
                "Wormhole has none: set npu.config.landing.path to bounce."
                if not any(c.windows for c in chips)
                else _BIG_BARS,
            )
        return passed(text)


class BarSizes(_OfTheDirectPath):
    name = "BAR sizes"

    def look(self, machine: Machine, needs: Needs) -> Outcome:
        chips = chips_in_use(chips_of(machine), needs)
        if not chips:
            return failed("no chip", _LOAD)
        if any(not chip.bars for chip in chips):
            return unknown("the PCI device of a chip lists no resources")
        found = "; ".join(
            f"chip {chip.number}: "
            + ", ".join(f"BAR{number} {size_text(size)}" for number, size in enumerate(chip.bars) if size)
            for chip in chips
        )
        small = [chip for chip in chips if chip.kind == "Blackhole" and chip.windows < needs.banks]
        return failed(found, _BIG_BARS) if small else passed(found)


class Hugepages(_OfTheNpu):
    """Tenstorrent's user-mode driver keeps its buffers in pages of 1 GiB, one a chip, where no IOMMU translates.

    An IOMMU that is on but lets the chip through (iommu=pt) does not: only groups of a type DMA or DMA-FQ count.
    """

    name = "hugepages"

    def look(self, machine: Machine, needs: Needs) -> Outcome:
        kinds = iommu_kinds(machine, chips_in_use(chips_of(machine), needs))
        if kinds and all(kind.startswith("DMA") for kind in kinds):
            return passed("not needed: an IOMMU translates")
        count = machine.text("sys/kernel/mm/hugepages/hugepages-1048576kB/nr_hugepages")
        if count is None:
            return failed("no pages of 1 GiB on this machine", "Boot with hugepagesz=1G hugepages=N, N chips.")
        if int(count) < needs.chips:
            return failed(
                f"{count} pages of 1 GiB for {needs.chips} of the chips",
                "Run Tenstorrent's hugepages-setup, or boot with hugepagesz=1G hugepages=N.",
            )
        return passed(f"{count} pages of 1 GiB")


class Iommu:
    """A network card's write to a BAR that an IOMMU translates goes by way of the root complex."""

    name = "IOMMU"

    def need(self, needs: Needs) -> Need | None:
        if needs.side != "decode":
            return None
        return Need.ADVISED if needs.direct else Need.NONE

    def look(self, machine: Machine, needs: Needs) -> Outcome:
        groups = len(machine.names("sys/kernel/iommu_groups"))
        if not groups:
            return passed("off")
        kinds = {kind for kind in iommu_kinds(machine, chips_of(machine)) if kind}
        text = f"on, {groups} groups" + (f", chips in groups of type {', '.join(sorted(kinds))}" if kinds else "")
        if any(kind != "identity" for kind in kinds):
            return failed(text, "Boot with iommu=pt, so that writes from card to card need not be translated.")
        return passed(text)


class PeerMemory:
    """Mooncake registers host addresses.  Those of a window have no pages, so the RDMA core must ask hawk_peermem."""

    name = "peer memory"

    def need(self, needs: Needs) -> Need | None:
        if needs.side != "decode":
            return None
        return Need.REQUIRED if needs.direct and needs.rdma else Need.NONE

    def look(self, machine: Machine, needs: Needs) -> Outcome:
        clients = machine.names("sys/kernel/mm/memory_peers")
        core = machine.text("sys/module/hawk_peermem/state/peer_memory_core")
        version = machine.text("sys/module/hawk_peermem/version")
        if core is None and version is None and "hawk_peermem" not in machine.names("sys/module"):
            text = f"hawk_peermem is not loaded; clients: {', '.join(clients) or 'none'}"
            return failed(text, "Build and load it (kmod/), on a kernel whose RDMA core takes peer-memory clients.")
        name = f"hawk_peermem {version or ''}".strip()
        if core != "registered" and "hawk_peermem" not in clients:
            return failed(
                f"{name} is loaded, but this kernel's RDMA core takes no peer-memory clients",
                "Install MLNX_OFED or DOCA-OFED, or a kernel that has the interface (Ubuntu's).",
            )
        regions = machine.text("sys/module/hawk_peermem/state/regions")
        return passed(f"{name} is registered" + (f", {regions} regions" if regions else ""))


class DmaBuf:
    """The mainline way to the windows.  No engine that HAWK has takes it yet, so nothing can depend on it."""

    name = "dma-buf"

    def need(self, needs: Needs) -> Need | None:
        return Need.NONE if needs.side == "decode" else None

    def look(self, machine: Machine, needs: Needs) -> Outcome:
        version = driver_version(machine)
        exporter = version is not None and version >= _OLDEST_EXPORTER
        modules = set(machine.names("sys/module"))
        cards = {
            card: _DMA_BUF_DRIVERS.get(machine.link(f"sys/class/infiniband/{card}/device/driver") or "")
            for card in machine.names("sys/class/infiniband")
        }
        importers = sorted(card for card, module in cards.items() if module in modules)
        text = (
            f"the NPU's driver {'exports' if exporter else 'does not export'} windows, RDMA devices that import them: "
            f"{', '.join(importers) or 'none'}; Mooncake's Python interface takes none"
        )
        return passed(text) if exporter and importers else failed(text, "Use tt-kmd 2.10 or newer.")
