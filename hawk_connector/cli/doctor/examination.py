"""All checks, in the order of the report, and their findings for one or both sides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from . import host, npu, rdma, software
from .findings import Check, Finding, examine
from .loopback import Loopback, SelfTest, SelfTestRun, Transport
from .machine import Machine
from .needs import Needs

__all__ = ["checks", "examination"]


def checks(loopback: Loopback | None) -> list[Check]:
    """``loopback``: the self-test, None to leave it out."""
    found: list[Check] = [
        software.Vllm(),
        software.VllmPlugin(),
        software.SharedLibraries(),
        software.Mooncake(),
        software.TenstorrentSoftware(),
        npu.NpuDriver(),
        npu.NpuChips(),
        npu.BankWindows(),
        npu.BarSizes(),
        npu.Hugepages(),
        npu.Iommu(),
        npu.PeerMemory(),
        npu.DmaBuf(),
        rdma.RdmaDevices(),
        rdma.RdmaPorts(),
        rdma.RdmaGids(),
        rdma.Verbs(),
        rdma.RdmaEnvironment(),
        rdma.LockedMemory(),
        rdma.Gpu(),
        rdma.GpuPeerMemory(),
        host.Memory(),
        host.Clock(),
        host.Ports(),
        host.Peers(),
        host.CurveKeyFiles(),
        host.Firewall(),
    ]
    return found if loopback is None else [*found, SelfTest(loopback), Transport(loopback)]


def examination(machine: Machine, sides: Sequence[Needs], self_test: SelfTestRun | None) -> list[Finding]:
    """Every finding, check by check; where both sides found the same it is one finding of both.

    ``self_test``: runs it over a protocol, once for each that the sides use; None leaves it out.
    """
    loopbacks: dict[str, Loopback] = {}
    columns = []
    for needs in sides:
        variables = {**machine.environment, **needs.environment}
        loopback = None
        if self_test is not None:
            protocol = needs.hawk.protocol
            loopback = loopbacks.setdefault(protocol, Loopback(protocol, variables, self_test))
        seen_from = replace(machine, environment=variables)
        columns.append([examine(check, seen_from, needs) for check in checks(loopback)])
    findings: list[Finding] = []
    for row in zip(*columns, strict=True):
        seen = [finding for finding in row if finding is not None]
        if len(seen) == 2 and replace(seen[0], side=seen[1].side, required=seen[1].required) == seen[1]:
            findings.append(replace(seen[0], side="both", required=seen[0].required or seen[1].required))
        else:
            findings += seen
    return findings
