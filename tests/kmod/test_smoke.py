"""The kernel module in a VM, in short: built, loaded, and real verbs through it. `make test-kmod` runs all of it."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.kmod.machine import why_no_vm

ROOT = Path(__file__).parents[2]
VM = ROOT / "kmod" / "vm"

pytestmark = pytest.mark.slow


@pytest.mark.timeout(900)
def test_verbs_reach_the_stand_in_only_through_the_module() -> None:
    if (why := why_no_vm()) is not None:
        pytest.skip(why)
    wanted = {path.stem for path in (VM / "tests").glob("*.sh") if "# smoke: yes" in path.read_text()}
    assert len(wanted) >= 2
    done = subprocess.run([VM / "suite.sh", "--smoke"], capture_output=True, text=True, timeout=840)
    passed = set(re.findall(r"^ok ([\w-]+) \(", done.stdout, re.M))
    assert (done.returncode, passed) == (0, wanted), done.stdout + done.stderr


def test_the_repository_names_no_mirror() -> None:
    """The kernels come from wherever the host's apt gets Debian."""
    for path in [*VM.rglob("*.sh"), ROOT / "kmod" / "Makefile"]:
        assert "http" not in path.read_text(), path
