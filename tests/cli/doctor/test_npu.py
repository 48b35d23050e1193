"""What the doctor says of the NPU, on machines that are trees of files."""

from __future__ import annotations

from pathlib import Path

import pytest

from hawk_connector.cli.doctor.findings import Status
from hawk_connector.cli.doctor.npu import (
    BankWindows,
    BarSizes,
    DmaBuf,
    Hugepages,
    Iommu,
    NpuChips,
    NpuDriver,
    PeerMemory,
)
from tests.cli.doctor.machines import GIB, chip_files, machine, needs, port_files, seen

SILICON = needs("decode", npu="silicon")
DIRECT = needs("decode", {"protocol": "rdma"}, npu="silicon", direct=True, nodes=("/dev/tenstorrent/0",))
SIMULATED = needs("decode", npu="simulated")


def group(chip: int, kind: str) -> dict[str, str | None]:
    """The chip's IOMMU group."""
    return {f"sys/class/tenstorrent/tenstorrent!{chip}/device/iommu_group/type": f"{kind}\n"}


ALL = (BankWindows(), BarSizes(), DmaBuf(), Hugepages(), Iommu(), NpuChips(), NpuDriver(), PeerMemory())


@pytest.mark.parametrize("check", ALL, ids=lambda check: str(check.name))
def test_an_empty_machine_fails_no_simulated_deployment(check: object, tmp_path: Path) -> None:
    finding = seen(check, machine(tmp_path), SIMULATED)  # type: ignore[arg-type]
    assert finding.status in (Status.NOT_APPLICABLE, Status.PASS)
    assert not finding.sick and finding.mend == ""


@pytest.mark.parametrize("check", ALL, ids=lambda check: str(check.name))
def test_the_prefill_side_has_no_npu(check: object, tmp_path: Path) -> None:
    assert check.need(needs("prefill", {"protocol": "rdma"})) is None  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("files", "status", "words"),
    [
        ({}, Status.FAIL, "tt-kmd is not loaded"),
        ({"sys/module/tenstorrent/version": "2.10.0\n"}, Status.PASS, "tt-kmd 2.10.0"),
        ({"sys/module/tenstorrent/version": "2.10.1-pre"}, Status.PASS, "tt-kmd 2.10.1-pre"),
        ({"sys/module/tenstorrent/version": "1.34.0"}, Status.FAIL, "tt-kmd 1.34.0"),
        ({"sys/module/tenstorrent/version": "private"}, Status.UNKNOWN, "version is private"),
        ({"sys/module/tenstorrent/refcnt": "0"}, Status.UNKNOWN, "version is not told"),
        ({"sys/module/tenstorrent/version": None}, Status.UNKNOWN, "Is a directory"),
    ],
)
def test_the_driver(files: dict[str, str | None], status: Status, words: str, tmp_path: Path) -> None:
    finding = seen(NpuDriver(), machine(tmp_path, files), SILICON)
    assert (finding.status, words in finding.found) == (status, True)
    assert bool(finding.mend) == (status is Status.FAIL or "directory" in words)


def test_chips_are_named_and_counted(tmp_path: Path) -> None:
    of = machine(tmp_path, chip_files(0) | chip_files(3, device="0x401e"))
    assert seen(NpuChips(), of, SILICON).found == "/dev/tenstorrent/0 Blackhole, /dev/tenstorrent/3 Wormhole"
    two = seen(NpuChips(), of, needs("decode", npu="silicon", chips=2))
    three = seen(NpuChips(), of, needs("decode", npu="silicon", chips=3))
    assert (two.status, three.status) == (Status.PASS, Status.FAIL)
    assert "3 are configured" in three.found


