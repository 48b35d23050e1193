"""TTNN processes for the tests, and what a run without their environment is told."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.ttnn.client import ENVIRONMENT, TtnnProcess
from tests.ttnn.devices import DEVICES

Opener = Callable[..., TtnnProcess]


@pytest.fixture(scope="module")
def ttnn_device(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Opener]:
    """Opens a device by its name in ``devices.DEVICES``, once for each module and script of the process.

    Without the environment the test fails: TTNN is an oracle that may not be skipped.
    """
    stamp = ENVIRONMENT / ".stamps" / "root"
    if not stamp.exists():
        pytest.fail(
            f"TTNN's environment ({ENVIRONMENT.name}) is missing or half made. Run: make setup-ttnn", pytrace=False
        )
    running: dict[tuple[str, str], TtnnProcess] = {}

    def opened(name: str, script: str = "worker.py") -> TtnnProcess:
        if (name, script) not in running:
            device = DEVICES[name]
            folder: Path = tmp_path_factory.mktemp(name)
            running[name, script] = process = TtnnProcess(device, folder, script)
            process.ask("open", chips=device.chips)
        return running[name, script]

    yield opened
    for process in running.values():
        process.close()
