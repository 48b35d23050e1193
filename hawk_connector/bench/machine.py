"""The machine and the versions that figures were measured with, and how much memory there is."""

from __future__ import annotations

import os
import platform
import re
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from hawk_connector.errors import CapacityError

__all__ = ["available_bytes", "check_memory", "machine"]

_PACKAGES = (
    "hawk-connector",
    "torch",
    "numpy",
    "numba",
    "triton",
    "vllm",
    "mooncake-transfer-engine",
    "mooncake-transfer-engine-cuda13",
    "mooncake-transfer-engine-non-cuda",
    "nixl",
)
# What is left to everything else on the machine.
_SHARE = 0.9


def machine() -> dict[str, Any]:
    """Processor, cores, caches, memory in bytes, system, load, and the versions of what is installed."""
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "last_level_cache": _last_level_cache(),
        "memory_bytes": _meminfo("MemTotal"),
        "load_1min": round(os.getloadavg()[0], 2),
        "system": f"{platform.system()} {platform.release()}",
        "python": sys.version.split()[0],
        "versions": versions,
    }


def available_bytes() -> int:
    """Memory that can be had without swapping, less a tenth."""
    return int(_meminfo("MemAvailable") * _SHARE)


def check_memory(needed: int, what: str, fix: str) -> None:
    """CapacityError where ``what`` needs more than there is."""
    available = available_bytes()
    if needed > available:
        raise CapacityError(
            f"{what} does not fit into memory",
            expected=f"{needed / 2**20:,.0f} MiB",
            got=f"{available / 2**20:,.0f} MiB that may be used now",
            fix=fix,
        )


def _processor() -> str:
    found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.M)
    return found[1].strip() if found else platform.machine()


def _last_level_cache() -> str:
    sizes = sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"))
    return sizes[-1].read_text().strip() if sizes else "unknown"


def _meminfo(name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB$", Path("/proc/meminfo").read_text(), re.M)
    return int(found[1]) * 1024 if found else 0
