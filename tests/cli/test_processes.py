"""Supervision, on real child processes (small Python programs, no vLLM)."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from hawk_connector.cli.free_ports import free_ports
from hawk_connector.cli.guard import end_groups
from hawk_connector.cli.interrupt import StopSignal
from hawk_connector.cli.processes import (
    Death,
    Deployment,
    DeploymentError,
    ProcessSpec,
    StopRequested,
    log_tail,
    refuse_ports_in_use,
)

# Writes "NAME" to the file when it is told to end.
SERVER = """
import http.server, signal, sys
port, name, record = int(sys.argv[1]), sys.argv[2], sys.argv[3]
def end(*_):
    with open(record, "a") as file:
        file.write(name + "\\n")
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
print(name, "serves", flush=True)
http.server.HTTPServer(("127.0.0.1", port), Health).serve_forever()
"""
SLEEPER = "import time; print('up', flush=True); time.sleep(600)"
STUBBORN = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {SLEEPER}"


def server(name: str, record: Path) -> ProcessSpec:
    port = free_ports(1)[0]
    return ProcessSpec(
        name=name,
        argv=(sys.executable, "-c", SERVER, str(port), name, str(record)),
        health_url=f"http://127.0.0.1:{port}/health",
    )


def program(name: str, source: str, health_url: str | None = None) -> ProcessSpec:
    return ProcessSpec(name=name, argv=(sys.executable, "-c", source), health_url=health_url)


def wait_for(condition: Callable[[], bool], what: str) -> None:
    for _ in range(600):
        if condition():
            return
        time.sleep(0.05)
    raise AssertionError(f"never happened: {what}")


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    return tmp_path / "logs"


def test_stages_become_ready_in_order_and_stop_in_the_opposite(tmp_path: Path, logs: Path) -> None:
    record = tmp_path / "ended"
    said: list[str] = []
    stages = ((server("prefill", record), server("decode", record)), (server("router", record),))
    with Deployment(stages, logs, announce=said.append) as deployment:
        deployment.start()
        assert set(deployment.pids()) == {"prefill", "decode"}
        deployment.wait_ready()
        assert set(deployment.pids()) == {"prefill", "decode", "router"}
        pids = deployment.pids()
    assert record.read_text().split() == ["router", "decode", "prefill"]
    assert said[-1].startswith("router is ready")
    assert all(gone(pid) for pid in pids.values())
    assert deployment.pids() == {}
    assert (logs / "router.log").read_text().startswith("router serves\n")


def test_a_death_while_waiting_is_an_error_with_the_last_log_lines(tmp_path: Path, logs: Path) -> None:
    record = tmp_path / "ended"
    dying = program("decode", "print('no such device'); raise SystemExit(7)", "http://127.0.0.1:1/health")
    with Deployment(((server("prefill", record), dying),), logs) as deployment:
        deployment.start()
        with pytest.raises(DeploymentError) as caught:
            deployment.wait_ready()
    text = str(caught.value)
    assert "decode ended with code 7" in text
    assert str(logs / "decode.log") in text
    assert "| no such device" in text
    assert "prefill" not in text


def test_a_death_while_serving_is_reported_by_watch(tmp_path: Path, logs: Path) -> None:
    record = tmp_path / "ended"
    with Deployment(((server("prefill", record), server("decode", record)),), logs) as deployment:
        deployment.start()
        deployment.wait_ready()
        assert deployment.death() is None
        os.kill(deployment.pids()["prefill"], signal.SIGKILL)
        death = deployment.watch()
    assert death == Death("prefill", -signal.SIGKILL, logs / "prefill.log")
    assert str(death).startswith("prefill was killed by SIGKILL")
    assert record.read_text().split() == ["decode"]


def test_what_is_not_ready_in_time_is_named(logs: Path) -> None:
    times = iter(range(0, 1000, 10))
    slow = program("decode", SLEEPER, "http://127.0.0.1:1/health")
    with Deployment(((slow,),), logs, ready_timeout_s=30, clock=lambda: float(next(times))) as deployment:
        deployment.start()
        with pytest.raises(DeploymentError, match=r"not ready within 30 s: decode .no answer from http://127"):
            deployment.wait_ready()


def test_a_request_to_stop_ends_the_wait(logs: Path) -> None:
    slow = program("decode", SLEEPER, "http://127.0.0.1:1/health")
    with Deployment(((slow,),), logs, pause=lambda seconds: True) as deployment:
        deployment.start()
        with pytest.raises(StopRequested):
            deployment.wait_ready()


def test_a_process_that_ignores_sigterm_is_killed_after_the_deadline(logs: Path) -> None:
    with Deployment(((program("prefill", STUBBORN),),), logs, stop_timeout_s=0.5) as deployment:
        deployment.start()
        wait_for(lambda: log_tail(logs / "prefill.log") == ["up"], "the child runs")
        pid = deployment.pids()["prefill"]
    assert gone(pid)


def test_helpers_of_a_process_end_with_it(logs: Path) -> None:
    source = f"""
        import subprocess, sys, time
        helper = subprocess.Popen([sys.executable, "-c", {STUBBORN!r}], stdout=subprocess.PIPE)
        helper.stdout.readline()
        print(helper.pid, flush=True)
        time.sleep(600)
    """
    with Deployment(((program("prefill", textwrap.dedent(source)),),), logs) as deployment:
        deployment.start()
        wait_for(lambda: log_tail(logs / "prefill.log") != [], "the helper runs")
    helper = int((logs / "prefill.log").read_text())
    wait_for(lambda: gone(helper), "the helper ended")


def test_a_program_that_does_not_exist_is_named(logs: Path) -> None:
    deployment = Deployment(((ProcessSpec(name="router", argv=("/no/such/program",)),),), logs)
    with deployment, pytest.raises(DeploymentError, match=r"cannot start router \(/no/such/program\)"):
        deployment.start()


def test_the_log_of_the_run_before_is_kept(logs: Path) -> None:
    for word in ("first", "second"):
        with Deployment(((program("prefill", f"print('{word}')"),),), logs) as deployment:
            deployment.start()
            assert deployment.watch() == Death("prefill", 0, logs / "prefill.log")
    assert (logs / "prefill.log").read_text() == "second\n"
    assert (logs / "prefill.log.old").read_text() == "first\n"


@pytest.fixture
def listening() -> Iterator[int]:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        yield other.getsockname()[1]


def test_a_port_in_use_is_named_by_its_key(listening: int) -> None:
    with pytest.raises(DeploymentError) as caught:
        refuse_ports_in_use([("router.port", "127.0.0.1", free_ports(1)[0]), ("decode.port", "127.0.0.1", listening)])
    assert f"decode.port: 127.0.0.1:{listening}" in str(caught.value)
    assert "router.port" not in str(caught.value)


def test_free_ports_pass_and_stay_free() -> None:
    port = free_ports(1)[0]
    for _ in range(2):
        refuse_ports_in_use([("router.port", "127.0.0.1", port)])


def test_signals_end_a_pause_once_each() -> None:
    before = signal.getsignal(signal.SIGINT)  # ignored, where the tests run as a background job
    with StopSignal() as stop:
        assert stop.pause(0.0) is False
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(os.getpid(), number)
            assert stop.pause(30.0) is True
            assert stop.pause(0.0) is False
    assert signal.getsignal(signal.SIGINT) is before


def test_children_and_their_helpers_end_when_the_supervisor_is_killed(tmp_path: Path) -> None:
    # The child ends on SIGTERM and leaves its helper behind, as vLLM's server does while it starts.
    child = f"""
        import os, subprocess, sys, time
        helper = subprocess.Popen([sys.executable, "-c", {SLEEPER!r}], stdout=subprocess.PIPE)
        helper.stdout.readline()
        print(os.getpid(), helper.pid, flush=True)
        time.sleep(600)
    """
    supervisor = f"""
        import pathlib, sys, time
        from hawk_connector.cli.processes import Deployment, ProcessSpec
        spec = ProcessSpec(name="prefill", argv=(sys.executable, "-c", {textwrap.dedent(child)!r}))
        deployment = Deployment(((spec,),), pathlib.Path({str(tmp_path)!r}))
        deployment.start()
        time.sleep(600)
    """
    log = tmp_path / "prefill.log"
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(supervisor)]) as process:
        wait_for(lambda: log_tail(log) != [], "the child runs")
        pids = [int(word) for word in log.read_text().split()]
        assert len(pids) == 2
        assert not any(gone(pid) for pid in pids)
        process.kill()
    wait_for(lambda: all(gone(pid) for pid in pids), "both ended")


def test_the_guard_kills_what_ignores_sigterm() -> None:
    command = [sys.executable, "-c", STUBBORN]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        end_groups([process.pid], grace_s=0.2)
        assert process.wait() == -signal.SIGKILL
