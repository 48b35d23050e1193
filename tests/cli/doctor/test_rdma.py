"""What the doctor says of the network card and the GPU, on machines that are trees of files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hawk_connector.cli.doctor.findings import Status
from hawk_connector.cli.doctor.rdma import (
    Gpu,
    GpuPeerMemory,
    LockedMemory,
    RdmaDevices,
    RdmaEnvironment,
    RdmaGids,
    RdmaPorts,
    Verbs,
)
from tests.cli.doctor.machines import GIB, machine, needs, port_files, seen

RDMA = needs("decode", {"protocol": "rdma"})
PREFILL = needs("prefill", {"protocol": "rdma", "send_buffer_bytes": GIB})
TCP = needs("decode")

V4 = "0000:0000:0000:0000:0000:ffff:c0a8:0a05"
LINK_LOCAL = "fe80:0000:0000:0000:0200:00ff:fe00:0000"
NONE = "0000:0000:0000:0000:0000:0000:0000:0000"
V2 = "RoCE v2"


@pytest.mark.parametrize(
    "check",
    [RdmaDevices(), RdmaPorts(), RdmaGids(), Verbs(), LockedMemory(), RdmaEnvironment()],
    ids=lambda c: str(c.name),
)
def test_tcp_needs_none_of_it(check: Any, tmp_path: Path) -> None:
    of = machine(tmp_path, environment={"MC_FORCE_TCP": "1"})
    finding = seen(check, of, TCP)
    assert (finding.status, finding.mend) == (Status.NOT_APPLICABLE, "")
    assert seen(check, of, RDMA).sick


def test_devices_are_named_with_their_drivers(tmp_path: Path) -> None:
    of = machine(tmp_path, port_files("mlx5_0") | port_files("rxe0"))
    link = tmp_path / "sys/class/infiniband/mlx5_0/device/driver"
    link.parent.mkdir(parents=True)
    link.symlink_to("../../bus/pci/drivers/mlx5_core")
    assert seen(RdmaDevices(), of, RDMA).found == "mlx5_0 (mlx5_core), rxe0 (software)"


@pytest.mark.parametrize(("state", "status"), [("4: ACTIVE", Status.PASS), ("1: DOWN", Status.FAIL)])
def test_one_port_must_be_active(state: str, status: Status, tmp_path: Path) -> None:
    of = machine(tmp_path, port_files("a", state="1: DOWN") | port_files("b", state=state))
    finding = seen(RdmaPorts(), of, RDMA)
    assert finding.status is status
    assert finding.found == f"a/1: 1: DOWN, Ethernet, b/1: {state}, Ethernet"


@pytest.mark.parametrize(
    ("files", "status", "words"),
    [
        (port_files(gids={"0": (LINK_LOCAL, V2), "1": (V4, V2)}), Status.PASS, f"mlx5_0/1 index 1: {V4}"),
        (port_files(gids={"0": (LINK_LOCAL, V2), "1": (NONE, None)}), Status.FAIL, "1 on active ports"),
        (port_files(gids={"3": (V4, "IB/RoCE v1")}), Status.FAIL, "1 on active ports"),
        (port_files(gids={"3": (V4, V2)}, state="1: DOWN"), Status.FAIL, "0 on active ports"),
        (port_files(gids={"0": (LINK_LOCAL, None)}, layer="InfiniBand"), Status.PASS, f"index 0: {LINK_LOCAL}"),
    ],
)
def test_roce_needs_an_address_that_can_be_routed(
    files: dict[str, str | None], status: Status, words: str, tmp_path: Path
) -> None:
    finding = seen(RdmaGids(), machine(tmp_path, files), RDMA)
    assert (finding.status, words in finding.found) == (status, True), finding.found


@pytest.mark.parametrize(("chosen", "status"), [("1", Status.PASS), ("0", Status.FAIL), ("11", Status.FAIL)])
def test_a_chosen_index_must_be_one_of_them(chosen: str, status: Status, tmp_path: Path) -> None:
    of = machine(
        tmp_path, port_files(gids={"0": (LINK_LOCAL, V2), "1": (V4, V2)}), environment={"MC_GID_INDEX": chosen}
    )
    finding = seen(RdmaGids(), of, RDMA)
    assert finding.status is status
    assert finding.found.endswith(f"; MC_GID_INDEX={chosen}")


def test_verbs_need_nodes_permission_and_a_user_space_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of = machine(tmp_path, {"etc/libibverbs.d/mlx5.driver": "driver mlx5"})
    assert "Load ib_uverbs" in seen(Verbs(), of, RDMA).mend
    of = machine(tmp_path, {"dev/infiniband/uverbs0": "", "dev/infiniband/rdma_cm": ""})
    assert seen(Verbs(), of, RDMA).found == "nodes: uverbs0; user-space drivers: mlx5"
    assert seen(Verbs(), of, RDMA).status is Status.PASS
    (tmp_path / "etc/libibverbs.d/mlx5.driver").unlink()
    assert "ibverbs-providers" in seen(Verbs(), of, RDMA).mend
    monkeypatch.setattr("os.access", lambda path, mode: False)
    assert "no permission" in seen(Verbs(), of, RDMA).found


@pytest.mark.parametrize(
    ("limit", "capabilities", "prefill", "decode"),
    [
        (None, "0", Status.PASS, Status.PASS),
        (GIB, "0", Status.PASS, Status.FAIL),
        (GIB - 1, "0", Status.FAIL, Status.FAIL),
        (0, "4000", Status.PASS, Status.PASS),
        (0, "bfff", Status.FAIL, Status.FAIL),
    ],
)
def test_what_may_be_locked(
    limit: int | None, capabilities: str, prefill: Status, decode: Status, tmp_path: Path
) -> None:
    """CAP_IPC_LOCK is capability 14."""
    of = machine(tmp_path, {"proc/self/status": f"Name:\tx\nCapEff:\t{capabilities}\n"}, memlock=lambda: limit)
    assert seen(LockedMemory(), of, PREFILL).status is prefill
    assert seen(LockedMemory(), of, RDMA).status is decode


def test_a_gpu_is_advised_to_a_prefill_side_alone(tmp_path: Path) -> None:
    bare = machine(tmp_path)
    finding = seen(Gpu(), bare, PREFILL)
    assert (finding.status, finding.sick) == (Status.FAIL, False)
    assert seen(Gpu(), bare, needs("prefill")).status is Status.NOT_APPLICABLE
    assert Gpu().need(RDMA) is None
    of = machine(tmp_path, {"proc/driver/nvidia/version": "NVRM version: 595.45\nGCC version: 12\n"})
    assert seen(Gpu(), of, PREFILL).found == "NVRM version: 595.45"


@pytest.mark.parametrize(
    ("loaded", "wheel", "asked", "status"),
    [
        (True, "mooncake-transfer-engine-non-cuda", "", Status.PASS),
        (False, "mooncake-transfer-engine-non-cuda", "", Status.FAIL),
        (False, "mooncake-transfer-engine", "", Status.PASS),
        (False, "mooncake-transfer-engine-cuda13", "0", Status.PASS),
        (False, "mooncake-transfer-engine", "1", Status.FAIL),
        (True, "mooncake-transfer-engine", "1", Status.PASS),
    ],
)
def test_gpu_memory_is_registered_by_dma_buf_or_by_nvidia_peermem(
    loaded: bool, wheel: str, asked: str, status: Status, tmp_path: Path
) -> None:
    files: dict[str, str | None] = {"proc/driver/nvidia/version": "NVRM\n"}
    if loaded:
        files["sys/module/nvidia_peermem/refcnt"] = "0"
    of = machine(
        tmp_path,
        files,
        version_of=lambda name: "0.3.13" if name == wheel else None,
        environment={"WITH_NVIDIA_PEERMEM": asked},
    )
    assert seen(GpuPeerMemory(), of, PREFILL).status is status


def test_without_a_gpu_no_peer_memory_is_needed(tmp_path: Path) -> None:
    assert seen(GpuPeerMemory(), machine(tmp_path), PREFILL).status is Status.PASS
