"""The two environments of the tests run the same releases of what both need."""

from __future__ import annotations

import re
from pathlib import Path

import tomllib

REQUIREMENTS = Path(__file__).parents[1] / "requirements"


def pins(name: str) -> dict[str, str]:
    lines = [line.partition("#")[0].strip() for line in (REQUIREMENTS / name).read_text().splitlines()]
    return dict(line.lower().split("==") for line in lines if "==" in line)


def test_the_decode_core_beside_ttnn_has_the_same_releases() -> None:
    """numpy is the exception: ttnn wants one below 2, and pip finds it."""
    ours, theirs = pins("constraints.txt"), pins("ttnn.txt")
    both = set(ours) & set(theirs)
    assert {"msgspec", "pyzmq", "xxhash", "mooncake-transfer-engine-non-cuda"} <= both
    assert {name: theirs[name] for name in both} == {name: ours[name] for name in both}
    assert "numpy" not in theirs


def test_what_the_tests_need_is_installed_and_pinned() -> None:
    project = tomllib.loads((REQUIREMENTS.parent / "pyproject.toml").read_text())["project"]
    extra = {re.split(r"[<>=\[;]", name)[0] for name in project["optional-dependencies"]["dev"]}
    listed = {line.strip() for line in (REQUIREMENTS / "dev.txt").read_text().splitlines() if not line.startswith("#")}
    assert extra <= listed
    assert {name.lower() for name in listed} <= set(pins("constraints.txt"))
