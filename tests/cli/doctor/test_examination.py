"""The whole report: both sides together, the self-test's verdict, exit codes, JSON, and the page that describes it."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from hawk_connector.cli import deployment
from hawk_connector.cli.doctor import report
from hawk_connector.cli.doctor.examination import checks, examination
from hawk_connector.cli.doctor.findings import Finding, Status
from hawk_connector.cli.doctor.loopback import Loopback, run_self_test
from hawk_connector.cli.doctor.needs import default_needs, deployment_needs
from hawk_connector.self_test.report import Report
from tests.cli.doctor.machines import chip_files, machine, needs

ROOT = Path(__file__).parents[3]
GOOD = Report("", "tcp", "hawk's transform", 100, 2, 50)


def healthy(protocol: str, environment: Mapping[str, str]) -> Report:
    return GOOD


def installed(tmp_path: Path, **more: Any) -> Any:
    """All that a deployment over TCP needs."""
    answers: dict[str, Any] = {
        "version_of": {"vllm": "0.32.0", "mooncake-transfer-engine-non-cuda": "0.3.13"}.get,
        "plugins": lambda group: ("hawk", "hawk_npu"),
        "library_error": lambda name: None,
        "import_error": lambda module: None,
    }
    return machine(tmp_path, {"proc/meminfo": "MemAvailable: 99999999 kB\n"}, **(answers | more))


def by_name(findings: list[Finding]) -> dict[str, Finding]:
    return {f"{finding.side} {finding.name}": finding for finding in findings}


def test_what_both_sides_see_alike_is_told_once(tmp_path: Path) -> None:
    findings = by_name(examination(installed(tmp_path), [default_needs("prefill"), default_needs("decode")], healthy))
    assert {name for name in findings if name.startswith("prefill")} == {
        "prefill GPU",
        "prefill GPU peer memory",
        "prefill locked memory",
        "prefill memory",
    }
    assert findings["both vLLM"].required and findings["both self-test"].status is Status.PASS
    assert not any(finding.sick for finding in findings.values())
    assert findings["decode locked memory"].found.startswith("limit 8 MiB; the landing")


def test_sides_that_differ_are_told_apart(tmp_path: Path) -> None:
    sides = [needs("prefill", {"protocol": "rdma"}), needs("decode")]
    findings = by_name(examination(installed(tmp_path), sides, None))
    assert findings["prefill RDMA devices"].sick
    assert findings["decode RDMA devices"].status is Status.NOT_APPLICABLE


def test_the_self_test_runs_once_for_each_protocol_with_the_sides_variables(tmp_path: Path) -> None:
    asked: list[tuple[str, dict[str, str]]] = []

    def run(protocol: str, environment: Mapping[str, str]) -> Report:
        asked.append((protocol, dict(environment)))
        return GOOD

    of = installed(tmp_path, environment={"A": "1", "B": "1"})
    examination(of, [needs("prefill", environment={"B": "2"}), needs("decode")], run)
    assert asked == [("tcp", {"A": "1", "B": "2"})]
    asked.clear()
    examination(of, [needs("prefill", {"protocol": "rdma"}), needs("decode")], run)
    assert [protocol for protocol, _ in asked] == ["rdma", "tcp"]


def test_variables_of_the_deployment_count(tmp_path: Path) -> None:
    side = needs("decode", {"protocol": "rdma"}, environment={"MC_FORCE_TCP": "1"})
    assert by_name(examination(installed(tmp_path), [side], None))["decode RDMA environment"].sick


@pytest.mark.parametrize(
    ("result", "self_test", "transport"),
    [
        (GOOD, Status.PASS, Status.PASS),
        (Report("", "tcp", "", 1, 1, 1), Status.PASS, Status.PASS),
        (Report("", "rdma", "", 1, 1, 1), Status.PASS, Status.FAIL),
        (Report("", "unknown", "", 1, 1, 1), Status.PASS, Status.UNKNOWN),
        (Report("wrong bytes", "tcp"), Status.FAIL, Status.PASS),
        (Report("no Mooncake"), Status.FAIL, Status.UNKNOWN),
    ],
)
def test_verdicts_on_the_self_test(result: Report, self_test: Status, transport: Status, tmp_path: Path) -> None:
    findings = by_name(examination(installed(tmp_path), [needs("decode")], lambda protocol, environment: result))
    assert findings["decode self-test"].status is self_test
    assert findings["decode transport"].status is transport
    assert findings["decode self-test"].sick == bool(result.error)


def test_rdma_that_ran_over_tcp_is_a_failure(tmp_path: Path) -> None:
    findings = by_name(examination(installed(tmp_path), [needs("decode", {"protocol": "rdma"})], healthy))
    finding = findings["decode transport"]
    assert finding.sick and finding.found == "rdma is configured, tcp was used"


def deployment_of(name: str, **npu: Any) -> deployment.DeploymentConfig:
    data = yaml.safe_load((ROOT / "configs" / name).read_text())
    data["decode"]["npu"]["config"] |= npu
    return deployment.parse(yaml.safe_dump(data))


def test_needs_of_the_shipped_deployments() -> None:
    simulated = deployment_needs(deployment_of("cpu-simulated.yaml"), "decode")
    assert (simulated.rdma, simulated.npu, simulated.silicon, simulated.direct) == (False, "simulated", False, False)
    assert simulated.environment["MC_FORCE_TCP"] == "1"
    assert [port for _, _, port in simulated.ports] == [8200, 18560]
    prefill = deployment_needs(deployment_of("cpu-simulated.yaml"), "prefill")
    assert [port for _, _, port in prefill.ports] == [8100, 18550] and prefill.npu is None
    silicon = deployment_needs(deployment_of("gpu-tenstorrent.yaml"), "decode")
    assert (silicon.rdma, silicon.silicon, silicon.direct, silicon.banks, silicon.chips) == (True, True, False, 8, 1)
    nodes = ["/dev/tenstorrent/1", "/dev/tenstorrent/0"]
    direct = deployment_of(
        "gpu-tenstorrent.yaml", landing={"path": "direct", "device_nodes": nodes}, device="blackhole-p100"
    )
    found = deployment_needs(direct, "decode")
    assert (found.direct, found.banks, found.chips, found.nodes) == (True, 7, 2, tuple(nodes))
    bounce = deployment_of("gpu-tenstorrent.yaml", landing={"path": "bounce"}, chips=4)
    assert (deployment_needs(bounce, "decode").direct, deployment_needs(bounce, "decode").chips) == (False, 4)


def test_the_direct_path_on_a_whole_machine(tmp_path: Path) -> None:
    """All of it there, then the one module missing that lets a network card reach the windows."""
    place = "sys/class/infiniband/mlx5_0/ports/1"
    files = chip_files(0) | {
        f"{place}/state": "4: ACTIVE",
        f"{place}/link_layer": "Ethernet",
        f"{place}/gids/3": "0000:0000:0000:0000:0000:ffff:0a00:0001",
        f"{place}/gid_attrs/types/3": "RoCE v2",
        "dev/infiniband/uverbs0": "",
        "etc/libibverbs.d/mlx5.driver": "",
        "sys/module/hawk_peermem/state/peer_memory_core": "registered",
        "sys/kernel/mm/hugepages/hugepages-1048576kB/nr_hugepages": "1",
    }
    packages = {
        "vllm": "0.25.1",
        "mooncake-transfer-engine-non-cuda": "0.3.13",
        "ttnn": "0.81.1",
        "vllm-tt-plugin": "0.1.0",
    }
    of = installed(tmp_path, version_of=packages.get, memlock=lambda: None)
    path = {"path": "direct", "device_nodes": ["/dev/tenstorrent/0"]}
    direct = deployment_of("gpu-tenstorrent.yaml", landing=path)
    machine(tmp_path, files)
    side = deployment_needs(direct, "decode")
    over_rdma = Report("", "rdma", "", 1, 1, 1)

    def sick() -> list[str]:
        return [f.name for f in examination(of, [side], lambda protocol, environment: over_rdma) if f.sick]

    assert sick() == []
    (tmp_path / "sys/module/hawk_peermem/state/peer_memory_core").unlink()
    for directory in ("state", "."):
        (tmp_path / "sys/module/hawk_peermem" / directory).rmdir()
    assert sick() == ["peer memory"]


def findings_of_each_kind() -> list[Finding]:
    return [
        Finding("a", "both", Status.PASS, True, "there [x]", ""),
        Finding("b", "decode", Status.FAIL, True, "gone", "Do this."),
        Finding("c", "decode", Status.FAIL, False, "slow", "Do that."),
        Finding("d", "prefill", Status.UNKNOWN, True, "dark", ""),
        Finding("e", "prefill", Status.NOT_APPLICABLE, False, "none", ""),
    ]


def test_the_table_has_every_finding_and_what_to_do() -> None:
    console = Console(file=io.StringIO(), width=100)
    report.show(findings_of_each_kind(), console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert re.search(r"^both +a +pass +there \[x\]", text, re.M)
    assert re.search(r"^decode +b +fail +gone\s+> Do this\.", text, re.M)
    assert text.strip().endswith("does not work: b; could be better: c; could not check: d")


def test_the_json_is_a_list_under_checks() -> None:
    parsed = json.loads(report.as_json(findings_of_each_kind()))
    assert parsed["healthy"] is False
    assert [check["status"] for check in parsed["checks"]] == [
        "pass",
        "fail",
        "fail",
        "could not check",
        "not applicable",
    ]
    assert parsed["checks"][1] == {
        "name": "b",
        "side": "decode",
        "status": "fail",
        "required": True,
        "found": "gone",
        "mend": "Do this.",
    }
    well = [f for f in findings_of_each_kind() if f.name != "b"]
    assert json.loads(report.as_json(well))["healthy"] is True


def test_the_page_describes_every_check() -> None:
    page = (ROOT / "docs" / "doctor.md").read_text()
    rows = re.findall(r"^\| ([\w -]+) \| (?:prefill|decode|both) \|", page, re.M)
    assert rows == [check.name for check in checks(Loopback("tcp", {}, healthy))]


# --- the command itself


def hawk(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hawk_connector.cli.main", "doctor", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_this_machine_can_run_a_deployment_over_tcp_and_says_what_it_lacks() -> None:
    done = hawk("--json")
    assert done.returncode == 0, done.stdout + done.stderr
    found = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert found["self-test"]["status"] == found["transport"]["status"] == "pass"
    assert re.fullmatch(
        r"786432 bytes in 42 reads over tcp, packed by hawk's transform; 4096 elements right",
        found["self-test"]["found"],
    )
    assert found["transport"]["found"] == "tcp is configured, tcp was used"
    assert found["Mooncake"]["status"] == "pass"


@pytest.mark.slow
def test_a_configuration_that_this_machine_cannot_serve_is_code_1(tmp_path: Path) -> None:
    """No machine that runs these tests has 64 chips."""
    data = yaml.safe_load((ROOT / "configs" / "gpu-tenstorrent.yaml").read_text())
    data["decode"]["npu"]["config"]["chips"] = 64
    file = tmp_path / "d.yaml"
    file.write_text(yaml.safe_dump(data))
    done = hawk("--side", "decode", "--config", str(file), "--no-self-test")
    assert done.returncode == 1
    assert "does not work:" in done.stdout and "NPU chips" in done.stdout
    assert "self-test" not in done.stdout


@pytest.mark.slow
def test_a_file_that_is_not_there_is_one_line_and_code_1() -> None:
    done = hawk("--config", "no-such.yaml")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert done.stderr.startswith("hawk: cannot read the deployment file no-such.yaml")


@pytest.mark.slow
def test_a_self_test_whose_process_dies_is_a_report(tmp_path: Path) -> None:
    (tmp_path / "mooncake").mkdir()
    (tmp_path / "mooncake" / "__init__.py").write_text("")
    (tmp_path / "mooncake" / "engine.py").write_text(
        "import os, sys\nsys.stderr.write('no device\\n')\nsys.stderr.flush()\nos._exit(7)\n"
    )
    found = run_self_test("tcp", {"PYTHONPATH": str(tmp_path), "PATH": "/usr/bin:/bin"})
    assert found.error == "it ended with code 7: no device"


def test_local_sides_need_no_mooncake_and_no_firewall(tmp_path: Path) -> None:
    bare = installed(tmp_path, version_of={"vllm": "0.32.0"}.get, library_error=lambda name: "not found")
    sides = [needs("prefill", {"protocol": "local"}), needs("decode", {"protocol": "local"})]
    findings = by_name(examination(bare, sides, lambda protocol, environment: Report("", protocol, "", 1, 1, 1)))
    for name in ("both Mooncake", "both shared libraries", "both firewall"):
        assert findings[name].status is Status.NOT_APPLICABLE, name
    assert findings["both self-test"].status is findings["both transport"].status is Status.PASS
    assert not any(finding.sick for finding in findings.values())
    refused = examination(bare, sides[:1], lambda protocol, environment: Report("process_vm_readv is refused"))
    assert "protocol local" in by_name(refused)["prefill self-test"].mend


@pytest.mark.slow
def test_the_self_test_over_the_local_engine() -> None:
    found = run_self_test("local", dict(os.environ))
    assert (found.error, found.transport, found.segments) == ("", "local", 42)
