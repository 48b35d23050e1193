"""The device layer over TTNN: what it says of the chips, its buffers, its pools, and windows aimed by its tables."""

from __future__ import annotations

import ctypes
from typing import Any

import msgspec
import numpy as np
import pytest

from hawk_connector.layout.catalog import device_named
from hawk_connector.layout.kv_pool import KVPoolLayout, PoolKind
from hawk_connector.plan.parcel import ChipShare, ParcelPlan
from tests.oracle import scalar
from tests.tt_plugin.stand_in_driver import StandInChip, StandInDriver
from tests.tt_plugin.test_windows import P100, P150
from tests.ttnn.client import TtnnProcess
from tests.ttnn.conftest import Opener
from tests.ttnn.devices import DEVICES
from tt_plugin.device.tt_kmd import NocTile
from tt_plugin.device.windows import BankSite, WindowSet
from tt_plugin.landing import WindowLanding, WindowPools

pytestmark = pytest.mark.ttnn

SCRIPT = "decode_worker.py"
GIB = 1 << 30
MIB = 1 << 20


def layout_on(
    device: TtnnProcess, kind: PoolKind = "per_layer", codec: str = "bfloat16", heads: int = 1
) -> KVPoolLayout:
    """Two layers, blocks of four pages a head: with one head fewer than there are banks."""
    entry = device_named(device.device.catalog)
    return KVPoolLayout(kind, 2, device.device.chips, heads, 64, 64, codec, entry.banks, entry.alignment)


def encoded(value: Any) -> str:
    return msgspec.json.encode(value).decode()


@pytest.mark.parametrize("name", DEVICES)
def test_the_device_describes_itself_as_the_catalog_does(ttnn_device: Opener, name: str) -> None:
    device = ttnn_device(name, SCRIPT)
    entry = device_named(device.device.catalog)
    said = device.ask("describe")
    assert said["chips"] == device.device.chips
    for key in ("bank_bytes", "alignment", "first_address"):
        assert said[key] == getattr(entry, key)
    assert tuple(said["bases"]) == entry.bases
    assert len({tuple(tile) for tile in said["tiles"]}) == entry.banks


@pytest.mark.parametrize("name", DEVICES)
def test_health_is_what_the_banks_keep(ttnn_device: Opener, name: str) -> None:
    """A simulated chip keeps what is written; a mock forgets it, and every bank of every chip is complained of."""
    device = ttnn_device(name, SCRIPT)
    before = device.ask("left")
    complaints = device.ask("describe")["health"]
    if name.startswith("mock-"):
        banks = device_named(device.device.catalog).banks
        assert len(complaints) == device.device.chips * banks
        assert complaints[0] == "chip 0, bank 0: expected 1 in every byte, got [0, 0, 0, 0]..."
    else:
        assert complaints == []
    assert device.ask("left") == before


@pytest.mark.parametrize("name", ["mock-p150", "mock-4xp150"])
def test_one_contiguous_buffer_leaves_no_room_although_seven_banks_are_empty(ttnn_device: Opener, name: str) -> None:
    """What the paper met, by TTNN's own allocator.  3 GiB for incoming KV, then pools of 2 GiB a bank.

    One piece lies in bank 0 alone, and all banks have 3 GiB less; as stages it is 384 MiB of each bank.
    """
    device = ttnn_device(name, SCRIPT)
    whole = device.ask("left")
    single = device.ask("put_in_one_bank", name="buffer", nbytes=3 * GIB)
    assert whole - single["left"] == 3 * GIB
    refused = device.ask("take", bytes_per_bank=2 * GIB, what="a KV pool")
    assert refused["error"].startswith("a KV pool does not fit the DRAM of ttnn: expected at most ")
    assert refused["left"] == single["left"]
    device.ask("free", name="buffer")

    stages = device.ask("take", bytes_per_bank=3 * GIB // 8, what="the stages")
    assert whole - stages["left"] == 3 * GIB // 8
    pools = device.ask("take", bytes_per_bank=2 * GIB, what="the KV pools")
    assert stages["left"] - pools["left"] == 2 * GIB
    for taken in (pools, stages):
        device.ask("give_back", address=taken["address"])
    assert device.ask("left") == whole


@pytest.mark.parametrize("kind", ["per_layer", "cross_layer"])
@pytest.mark.parametrize("name", ["simulated-7-banks", "simulated-p150"])
def test_blocks_are_zeroed_and_copied(ttnn_device: Opener, name: str, kind: PoolKind) -> None:
    """New pools are zeros; a swap reads both blocks before it writes either; TTNN looks at the tensors."""
    device = ttnn_device(name, SCRIPT)
    layout = layout_on(device, kind)
    addresses = device.ask("make_pools", layout=encoded(layout), num_blocks=5)["addresses"]
    rng = np.random.default_rng(3)
    bank_bytes = layout.rule.slots(layout.pool_pages(5)) * layout.page_pitch
    for pool, address in enumerate(addresses):
        assert not device.ask("pool", index=pool).any()
        # Numbers of bf16 without NaNs: the high byte of each is below 0x7F.
        noise = rng.integers(0, 0x7F, (layout.banks, bank_bytes), dtype=np.uint8)
        device.ask("write_banks", address=address, banks=noise)
    before = [device.ask("pool", index=pool) for pool in range(layout.pools)]
    device.ask("copy_blocks", sources=[1, 3, 1], targets=[3, 1, 4])
    device.ask("zero_blocks", block_ids=[0])
    depth = layout.layers if kind == "cross_layer" else 1
    for pool, was in enumerate(before):
        blocks = was.reshape(5, depth, *was.shape[1:])
        wanted = np.stack([np.zeros_like(blocks[0]), blocks[3], blocks[2], blocks[1], blocks[1]])
        np.testing.assert_array_equal(device.ask("pool", index=pool), wanted.reshape(was.shape))
    device.ask("end")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"codec": "bfp8"}, "dtype"),
        ({"block_size": 32}, "shape"),
        ({"heads": 2}, "shape"),
        ({"layers": 3}, "pools 6"),
        ({"banks": 7}, "banks 7"),
    ],
)
def test_tensors_that_are_not_what_the_layout_says_are_refused(
    ttnn_device: Opener, change: dict[str, Any], named: str
) -> None:
    device = ttnn_device("mock-p150", SCRIPT)
    layout = layout_on(device)
    error = device.ask("adopt", layout=encoded(msgspec.structs.replace(layout, **change)), wrong=encoded(layout))
    assert "is not what the pools' layout says: expected" in error and named in error