@pytest.mark.parametrize(
    ("nodes", "words"),
    [
        ((0,), ""),
        ((0, 3), "The direct path needs Blackhole"),
        ((0, 7), "Name nodes that are there"),
        ((), "needs landing.device_nodes"),
    ],
)
def test_the_direct_path_takes_the_nodes_that_are_named(nodes: tuple[int, ...], words: str, tmp_path: Path) -> None:
    of = machine(tmp_path, chip_files(0) | chip_files(3, device="0x401e"))
    named = tuple(f"/dev/tenstorrent/{node}" for node in nodes)
    finding = seen(NpuChips(), of, needs("decode", npu="silicon", direct=True, nodes=named))
    assert (finding.sick, words in finding.mend) == (bool(words), True)
    windows = seen(BankWindows(), of, needs("decode", npu="silicon", direct=True, nodes=named[:1]))
    assert windows.sick == (not nodes)  # with none named Wormhole counts too


def test_a_node_without_permission_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of = machine(tmp_path, chip_files(0) | chip_files(1))
    monkeypatch.setattr("os.access", lambda path, mode: not str(path).endswith("/1"))
    finding = seen(NpuChips(), of, SILICON)
    assert finding.sick and finding.found.endswith("no permission for 1")


@pytest.mark.parametrize(
    ("bar4", "banks", "windows", "status"),
    [
        (32 * GIB, 8, 8, Status.PASS),
        (32 * GIB - 4096, 8, 7, Status.FAIL),
        (32 * GIB - 4096, 7, 7, Status.PASS),
        (4 * GIB, 8, 1, Status.FAIL),
        (0, 8, 0, Status.FAIL),
    ],
)
def test_windows_are_counted_in_bar4(bar4: int, banks: int, windows: int, status: Status, tmp_path: Path) -> None:
    of = machine(tmp_path, chip_files(0, bar4=bar4))
    wanted = needs("decode", npu="silicon", direct=True, banks=banks)
    finding = seen(BankWindows(), of, wanted)
    assert finding.status is status
    assert f"chip 0: {windows}" in finding.found
    assert seen(BarSizes(), of, wanted).status is status


def test_who_may_hold_windows_is_named(tmp_path: Path) -> None:
    finding = seen(BankWindows(), machine(tmp_path, chip_files(0, users="4711\n4712\n")), DIRECT)
    assert finding.found.endswith("processes that may hold some: chip 0: 4711 4712")


def test_wormhole_has_no_windows_of_that_size(tmp_path: Path) -> None:
    finding = seen(BankWindows(), machine(tmp_path, chip_files(0, device="0x401e")), DIRECT)
    assert finding.sick and "landing.path to bounce" in finding.mend


def test_bar_sizes_are_in_words(tmp_path: Path) -> None:
    finding = seen(BarSizes(), machine(tmp_path, chip_files(0)), DIRECT)
    assert finding.found == "chip 0: BAR0 512 MiB, BAR2 1 MiB, BAR4 32 GiB"
    (tmp_path / "sys/class/tenstorrent/tenstorrent!0/device/resource").unlink()
    assert seen(BarSizes(), machine(tmp_path), DIRECT).status is Status.UNKNOWN


@pytest.mark.parametrize(
    ("files", "status"),
    [
        ({}, Status.FAIL),
        ({"sys/kernel/mm/hugepages/hugepages-1048576kB/nr_hugepages": "1\n"}, Status.FAIL),
        ({"sys/kernel/mm/hugepages/hugepages-1048576kB/nr_hugepages": "2\n"}, Status.PASS),
        (chip_files(0) | group(0, "DMA"), Status.PASS),
        (chip_files(0) | group(0, "DMA-FQ") | chip_files(1) | group(1, "DMA"), Status.PASS),
        # Groups that are there translate nothing by that: with iommu=pt the chip's is of type identity.
        ({"sys/kernel/iommu_groups/0/type": "DMA\n"}, Status.FAIL),
        (chip_files(0) | group(0, "identity"), Status.FAIL),
        (chip_files(0) | group(0, "DMA") | chip_files(1) | group(1, "identity"), Status.FAIL),
        (chip_files(0) | group(0, "DMA") | chip_files(1), Status.FAIL),
    ],
)
def test_hugepages_one_a_chip_unless_an_iommu_translates(
    files: dict[str, str | None], status: Status, tmp_path: Path
) -> None:
    wanted = needs("decode", npu="silicon", chips=2)
    assert seen(Hugepages(), machine(tmp_path, files), wanted).status is status


