"""The self-test must find what is wrong, or it says nothing: each way to spoil a parcel is tried."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest

from hawk_connector.errors import LocalError
from hawk_connector.plan.segments import Segments
from hawk_connector.self_test import parcel as parcels
from hawk_connector.self_test.carrier import carrier
from hawk_connector.self_test.parcel import SelfTestParcel

pytestmark = pytest.mark.slow  # torch is imported


def land(segments: Segments) -> None:
    for remote, local, length in zip(segments.remote, segments.local, segments.length, strict=True):
        ctypes.memmove(int(local), int(remote), int(length))


@pytest.fixture(scope="module")
def packed() -> SelfTestParcel:
    return SelfTestParcel(seed=3)


@pytest.fixture
def parcel(packed: SelfTestParcel) -> SelfTestParcel:
    packed.banks[:] = 0xA5
    return packed


def test_a_parcel_that_landed_is_right(parcel: SelfTestParcel) -> None:
    segments = parcel.segments()
    # 3 blocks of 2 pools on 7 banks, of which none merge: 8 layers of 8 pages are 64, and 64 % 7 is not 0.
    assert (segments.count, segments.nbytes) == (42, 3 * 2 * 64 * 2048)
    land(segments)
    assert parcel.check() == 4096


def test_nothing_landed_is_found(parcel: SelfTestParcel) -> None:
    with pytest.raises(LocalError, match=r"is wrong in bank \d, address 0x\w+: expected \w{4}, got a5a5"):
        parcel.check()


@pytest.mark.parametrize("which", range(42))
def test_one_missing_read_is_found(which: int, parcel: SelfTestParcel) -> None:
    keep = np.arange(42) != which
    segments = parcel.segments()
    land(Segments(segments.remote[keep], segments.local[keep], segments.length[keep]))
    with pytest.raises(LocalError, match="is wrong"):
        parcel.check()


def test_reads_that_end_in_the_wrong_place_are_found(parcel: SelfTestParcel) -> None:
    segments = parcel.segments()
    land(Segments(segments.remote, np.roll(segments.local, 1), segments.length))
    with pytest.raises(LocalError, match="is wrong"):
        parcel.check()


def test_a_foreign_block_that_was_written_is_found(parcel: SelfTestParcel) -> None:
    land(parcel.segments())
    parcel.banks[:] = np.where(parcel.banks == 0xA5, 0, parcel.banks)
    with pytest.raises(LocalError, match="expected a5a5, got 0000"):
        parcel.check()


def test_both_packers_pack_the_same(parcel: SelfTestParcel) -> None:
    """Torch's program for whole tensors, and a walk over the row's layout."""
    assert parcel.packer == "hawk's transform"
    assert np.array_equal(parcels._packed_by_layout(parcel._values, parcel._plan), parcel.sent)


def process(root: Path, descriptors: list[str], tcp: str = "", tcp6: str = "") -> Path:
    (root / "fd").mkdir()
    (root / "net").mkdir()
    for number, target in enumerate(descriptors):
        (root / "fd" / str(number)).symlink_to(target)
    heading = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
    (root / "net" / "tcp").write_text(heading + tcp)
    (root / "net" / "tcp6").write_text(heading + tcp6)
    return root


def connection(state: str, inode: int) -> str:
    return (
        f"   0: 0100007F:8D60 0100007F:4203 {state} 00000000:00000000 00:00000000 00000000     0        0 {inode} 1 0\n"
    )


@pytest.mark.parametrize(
    ("descriptors", "tcp", "tcp6", "expected"),
    [
        (["/dev/null", "socket:[7]"], connection("01", 7), "", "tcp"),
        (["socket:[7]"], "", connection("01", 7), "tcp"),
        (["socket:[7]"], connection("0A", 7), "", "unknown"),
        (["socket:[7]"], connection("01", 8), "", "unknown"),
        (["/dev/infiniband/uverbs0", "socket:[7]"], connection("0A", 7), "", "rdma"),
        (["/dev/infiniband/uverbs0", "socket:[7]"], connection("01", 7), "", "tcp"),
        ([], "", "", "unknown"),
    ],
)
def test_what_carried_is_told_by_what_is_open(
    descriptors: list[str], tcp: str, tcp6: str, expected: str, tmp_path: Path
) -> None:
    assert carrier(process(tmp_path, descriptors, tcp, tcp6)) == expected
