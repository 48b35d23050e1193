"""The `hawk` command as a user runs it: what it prints and the code that it ends with."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml

from hawk_connector.cli.free_ports import free_ports
from tests.models.tiny import TinyLlama

SIMULATED = Path(__file__).parents[2] / "configs" / "cpu-simulated.yaml"


def hawk(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hawk_connector.cli.main", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def deployment_file(path: Path, model: str, prefill_arguments: dict[str, object]) -> Path:
    """The simulated deployment on free ports."""
    data = yaml.safe_load(SIMULATED.read_text())
    ports = free_ports(6)
    for number, name in enumerate(("prefill", "decode")):
        data[name]["port"] = ports[2 * number]
        data[name]["hawk"]["side_channel_port"] = ports[2 * number + 1]
    data["decode"]["hawk"]["peers"] = [f"127.0.0.1:{ports[1]}"]
    data["router"] |= {"port": ports[4], "prometheus_port": ports[5]}
    data["model"] = model
    data["stop_timeout_s"] = 3
    data["prefill"]["vllm"] |= prefill_arguments
    path.write_text(yaml.safe_dump(data))
    return path


def test_a_file_that_is_not_there_is_one_line_and_code_1() -> None:
    done = hawk("up", "no-such.yaml")
    assert done.returncode == 1
    assert done.stderr.startswith("hawk: cannot read the deployment file no-such.yaml")
    assert done.stderr.count("\n") == 1


def test_an_unknown_model_lists_the_known_ones(tmp_path: Path) -> None:
    done = hawk("up", str(deployment_file(tmp_path / "d.yaml", "smollm3", {})), "--print-only")
    assert done.returncode == 1
    assert "'smollm3' is no directory and no model known by name" in done.stderr
    assert "smollm2-135m-instruct" in done.stderr


def test_a_port_in_use_is_named_before_anything_starts(tmp_path: Path) -> None:
    path = deployment_file(tmp_path / "d.yaml", str(tmp_path), {})
    port = yaml.safe_load(path.read_text())["decode"]["port"]
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))
        other.listen()
        done = hawk("up", str(path), "--logs", str(tmp_path / "logs"))
    assert done.returncode == 1
    assert f"decode.port: 127.0.0.1:{port}" in done.stderr
    assert not (tmp_path / "logs").exists()


@pytest.mark.vllm
def test_a_server_that_cannot_start_ends_the_deployment(tmp_path: Path, model_cache: Path) -> None:
    model = TinyLlama().directory(model_cache)
    path = deployment_file(tmp_path / "d.yaml", str(model), {"no-such-argument": 1})
    done = hawk("up", str(path), "--logs", str(tmp_path / "logs"))
    assert done.returncode == 1
    assert "hawk: prefill ended with code 2" in done.stderr
    assert "no-such-argument" in done.stderr
    assert str(tmp_path / "logs" / "prefill.log") in done.stderr


@pytest.mark.vllm
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_everything_with_code_0(tmp_path: Path, model_cache: Path, number: signal.Signals) -> None:
    model = TinyLlama().directory(model_cache)
    path = deployment_file(tmp_path / "d.yaml", str(model), {})
    log = tmp_path / "logs" / "decode.log"
    command = [sys.executable, "-m", "hawk_connector.cli.main", "up", str(path), "--logs", str(log.parent)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        while not (log.exists() and log.stat().st_size):
            assert process.poll() is None
            time.sleep(0.1)
        children = psutil.Process(process.pid).children(recursive=True)
        os.kill(process.pid, number)
        output, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    assert "vllm serve" in output
    assert len(children) >= 3
    _, alive = psutil.wait_procs(children, timeout=30)
    assert alive == []
