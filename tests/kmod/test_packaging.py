"""`make install`, `make dkms`, `make uninstall`: which files they put where, and that DKMS builds from them."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.kmod.machine import why_no_vm

ROOT = Path(__file__).parents[2]
KMOD = ROOT / "kmod"
CONFIGURATION = {
    "usr/lib/modules-load.d/hawk-peermem.conf",
    "usr/lib/modprobe.d/hawk-peermem.conf",
    "usr/lib/udev/rules.d/60-hawk-peermem.rules",
}

pytestmark = pytest.mark.slow


def run(*command: str | Path, cwd: Path = KMOD) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=540)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(params=["bookworm", "bookworm-backports"])
def headers(request: pytest.FixtureRequest) -> tuple[str, Path]:
    """Release (as uname -r prints it) and headers of a kernel of Debian 12."""
    if (why := why_no_vm()) is not None:
        pytest.skip(why)
    run("vm/packages.sh", "--install")
    folder = Path(run("vm/kernel.sh", request.param).strip())
    release = (folder / "kver").read_text().strip()
    return release, folder / "headers" / "usr" / "src" / f"linux-headers-{release}"


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()}


def version() -> str:
    (found,) = re.findall(
        r'^#define HAWK_PEERMEM_VERSION\s+"(.+)"$', (KMOD / "hawk_peermem/peermem.h").read_text(), re.M
    )
    return str(found)


def test_install_and_uninstall(headers: tuple[str, Path], tmp_path: Path) -> None:
    release, folder = headers
    installed = tmp_path / "installed"
    make = ["make", f"KDIR={folder}", f"DESTDIR={installed}", f"BUILD={tmp_path / 'build'}"]
    run(*make, "install")
    module = f"lib/modules/{release}/updates/hawk_peermem.ko"
    assert files(installed) == {module, *CONFIGURATION}
    assert run("modinfo", "-F", "vermagic", installed / module).split()[0] == release
    run(*make, "uninstall")
    assert files(installed) == set()


def test_dkms_builds_it(headers: tuple[str, Path], tmp_path: Path) -> None:
    release, folder = headers
    run("make", "dkms", f"KDIR={folder}", f"DESTDIR={tmp_path}")
    source = f"usr/src/hawk-peermem-{version()}"
    sources = {f"{source}/{path.name}" for path in (KMOD / "hawk_peermem").iterdir() if path.is_file()}
    assert files(tmp_path) == {*CONFIGURATION, *sources, f"{source}/dkms.conf"}
    tree = tmp_path / "dkms"
    tree.mkdir()
    dkms = ["dkms", "build", "-m", "hawk-peermem", "-v", version(), "-k", release]
    run(*dkms, "--sourcetree", tmp_path / "usr/src", "--dkmstree", tree, "--kernelsourcedir", folder)
    (module,) = tree.rglob("hawk_peermem.ko*")
    assert run("modinfo", "-F", "version", module).strip() == version()
    run("make", "uninstall", f"KDIR={folder}", f"DESTDIR={tmp_path}")
    assert not (tmp_path / source).exists() and not CONFIGURATION & files(tmp_path)
