"""A mutant: a small wrong change of the product, made in a copy, that the simulation has to catch.

The text to replace must stand exactly once in its file; otherwise the code has changed and the mutant must be written
anew, which is an error and not a pass.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

__all__ = ["ROOT", "Caught", "Edit", "Mutant", "Stale", "hunt"]

ROOT = Path(__file__).parents[2]


class Stale(AssertionError):
    """A mutant's text does not stand exactly once in the product any more."""


@dataclass(frozen=True)
class Edit:
    """In ``file`` (below hawk_connector) ``old`` becomes ``new``."""

    file: str
    old: str
    new: str


@dataclass(frozen=True)
class Mutant:
    """``rule``: the number of the rule of docs/protocol.md that it breaks, or of those that it may break first."""

    name: str
    rule: int | tuple[int, ...]
    edits: tuple[Edit, ...]

    @property
    def rules(self) -> tuple[int, ...]:
        return self.rule if isinstance(self.rule, tuple) else (self.rule,)

    def write(self, package: Path) -> None:
        """Makes the change in ``package``, a copy of hawk_connector.  Raises Stale."""
        for edit in self.edits:
            path = package / edit.file
            text = path.read_text()
            if text.count(edit.old) != 1:
                raise Stale(f"{self.name}: {text.count(edit.old)} times in {edit.file}, once expected: {edit.old!r}")
            path.write_text(text.replace(edit.old, edit.new))


@dataclass(frozen=True)
class Caught:
    """What the simulation said: the broken rule (0: an exception, None: nothing) and at which seed, after how many."""

    rule: int | None
    seed: int | None
    seeds: int
    what: str


def hunt(mutant: Mutant | None, folder: Path, seeds: range, timeout_s: float = 300.0) -> Caught:
    """Simulates ``seeds`` on a copy of the product with the mutant in it, until a rule is broken.

    ``folder`` must be empty.  None is the product itself, which nothing must be said about.
    """
    package = folder / "hawk_connector"
    shutil.copytree(ROOT / "hawk_connector", package, ignore=shutil.ignore_patterns("__pycache__", "cli"))
    (folder / "tests").symlink_to(ROOT / "tests")
    if mutant is not None:
        mutant.write(package)
    span = f"{seeds.start}..{seeds.stop}"
    # The folder comes first on the path, before the project that is installed in place.
    done = subprocess.run(
        [sys.executable, "-m", "tests.protocol.run_simulation", "--first", span],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    try:
        said = json.loads(done.stdout)
    except ValueError:
        raise AssertionError(f"the simulation did not run:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}") from None
    assert Path(said["package"]) == package, f"the simulation ran on {said['package']}, not on the mutant"
    return Caught(said["rule"], said["seed"], said["seeds"], said["what"])
