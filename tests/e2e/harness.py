"""The parent's end of `tests/e2e/engine.py`: engines as context managers, calls with deadlines."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "MC_FORCE_TCP": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 1024,
    "enforce_eager": True,
    "max_num_seqs": 8,
    "kv_cache_memory_bytes": 64 << 20,
    "distributed_executor_backend": "uni",
    "enable_prefix_caching": False,
}


class Engine:
    """One engine process.  ``log`` keeps what it prints."""

    def __init__(self, options: dict[str, Any], log: Path, environment: dict[str, str] | None = None) -> None:
        self.log = log
        self.options = {**OPTIONS, **options}
        self.environment = {**os.environ, **ENVIRONMENT, **(environment or {})}
        self._buffer = b""

    def start(self) -> Engine:
        """Starts the process; ``wait_ready`` waits for it, so that two can start side by side."""
        reading, writing = os.pipe()
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.e2e.engine", json.dumps(self.options), str(writing)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=[writing],
                env=self.environment,
                cwd=Path(__file__).parents[2],
            )
        os.close(writing)
        self._reading = reading
        return self

    def wait_ready(self, timeout_s: float = 180) -> Engine:
        answer = self._answer(timeout_s)
        assert answer == {"ready": True}
        return self

    def call(self, name: str, *, timeout_s: float = 120, **arguments: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"call": name, **arguments}).encode() + b"\n")
        self.process.stdin.flush()
        answer = self._answer(timeout_s)
        if "error" in answer:
            raise RuntimeError(f"{name}: {answer['error']}\n{self.tail()}")
        return answer

    def generate(
        self,
        prompts: list[Any],
        params: list[dict[str, Any] | None] | None = None,
        max_tokens: int = 16,
        **more: Any,
    ) -> list[dict[str, Any]]:
        params = params if params is not None else [None] * len(prompts)
        answer = self.call("generate", prompts=prompts, params=params, max_tokens=max_tokens, **more)
        return list(answer["outputs"])

    def wait_idle(self, timeout_s: float = 30) -> dict[str, int]:
        """What the connector holds once it holds nothing; AssertionError at the deadline names what is left."""
        deadline = time.monotonic() + timeout_s
        while True:
            held = dict(self.call("status")["held"])
            if not any(held.values()):
                return held
            assert time.monotonic() < deadline, f"still held after {timeout_s} s: {held}"
            time.sleep(0.1)

    def tail(self, lines: int = 60) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def stop(self) -> None:
        if self.process.poll() is None:
            try:
                assert self.process.stdin is not None
                self.process.stdin.write(b'{"call": "quit"}\n')
                self.process.stdin.close()
                self.process.wait(20)
            except (OSError, subprocess.TimeoutExpired):
                self.process.kill()
                self.process.wait(10)
        os.close(self._reading)

    def _answer(self, timeout_s: float) -> dict[str, Any]:
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._buffer:
            left = deadline - time.monotonic()
            ready, _, _ = select.select([self._reading], [], [], max(left, 0))
            data = os.read(self._reading, 1 << 20) if ready else b""
            if not data:
                state = f"ended with {self.process.wait(5)}" if ready else f"did not answer within {timeout_s} s"
                raise RuntimeError(f"the engine {state}\n{self.tail()}")
            self._buffer += data
        line, self._buffer = self._buffer.split(b"\n", 1)
        answer: dict[str, Any] = json.loads(line)
        return answer

    def __enter__(self) -> Engine:
        return self.start().wait_ready()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def prefill_engine(model: Path, log: Path, config: dict[str, Any] | None = None, **options: Any) -> Engine:
    """A prefill side on vLLM's stock CPU backend."""
    transfer = {
        "kv_connector": "HawkConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"send_buffer_bytes": 256 << 20, **(config or {})},
    }
    return Engine({"model": str(model), "kv_transfer_config": transfer, **options}, log)


def decode_engine(
    model: Path,
    log: Path,
    npu: dict[str, Any] | None = None,
    config: dict[str, Any] | None = None,
    policy: str = "recompute",
    kv_connector_module_path: str | None = None,
    **options: Any,
) -> Engine:
    """A decode side on the simulated NPU."""
    transfer = {
        "kv_connector": "HawkConnector",
        "kv_role": "kv_consumer",
        "kv_load_failure_policy": policy,
        "kv_connector_extra_config": config or {},
    }
    if kv_connector_module_path is not None:
        transfer["kv_connector_module_path"] = kv_connector_module_path
    given = {
        "model": str(model),
        "kv_transfer_config": transfer,
        "additional_config": {"tt_plugin": {"kv_dtype": "float32", **(npu or {})}},
        "block_size": 64,
        **options,
    }
    return Engine(given, log, {"HAWK_NPU": "simulated"})


def like_engine(
    model: Path, log: Path, config: dict[str, Any] | None = None, policy: str = "recompute", **options: Any
) -> Engine:
    """A decode side in mode direct, on vLLM's stock CPU backend as the prefill side."""
    transfer = {
        "kv_connector": "HawkConnector",
        "kv_role": "kv_consumer",
        "kv_load_failure_policy": policy,
        "kv_connector_extra_config": {"mode": "direct", **(config or {})},
    }
    return Engine({"model": str(model), "kv_transfer_config": transfer, **options}, log)


REMOTE_DECODE = {"do_remote_decode": True, "do_remote_prefill": False}
