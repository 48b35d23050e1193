"""The self-test, run in a process of its own, and what carried its bytes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Literal

import msgspec

from hawk_connector.self_test.report import Report

from .findings import Need, Outcome, failed, passed, unknown
from .machine import Machine
from .needs import Needs

__all__ = ["Loopback", "SelfTest", "SelfTestRun", "Transport", "run_self_test"]

Protocol = Literal["tcp", "rdma", "local"]
SelfTestRun = Callable[[Protocol, Mapping[str, str]], Report]

# Its parts take about a second; a machine that compiles or is busy may need many.
_DEADLINE_S = 120.0


def run_self_test(protocol: Protocol, environment: Mapping[str, str]) -> Report:
    """Runs it; a process that dies or does not end is a report too."""
    command = [sys.executable, "-m", "hawk_connector.self_test", "127.0.0.1", protocol]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_DEADLINE_S, env=dict(environment))
    except subprocess.TimeoutExpired:
        return Report(f"it had not ended after {_DEADLINE_S:g} s")
    for line in reversed(done.stdout.splitlines()):
        try:
            return msgspec.json.decode(line, type=Report)
        except msgspec.DecodeError:
            continue
    last = done.stderr.strip().splitlines()[-1:]
    return Report(f"it ended with code {done.returncode}: {''.join(last) or 'no message'}")


class Loopback:
    """One run of the self-test, made when first asked for."""

    def __init__(self, protocol: Protocol, environment: Mapping[str, str], run: SelfTestRun) -> None:
        self.protocol = protocol
        self._environment = environment
        self._run = run

    @cached_property
    def report(self) -> Report:
        return self._run(self.protocol, self._environment)


class _OfTheLoopback:
    def __init__(self, loopback: Loopback) -> None:
        self._loopback = loopback

    def need(self, needs: Needs) -> Need | None:
        return Need.REQUIRED


class SelfTest(_OfTheLoopback):
    """A parcel through the transfer engine from a send buffer into simulated banks, looked at element by element."""

    name = "self-test"

    def look(self, machine: Machine, needs: Needs) -> Outcome:
        report = self._loopback.report
        if report.error:
            return failed(
                report.error,
                "See docs/security.md for what protocol local needs, or set protocol to tcp."
                if self._loopback.protocol == "local"
                else "See Mooncake and the shared libraries above; MC_LOG_LEVEL=INFO shows its reason.",
            )
        return passed(
            f"{report.nbytes} bytes in {report.segments} reads over {self._loopback.protocol}, packed by "
            f"{report.packer}; {report.elements} elements right"
        )


class Transport(_OfTheLoopback):
    """What Mooncake really used: it takes TCP without a word where it finds no RDMA device."""

    name = "transport"

    def look(self, machine: Machine, needs: Needs) -> Outcome:
        report = self._loopback.report
        if report.error and report.transport == "unknown":
            return unknown("the self-test did not get so far")
        if report.transport == "unknown":
            return unknown("neither a TCP connection nor a verbs device was open after the self-test's reads")
        text = f"{self._loopback.protocol} is configured, {report.transport} was used"
        if report.transport != self._loopback.protocol:
            return failed(text, "Mend the RDMA points above, or set protocol to tcp.")
        return passed(text)
