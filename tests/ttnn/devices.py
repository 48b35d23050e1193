"""Devices that need no hardware, as the environment that TTNN finds them by.

A *mock* device is a cluster descriptor: TTNN's allocator and bank tables work, memory does not.  A *simulated* device
is a process of wolfpine's, with memory in every bank and processors that run kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

__all__ = ["DEVICES", "SIMULATOR_PID", "Device"]


@dataclass(frozen=True)
class Device:
    """``catalog``: name in HAWK's catalog.  ``prepare``: writes what TTNN reads into a folder, returns environment.

    ``prepare`` is given the folder and the site-packages of the environment with TTNN and wolfpine.
    """

    catalog: str
    chips: int
    prepare: Callable[[Path, Path], dict[str, str]]


def _mock(arch: str, board: str, chips: int = 1, dram_harvested: int = 0) -> Callable[[Path, Path], dict[str, str]]:
    """``dram_harvested``: mask of the DRAM channels that the part lacks."""

    def prepare(folder: Path, site: Path) -> dict[str, str]:
        path = folder / "cluster.yaml"
        path.write_text(yaml.safe_dump(_cluster(arch, board, chips, dram_harvested), sort_keys=False))
        return {"TT_METAL_MOCK_CLUSTER_DESC_PATH": str(path)}

    return prepare


def _cluster(arch: str, board: str, chips: int, dram_harvested: int) -> dict[str, Any]:
    """A cluster descriptor as UMD reads it: ``chips`` cards of one chip each, neighbours joined by two links."""
    blackhole = arch == "blackhole"
    links = [
        [{"chip": left, "chan": 8 + lane}, {"chip": left + 1, "chan": lane}]
        for left in range(chips - 1)
        for lane in (0, 1)
    ]
    harvesting = {
        "noc_translation": True,
        "harvest_mask": 0,
        "dram_harvesting_mask": dram_harvested,
        "eth_harvesting_mask": 0x120 if blackhole else 0,
        "pcie_harvesting_mask": 2 if blackhole else 0,
    }
    return {
        "arch": dict.fromkeys(range(chips), arch),
        "chips": {chip: [chip, 0, 0, 0] for chip in range(chips)},
        "ethernet_connections": links,
        "chips_with_mmio": [{chip: chip} for chip in range(chips)],
        "harvesting": {chip: dict(harvesting) for chip in range(chips)},
        "boards": [
            [{"board_id": (0x40 << 36) + 1 + chip}, {"board_type": board}, {"chips": [chip]}] for chip in range(chips)
        ],
        "chip_pci_bdfs": {},
    }


SIMULATOR_PID = "simulator.pid"
"""File of the simulator's process id: UMD gives it a session of its own, so it is not in its parent's group."""

RUN = f"""#!/bin/sh
echo $$ >"$(dirname "$0")/../{SIMULATOR_PID}"
exec "$WOLFPINE_PYTHON" -u -m framework.sim.ARCH "$@"
"""


def _simulated(arch: str, lost_channels: int = 0) -> Callable[[Path, Path], dict[str, str]]:
    """wolfpine's chip; to TTNN it is described without the last ``lost_channels`` of its DRAM channels."""

    def prepare(folder: Path, site: Path) -> dict[str, str]:
        own = folder / "simulator"
        own.mkdir()
        chip = yaml.safe_load((site / "framework" / "sim" / arch / "soc_descriptor.yaml").read_text())
        for lost in range(len(chip["dram"]) - lost_channels, len(chip["dram"])):
            chip["router_only"] += chip["dram"][lost]
            chip["dram_views"] = [view for view in chip["dram_views"] if view["channel"] != lost]
        chip["dram"] = chip["dram"][: len(chip["dram"]) - lost_channels]
        (own / "soc_descriptor.yaml").write_text(yaml.safe_dump(chip, sort_keys=False))
        run = own / "run.sh"
        run.write_text(RUN.replace("ARCH", arch))
        run.chmod(0o755)
        # Slow dispatch: the host itself starts each program on the chip.
        return {"TT_METAL_SIMULATOR": str(own), "TT_METAL_SLOW_DISPATCH_MODE": "1"}

    return prepare


DEVICES = {
    "mock-p150": Device("blackhole-p150", 1, _mock("blackhole", "p150")),
    "mock-p100": Device("blackhole-p100", 1, _mock("blackhole", "p100", dram_harvested=1 << 3)),
    "mock-4xp150": Device("blackhole-p150", 4, _mock("blackhole", "p150", chips=4)),
    "mock-n150": Device("wormhole-n150", 1, _mock("wormhole_b0", "n150")),
    "simulated-p150": Device("blackhole-p150", 1, _simulated("blackhole")),
    "simulated-7-banks": Device("blackhole-p100", 1, _simulated("blackhole", lost_channels=1)),
    "simulated-n150": Device("wormhole-n150", 1, _simulated("wormhole")),
}
