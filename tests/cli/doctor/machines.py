"""Machines for the doctor: a tree of files, and answers to what no file answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from hawk_connector.cli.doctor.findings import Check, Finding, examine
from hawk_connector.cli.doctor.machine import ClockState, Machine
from hawk_connector.cli.doctor.needs import Needs, Side, default_needs
from hawk_connector.config import DECODE_ROLE, PREFILL_ROLE, HawkConfig

GIB = 1 << 30


def put(root: Path, files: Mapping[str, str | None]) -> None:
    """Writes files; a value of None is a directory, which cannot be read as a file."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if text is None:
            path.mkdir()
        else:
            path.write_text(text)


def machine(root: Path, files: Mapping[str, str | None] | None = None, **answers: Any) -> Machine:
    """Nothing is installed, nothing listens, no library loads and little may be locked, unless ``answers`` say so."""
    put(root, files or {})
    given: dict[str, Any] = {
        "version_of": lambda name: None,
        "plugins": lambda group: (),
        "library_error": lambda name: f"{name}: cannot open shared object file",
        "import_error": lambda module: "No module named 'mooncake'",
        "bind_error": lambda host, port: None,
        "connect_error": lambda host, port: "Connection refused",
        "memlock": lambda: 8 << 20,
        "clock": lambda: ClockState(True, 0.0005),
    }
    return Machine(root=root, **(given | answers))


def needs(side: Side, hawk: dict[str, Any] | None = None, **changed: Any) -> Needs:
    role = PREFILL_ROLE if side == "prefill" else DECODE_ROLE
    return replace(default_needs(side), hawk=HawkConfig.parse(hawk or {}, role), **changed)


def seen(check: Check, of: Machine, wanted: Needs) -> Finding:
    finding = examine(check, of, wanted)
    assert finding is not None
    return finding


def chip_files(
    number: int = 0,
    *,
    device: str = "0xb140",
    bar4: int = 32 * GIB,
    bar0: int = GIB // 2,
    users: str = "",
) -> dict[str, str | None]:
    """One chip as tt-kmd and the PCI core show it.  A BAR that is not mapped is a line of zeros."""
    place = f"sys/class/tenstorrent/tenstorrent!{number}/device"

    def line(start: int, size: int) -> str:
        return (
            f"0x{start:016x} 0x{start + size - 1:016x} 0x000000000014220c" if size else " ".join(["0x" + "0" * 16] * 3)
        )

    sizes = [bar0, 0, 1 << 20, 0, bar4, 0, 0]
    resource = "\n".join(line((n + 1) << 40, size) for n, size in enumerate(sizes))
    return {
        f"dev/tenstorrent/{number}": "",
        f"{place}/device": f"{device}\n",
        f"{place}/resource": resource + "\n",
        f"proc/driver/tenstorrent/{number}/pids": users,
        "sys/module/tenstorrent/version": "2.10.0\n",
    }


def port_files(
    device: str = "mlx5_0",
    *,
    state: str = "4: ACTIVE",
    layer: str = "Ethernet",
    gids: Mapping[str, tuple[str, str | None]] | None = None,
) -> dict[str, str | None]:
    """One RDMA device with one port.  ``gids``: index -> (GID, type)."""
    place = f"sys/class/infiniband/{device}/ports/1"
    files: dict[str, str | None] = {f"{place}/state": f"{state}\n", f"{place}/link_layer": f"{layer}\n"}
    for index, (gid, kind) in (gids or {}).items():
        files[f"{place}/gids/{index}"] = f"{gid}\n"
        if kind is not None:
            files[f"{place}/gid_attrs/types/{index}"] = f"{kind}\n"
    return files
