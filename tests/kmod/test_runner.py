"""kmod/vm/run.sh leaves nothing running, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kmod.machine import why_no_vm
from tests.transport.waiting import eventually

ROOT = Path(__file__).parents[2]
RUN = ROOT / "kmod" / "vm" / "run.sh"

pytestmark = pytest.mark.slow


@pytest.fixture
def sleeper(tmp_path: Path) -> Iterator[Path]:
    """A script that the VM would run for ever."""
    if (why := why_no_vm()) is not None:
        pytest.skip(why)
    subprocess.run([RUN.parent / "packages.sh", "--install"], check=True, timeout=300)
    subprocess.run([RUN.parent / "kernel.sh", "bookworm-backports", "image"], check=True, timeout=300)
    script = tmp_path / "sleeper.sh"
    script.write_text("sleep infinity\n")
    yield script


def machines(script: Path) -> list[int]:
    """Processes of QEMU whose work folder lies beside ``script``."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue  # no process, or one that has just ended
        if b"qemu-system" in words[0] and any(str(script.parent).encode() in word for word in words):
            found.append(int(entry.name))
    return found


def command(script: Path, timeout_s: int) -> list[str]:
    return [str(RUN), "--work", str(script.parent), "--timeout", str(timeout_s), str(script)]


def test_a_hung_script_ends_with_its_time_out(sleeper: Path) -> None:
    done = subprocess.run(command(sleeper, 2), capture_output=True, text=True, timeout=120)
    assert (done.returncode, machines(sleeper)) == (124, [])
    assert "it has run for 2 s" in done.stderr


@pytest.mark.parametrize("blow", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT])
def test_no_way_of_ending_leaves_a_machine_behind(sleeper: Path, blow: signal.Signals) -> None:
    process = subprocess.Popen(
        command(sleeper, 300), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        eventually(lambda: bool(machines(sleeper)), "QEMU runs", 60)
        os.kill(process.pid, blow)
        process.wait(30)
        eventually(lambda: not machines(sleeper), "QEMU has ended", 30)
    finally:
        if process.poll() is None:
            process.kill()
    assert process.returncode == (-9 if blow == signal.SIGKILL else 128 + blow)