@pytest.mark.parametrize(("kind", "status"), [("identity", Status.PASS), ("DMA-FQ", Status.FAIL)])
def test_an_iommu_that_translates_is_told_and_stops_nothing(kind: str, status: Status, tmp_path: Path) -> None:
    files = chip_files(0) | {
        "sys/kernel/iommu_groups/9/type": kind,
        "sys/class/tenstorrent/tenstorrent!0/device/iommu_group/type": f"{kind}\n",
    }
    finding = seen(Iommu(), machine(tmp_path, files), DIRECT)
    assert (finding.status, finding.sick) == (status, False)
    assert kind in finding.found and ("iommu=pt" in finding.mend) == (status is Status.FAIL)


@pytest.mark.parametrize(
    ("files", "status", "words"),
    [
        ({}, Status.FAIL, "is not loaded; clients: none"),
        ({"sys/kernel/mm/memory_peers/nv_mem/version": "1"}, Status.FAIL, "is not loaded; clients: nv_mem"),
        (
            {
                "sys/module/hawk_peermem/version": "0.1.0\n",
                "sys/module/hawk_peermem/state/peer_memory_core": "absent\n",
            },
            Status.FAIL,
            "hawk_peermem 0.1.0 is loaded, but this kernel's RDMA core takes no peer-memory clients",
        ),
        (
            {
                "sys/module/hawk_peermem/version": "0.1.0\n",
                "sys/module/hawk_peermem/state/peer_memory_core": "registered\n",
                "sys/module/hawk_peermem/state/regions": "8\n",
            },
            Status.PASS,
            "hawk_peermem 0.1.0 is registered, 8 regions",
        ),
        (
            {"sys/module/hawk_peermem/refcnt": "0", "sys/kernel/mm/memory_peers/hawk_peermem/version": "0.1.0"},
            Status.PASS,
            "hawk_peermem is registered",
        ),
    ],
)
def test_peer_memory(files: dict[str, str | None], status: Status, words: str, tmp_path: Path) -> None:
    finding = seen(PeerMemory(), machine(tmp_path, files), DIRECT)
    assert (finding.status, words in finding.found) == (status, True), finding.found
    over_tcp = needs("decode", npu="silicon", direct=True)
    assert not seen(PeerMemory(), machine(tmp_path), over_tcp).sick


@pytest.mark.parametrize(
    ("driver", "card_driver", "module", "status"),
    [
        ("2.10.0", "mlx5_core", "mlx5_ib", Status.PASS),
        ("2.9.0", "mlx5_core", "mlx5_ib", Status.NOT_APPLICABLE),
        ("2.10.0", "mlx5_core", "other", Status.NOT_APPLICABLE),
        ("2.10.0", "ice", "irdma", Status.PASS),
        ("2.10.0", "hns3", "hns_roce", Status.NOT_APPLICABLE),
    ],
)
def test_dma_bufs_need_both_drivers_and_nothing_depends_on_them(
    driver: str, card_driver: str, module: str, status: Status, tmp_path: Path
) -> None:
    files = chip_files(0) | port_files("card0") | {f"sys/module/{module}/refcnt": "1"}
    files["sys/module/tenstorrent/version"] = driver
    of = machine(tmp_path, files)
    link = tmp_path / "sys/class/infiniband/card0/device/driver"
    link.parent.mkdir(parents=True)
    link.symlink_to(f"../../../../bus/pci/drivers/{card_driver}")
    finding = seen(DmaBuf(), of, DIRECT)
    assert (finding.status, finding.sick) == (status, False)
    assert ("import them: card0;" in finding.found) == (module in ("mlx5_ib", "irdma"))
    assert "Mooncake's Python interface takes none" in finding.found