def test_what_a_device_refuses(ttnn_device: Opener) -> None:
    missing, outside, behind = ttnn_device("mock-p150", SCRIPT).ask("refusals")
    assert missing.startswith("DeviceError: TTNN cannot open chip 7: ") and "\n" not in missing
    assert outside == "ValueError: bytes 0xfefffffc..0xff000004 do not lie in a bank of 0xff000000 bytes"
    assert behind.startswith("ValueError: bytes 0xff000000..0xff000001")


@pytest.mark.parametrize(("name", "tiles"), [("mock-4xp150", P150), ("mock-p100", P100)])
@pytest.mark.parametrize("kind", ["per_layer", "cross_layer"])
def test_windows_over_ttnns_banks_show_a_parcel_at_ttnns_addresses(
    ttnn_device: Opener, name: str, tiles: tuple[tuple[int, int], ...], kind: PoolKind
) -> None:
    """Bank tables, tiles and buffer addresses are TTNN's; the driver is the stand-in, as a mock has no memory.

    Each page must lie in the channel behind TTNN's tile, at the address that the oracle gives.
    """
    device = ttnn_device(name, SCRIPT)
    said = device.ask("describe")
    assert tuple(tuple(tile) for tile in said["tiles"]) == tiles
    layout = layout_on(device, kind, "bfp8", heads=2)
    addresses = device.ask("make_pools", layout=encoded(layout), num_blocks=4)["addresses"]
    device.ask("end")

    nodes = [f"/dev/tenstorrent/{chip}" for chip in range(layout.chips)]
    driver = StandInDriver({node: StandInChip({tile: bytearray(2 * MIB) for tile in tiles}) for node in nodes})
    sites = [BankSite(NocTile(*tile), base) for tile, base in zip(said["tiles"], said["bases"], strict=True)]
    plan = ParcelPlan(layout, tuple(ChipShare(c, ((2 * c, 0), (2 * c + 1, 1))) for c in range(layout.chips)), 2)
    parcel = np.random.default_rng(0).integers(0, 256, plan.nbytes, dtype=np.uint8)
    with WindowSet(nodes, [sites] * layout.chips, 2 * MIB, driver) as windows:
        landing = WindowLanding(WindowPools(windows, layout, 4, addresses))
        segments = landing.segments(plan, parcel.ctypes.data, [3, 1], 0)
        for remote, local, length in zip(segments.remote, segments.local, segments.length, strict=True):
            ctypes.memmove(int(local), int(remote), int(length))
        landing.landed(segments)
        landing.close()
    buffers: Any = (
        {"k": addresses[0], "v": addresses[1]}
        if kind == "cross_layer"
        else [{"k": addresses[2 * i], "v": addresses[2 * i + 1]} for i in range(layout.layers)]
    )
    pool = scalar.Pool(kind, 2, 2, 64, 64, said["bases"], buffers, "bfp8", layout.alignment)
    sent = iter(parcel.reshape(-1, layout.page_pitch))
    for node in nodes:
        for stream in scalar.stream_pages(pool, [3, 1]):
            for bank, address in stream:
                channel = driver.chips[node].channels[tiles[bank]]
                assert bytes(channel[address : address + layout.page_pitch]) == next(sent).tobytes()
    assert next(sent, None) is None
