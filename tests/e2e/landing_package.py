"""A landing provider of the tests', installed as a package would install it."""

from __future__ import annotations

from pathlib import Path


def install(directory: Path, name: str, module: str) -> dict[str, str]:
    """The environment in which ``module.from_kv_caches`` is the provider ``name``."""
    metadata = directory / f"{name}_landing-0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}-landing\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text(f"[hawk_connector.landings]\n{name} = {module}:from_kv_caches\n")
    return {"PYTHONPATH": str(directory)}
