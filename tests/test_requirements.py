"""The two environments of the tests run the same releases of what both need."""

from __future__ import annotations

from pathlib import Path

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
