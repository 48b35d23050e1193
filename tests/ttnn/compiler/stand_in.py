"""Stands in for ``riscv-tt-elf-g++``, the compiler that TTNN's just-in-time build calls and that no registry carries.

    stand_in.py ROOT ARGUMENTS...

Firmware: nothing is compiled.  TTNN's wheel has the firmware ready-made in variants; the one whose bank tables have as
many entries as the command line's NUM_L1_BANKS and NUM_DRAM_BANKS is copied (``ROOT/firmware.json``, by make_root.py).

Kernels that only move data (reader and writer of ``paged_fill_cache``): compiled from the wheel's sources by Debian's
riscv64-unknown-elf-g++ as plain rv32im, without Tenstorrent's extensions.  Compute kernels need those and fail here.

With HAWK_STAND_IN_LOG=FILE each real compilation is logged.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

COMPILER = "riscv64-unknown-elf-g++"
TARGET = ["-march=rv32im", "-mabi=ilp32", "-std=c++20", "-w"]
# Options that Debian's compiler does not know, or that turn our warnings into errors.
DROPPED = re.compile(r"-ftt-|-mcpu=|-flto|--param=min-pagesize|-Wno-error=|-std=|-MMD$|-Werror$|-g$|-Winvalid-pch$")
FIRMWARE = re.compile(r"/firmware/(\w+)/")


def main(root: Path, arguments: list[str]) -> int:
    settings = json.loads((root / "firmware.json").read_text())
    if "--version" in arguments:
        print(settings["version"])
        return 0
    out = Path(_after(arguments, "-o"))
    if "-MF" in arguments:
        Path(_after(arguments, "-MF")).write_text(f"{out}:\n")
    if "c++-header" in arguments:
        # Precompiled headers save time only; the compiler passes over one that it cannot read.
        out.write_bytes(b"")
        return 0
    processor = FIRMWARE.search(str(out))
    if processor is None:
        return _kernel(settings, arguments)
    if "-c" in arguments:
        # The "object" carries what the link has to know.
        out.write_text(json.dumps([_define(arguments, "NUM_L1_BANKS"), _define(arguments, "NUM_DRAM_BANKS")]))
        return 0
    return _firmware(root, settings["variants"], processor.group(1), arguments, out)


def _firmware(root: Path, variants: dict[str, list[str]], processor: str, arguments: list[str], out: Path) -> int:
    objects = [Path(a) for a in arguments if a.endswith(".o") and FIRMWARE.search(a)]
    l1_banks, dram_banks = json.loads(objects[0].read_text())
    fitting = variants.get(f"{l1_banks},{dram_banks}")
    if not fitting:
        print(f"no ready-made firmware for {l1_banks} L1 banks and {dram_banks} DRAM banks", file=sys.stderr)
        return 1
    shutil.copy(root / "tt_metal" / "pre-compiled" / fitting[0] / processor / f"{processor}.elf", out)
    return 0


def _kernel(settings: dict[str, list[str]], arguments: list[str]) -> int:
    kept: list[str] = []
    skip = False
    for argument in arguments:
        if skip or DROPPED.match(argument):
            skip = False
            continue
        if argument == "-MF":
            skip = True
            continue
        kept.append(argument)
    command = [COMPILER, *TARGET, *kept]
    if "-c" in arguments:
        # static_assert(false) in a template that is never used: an error before GCC 13 (CWG 2518).
        command += ["-nostdinc++", "-Dstatic_assert(...)="]
        for folder in settings["includes"]:
            command += ["-isystem", folder]
    else:
        command += ["-nostdlib", "-lgcc", "-Wl,--no-warn-mismatch"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    log = os.environ.get("HAWK_STAND_IN_LOG")
    if log:
        with open(log, "a") as file:
            file.write(f"{' '.join(command)}\n-> {done.returncode}\n{done.stderr}\n")
    sys.stderr.write(done.stderr[-4000:])
    return done.returncode


def _after(arguments: list[str], option: str) -> str:
    return arguments[arguments.index(option) + 1]


def _define(arguments: list[str], name: str) -> int:
    return next(int(a.split("=")[1]) for a in arguments if a.startswith(f"-D{name}="))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
