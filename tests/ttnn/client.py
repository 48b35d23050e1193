"""The tests' end of the pipe to ``worker.py``."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from pathlib import Path
from queue import Empty, Queue
from threading import Thread
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.ttnn.devices import SIMULATOR_PID, Device

__all__ = ["ENVIRONMENT", "TtnnError", "TtnnProcess"]

ENVIRONMENT = Path(__file__).parents[2] / ".venv-ttnn"
ANSWER_WITHIN = 240.0
"""Seconds; the longest answer is a kernel's first compilation and run, about 20 s on an idle machine."""


class TtnnError(AssertionError):
    """TTNN raised, died or did not answer; says what, and ends with its log."""


class TtnnProcess:
    """TTNN, open on one device.  Methods are those of ``worker.Worker``, with arrays in place of files."""

    def __init__(self, device: Device, folder: Path, script: str = "worker.py") -> None:
        """``script``: file beside this one that serves a ``worker.Worker``."""
        self.device = device
        self._folder = folder
        self._log = folder / "log.txt"
        self._sent = 0
        python = ENVIRONMENT / "bin" / "python"
        site = next((ENVIRONMENT / "lib").glob("python3.*")) / "site-packages"
        environment = {name: value for name, value in os.environ.items() if not name.startswith("TT_")}
        environment |= {
            "TT_METAL_RUNTIME_ROOT": str(ENVIRONMENT / "root"),
            "TT_METAL_CACHE": str(folder / "cache"),
            "TT_METAL_LOGS_PATH": str(folder),
            "WOLFPINE_PYTHON": str(python),
            "HAWK_STAND_IN_LOG": str(folder / "compiler.txt"),
            "PYTHONPATH": str(Path(__file__).parents[2]),
        }
        environment |= device.prepare(folder, site)
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [python, Path(__file__).with_name(script), folder],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environment,
                cwd=folder,
                start_new_session=True,
            )
        self._replies: Queue[str] = Queue()
        Thread(target=self._listen, daemon=True).start()

    def ask(self, do: str, **arguments: Any) -> Any:
        """One request.  Arrays are passed as files, and a reply that names a file is its array."""
        for name, value in arguments.items():
            if isinstance(value, np.ndarray):
                self._sent += 1
                arguments[name] = f"request-{self._sent}.npy"
                np.save(self._folder / arguments[name], value)
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
            self._process.stdin.flush()
        except OSError:
            raise self._failure(f"{do}: TTNN's process has ended") from None
        try:
            line = self._replies.get(timeout=ANSWER_WITHIN)
        except Empty:
            self.kill()
            raise self._failure(f"{do}: no answer within {ANSWER_WITHIN:.0f} s") from None
        if not line:
            raise self._failure(f"{do}: TTNN's process ended with status {self._process.wait(10)}")
        reply = json.loads(line)
        if "error" in reply:
            raise self._failure(f"{do}: {reply['error']}")
        answer = reply["ok"]
        if isinstance(answer, str) and answer.endswith(".npy"):
            array: NDArray[Any] = np.load(self._folder / answer)
            (self._folder / answer).unlink()
            return array
        return answer

    def close(self) -> None:
        """Closes the device and ends the process."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # what ended it was said where it was noticed
            self._process.stdin.close()
        try:
            status = self._process.wait(60)
        except subprocess.TimeoutExpired:
            status = None
        if status != 0:
            self.kill()
            raise self._failure(f"TTNN's process did not close its device (status {status})")

    def kill(self) -> None:
        """Ends the process, and the simulator that it started."""
        self._process.kill()
        self._process.wait(10)
        pid = self._folder / SIMULATOR_PID
        if pid.exists():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid.read_text()), signal.SIGKILL)

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._replies.put(line)
        self._replies.put("")

    def _failure(self, what: str) -> TtnnError:
        log = self._log.read_text(errors="replace").splitlines()[-40:]
        compiler = self._folder / "compiler.txt"
        said = compiler.read_text().splitlines()[-20:] if compiler.exists() else []
        return TtnnError(
            "\n".join([what, "--- TTNN's log ends:", *log, "--- the stand-in compiler's log ends:", *said])
        )
