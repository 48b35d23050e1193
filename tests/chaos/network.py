"""A small network of its own: two or more hosts on one switch, each a network namespace, with cables to pull.

The namespaces have no names: they live in processes that end with this one, and are gone with them.  Needs root.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

_TOOLS = [tool for tool in ("ip", "tc", "unshare", "nsenter") if shutil.which(tool) is None]
# Why no Network can be made here; "" where one can.
MISSING = (
    "needs root, to make network namespaces"
    if os.geteuid() != 0
    else f"needs {', '.join(_TOOLS)} (Debian: iproute2, util-linux)"
    if _TOOLS
    else ""
)


class Namespace:
    """A network namespace and a mount namespace, kept by a process that waits for the end of its stdin."""

    def __init__(self) -> None:
        self._holder = subprocess.Popen(["unshare", "--net", "--mount", "cat"], stdin=subprocess.PIPE)
        own = os.readlink("/proc/self/ns/net")
        deadline = time.monotonic() + 10
        # unshare(1) makes both before it becomes cat.
        while os.readlink(f"/proc/{self.pid}/ns/net") == own or self._command() != "cat":
            assert self._holder.poll() is None, "cannot make a network namespace"
            assert time.monotonic() < deadline, "unshare(1) did not make a namespace"
            time.sleep(0.01)
        self.run("ip", "link", "set", "lo", "up")

    def _command(self) -> str:
        return Path(f"/proc/{self.pid}/comm").read_text().strip()

    @property
    def pid(self) -> int:
        return self._holder.pid

    @property
    def wrapper(self) -> tuple[str, ...]:
        """Words in front of a command that shall run inside."""
        return ("nsenter", "--target", str(self.pid), "--net")

    def run(self, *words: str) -> None:
        subprocess.run([*self.wrapper, *words], check=True, capture_output=True, text=True, timeout=30)

    def close(self) -> None:
        assert self._holder.stdin is not None
        self._holder.stdin.close()
        self._holder.wait(10)


class SmallDisk:
    """A file system of ``size_kib`` KiB for logs, which can be filled to the last byte."""

    def __init__(self, size_kib: int) -> None:
        self._namespace = Namespace()
        self._inside = "/mnt"
        mount = ["mount", "-t", "tmpfs", "-o", f"size={size_kib}k", "none", self._inside]
        enter = ["nsenter", "--target", str(self._namespace.pid), "--mount"]
        subprocess.run([*enter, *mount], check=True, capture_output=True, text=True, timeout=30)
        self.directory = Path(f"/proc/{self._namespace.pid}/root{self._inside}")
        self._filler = self.directory / "filler"

    def fill(self) -> None:
        """Until a byte more is refused."""
        with self._filler.open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(4096))
            except OSError:
                pass

    def free(self) -> None:
        self._filler.unlink(missing_ok=True)

    @property
    def full(self) -> bool:
        return os.statvfs(self.directory).f_bavail == 0

    def close(self) -> None:
        self._namespace.close()


class Network:
    """Hosts ``10.77.0.1``, ``10.77.0.2``, ... on one switch; ``rate``: what a host may send, in tc(8)'s words."""

    def __init__(self, hosts: int, rate: str) -> None:
        self.switch = Namespace()
        self.switch.run("ip", "link", "add", "switch", "type", "bridge")
        self.switch.run("ip", "link", "set", "switch", "up")
        self.hosts: list[Namespace] = []
        for number in range(1, hosts + 1):
            host = Namespace()
            self.hosts.append(host)
            self.switch.run(
                *("ip", "link", "add", f"port{number}", "type", "veth"),
                *("peer", "name", "eth0", "netns", str(host.pid)),
            )
            self.switch.run("ip", "link", "set", f"port{number}", "master", "switch", "up")
            host.run("ip", "address", "add", f"{self.address(number)}/24", "dev", "eth0")
            host.run("ip", "link", "set", "eth0", "up")
            host.run(
                "tc", "qdisc", "add", "dev", "eth0", "root", "tbf", "rate", rate, "burst", "256kb", "latency", "1s"
            )

    @staticmethod
    def address(number: int) -> str:
        return f"10.77.0.{number}"

    def cut(self) -> None:
        """The switch forwards nothing any more; no host is told."""
        self.switch.run("ip", "link", "set", "switch", "down")

    def mend(self) -> None:
        self.switch.run("ip", "link", "set", "switch", "up")

    def unplug(self, number: int) -> None:
        """Host ``number`` loses its carrier; the others see nothing."""
        self.switch.run("ip", "link", "set", f"port{number}", "down")

    def plug(self, number: int) -> None:
        self.switch.run("ip", "link", "set", f"port{number}", "up")

    def close(self) -> None:
        for namespace in (*self.hosts, self.switch):
            namespace.close()
