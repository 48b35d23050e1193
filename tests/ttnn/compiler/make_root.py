"""Makes the directory that TTNN takes for its own (TT_METAL_RUNTIME_ROOT): links to the wheel's files, and a compiler.

    make_root.py ROOT        with the Python of the environment that has ttnn

The wheel lacks Tenstorrent's compiler, and two of its objects can only be linked by it.  ROOT has ``stand_in.py`` in
the compiler's place and those objects made by Debian's; site-packages is left as pip made it.
"""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import stat
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

from elftools.elf.elffile import ELFFile
from stand_in import COMPILER, TARGET

HERE = Path(__file__).resolve().parent
PICOLIBC = Path("/usr/lib/picolibc/riscv64-unknown-elf/include")
SUBSTITUTES = "substitutes.o"
"""Start-up and copy routines that every kernel is linked with; the wheel has their source too."""
NOC = "noc.o"
"""Helpers that no data-movement kernel calls; empty here."""


def make(root: Path) -> None:
    spec = importlib.util.find_spec("ttnn")
    if spec is None or spec.origin is None:
        raise SystemExit(f"make_root: ttnn is not installed in {sys.prefix}")
    wheel = Path(spec.origin).parent
    shutil.rmtree(root, ignore_errors=True)
    _link_all(wheel, root, but="runtime")
    _link_all(wheel / "runtime", root / "runtime", but="hw")
    _link_all(wheel / "runtime" / "hw", root / "runtime" / "hw", but="lib")
    for arch in ("blackhole", "wormhole"):
        objects = root / "runtime" / "hw" / "lib" / arch
        _link_all(wheel / "runtime" / "hw" / "lib" / arch, objects)
        _compile(root / "tt_metal" / "hw" / "toolchain" / "substitutes.cpp", objects / SUBSTITUTES, root)
        _compile(None, objects / NOC, root)
    settings = {"version": _version(wheel), "variants": _variants(wheel), "includes": _includes()}
    (root / "firmware.json").write_text(json.dumps(settings, indent=1))
    tools = root / "runtime" / "sfpi" / "compiler" / "bin"
    tools.mkdir(parents=True)
    _executable(tools / "riscv-tt-elf-g++", f'"{sys.executable}" -S -E "{HERE / "stand_in.py"}" "{root}"')
    _executable(tools / "riscv-tt-elf-objcopy", "riscv64-unknown-elf-objcopy")


def _link_all(source: Path, target: Path, but: str = "") -> None:
    target.mkdir(parents=True)
    for entry in source.iterdir():
        if entry.name != but:
            (target / entry.name).symlink_to(entry)


def _compile(source: Path | None, target: Path, root: Path) -> None:
    target.unlink()
    command = [COMPILER, *TARGET, "-O2", "-fno-exceptions", "-fno-rtti", "-fno-tree-loop-distribute-patterns", "-c"]
    command += ["-nostdinc++", *(part for folder in _includes() for part in ("-isystem", folder))]
    command += [f"-I{root / 'tt_metal' / 'hw' / 'inc'}", "-o", str(target), "-x", "c++", str(source or "/dev/null")]
    subprocess.run(command, check=True)


def _includes() -> list[str]:
    """Where kernels find standard headers: ours, the host's libstdc++ (Debian has none for this target), picolibc."""
    report = subprocess.run(["g++", "-E", "-v", "-x", "c++", "/dev/null"], capture_output=True, text=True, check=True)
    host = [str(Path(folder).resolve()) for folder in re.findall(r"^ (/\S*c\+\+\S*)$", report.stderr, re.MULTILINE)]
    if not host or not PICOLIBC.is_dir():
        raise SystemExit(f"make_root: found libstdc++ in {host or 'no folder'}, picolibc in {PICOLIBC}: install them")
    return [str(HERE / "include"), *host, str(PICOLIBC)]


def _version(wheel: Path) -> str:
    """What the wheel wants the compiler to call itself."""
    fields = dict(re.findall(r"^(\w+)='(.*)'$", (wheel / "tt_metal" / "sfpi-version").read_text(), re.MULTILINE))
    return f"riscv-tt-elf-g++ (tenstorrent/sfpi:{fields['sfpi_version']}[{fields['sfpi_build']}]) 15.1.0"


def _variants(wheel: Path) -> dict[str, list[str]]:
    """Ready-made firmware by "L1 banks,DRAM banks": a bank takes 4 bytes of a table (two networks, 16 bits)."""
    found = defaultdict(list)
    for folder in sorted((wheel / "tt_metal" / "pre-compiled").iterdir()):
        with (folder / "brisc" / "brisc.elf").open("rb") as file:
            table = ELFFile(file).get_section_by_name(".symtab")
            size = {name: table.get_symbol_by_name(name)[0]["st_size"] // 4 for name in _TABLES}
        found[",".join(str(size[name]) for name in _TABLES)].append(folder.name)
    return dict(found)


_TABLES = ("l1_bank_to_noc_xy", "dram_bank_to_noc_xy")


def _executable(path: Path, command: str) -> None:
    path.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
    path.chmod(path.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)


if __name__ == "__main__":
    make(Path(sys.argv[1]).absolute())
