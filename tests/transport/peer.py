"""A process with a region of memory that an engine reads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


class Peer:
    """``module``: run with ``arguments``, it prints "session address" and lives until its stdin ends."""

    def __init__(self, module: str, *arguments: str, quiet: bool = False) -> None:
        """``quiet``: what it says on stderr is not shown."""
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if quiet else None,
            text=True,
        )
        assert self.process.stdout is not None
        session, address = self.process.stdout.readline().split()
        self.session, self.address = session, int(address)

    def end(self) -> None:
        self.process.kill()
        self.process.wait(10)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()
