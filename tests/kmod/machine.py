"""Whether this machine can make the VM of kmod/vm."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

__all__ = ["why_no_vm"]


def why_no_vm() -> str | None:
    """What stands in the way, or None."""
    release = Path("/etc/os-release")
    text = release.read_text() if release.exists() else ""
    if not re.search(r"^ID=debian$", text, re.M) or not re.search(r'^VERSION_ID="?12"?$', text, re.M):
        return "the VM runs Debian 12's kernel and user space, and this is not Debian 12"
    if shutil.which("apt-get") is None:
        return "the VM's kernel is downloaded with apt, and there is no apt-get"
    if os.geteuid() != 0:
        return "installing QEMU and reading all of / for the VM takes root"
    return None
