"""Pools in the banks of simulated chips: HAWK's bytes against TTNN's, in every bank, in both directions."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from hawk_connector.layout.bases import BaseTable
from hawk_connector.layout.catalog import device_named
from hawk_connector.layout.kv_pool import Channels
from tests.ttnn.client import TtnnProcess
from tests.ttnn.conftest import Opener
from tests.ttnn.pools import Pools, Request

pytestmark = pytest.mark.ttnn

SMALL = {"block_size": 32, "head_dim": 64}
"""Six pages for each block and layer: 8, 7 and 12 banks do not divide the 18 of three layers, nor the six of one."""

REQUESTS = [
    Request("cross_layer", "bfp8"),
    Request("cross_layer", "bfloat16"),
    Request("cross_layer", "bfp4", **SMALL),
    Request("cross_layer", "float32", **SMALL),
    Request("per_layer", "bfp8", layers=2),
    Request("per_layer", "bfloat16", layers=1, **SMALL),
    Request("per_layer", "bfp4", layers=1, **SMALL),
    Request("per_layer", "float32", layers=1, **SMALL),
    *(
        Request("cross_layer", codec, channels="nd_sharded", **SMALL)
        for codec in ("bfp8", "bfloat16", "bfp4", "float32")
    ),
    Request("per_layer", "bfp8", channels="nd_sharded", layers=1),
    Request("cross_layer", "bfp8", channels="height_sharded", **SMALL),
    Request("per_layer", "bfloat16", channels="height_sharded", layers=1, **SMALL),
    # What TTNN pads, and the largest heads.
    Request("cross_layer", "bfp8", block_size=16, head_dim=64, layers=2),
    Request("cross_layer", "bfp8", block_size=32, head_dim=80, layers=2),
    Request("per_layer", "bfp8", block_size=128, head_dim=128, heads=1, layers=1),
    Request("per_layer", "bfp8", block_size=32, head_dim=256, heads=1, layers=1),
]
FILLED = [
    Request("cross_layer", "bfp8", whole_tiles=True, **SMALL),
    Request("cross_layer", "bfloat16", layers=2, head_dim=64, whole_tiles=True),
    Request("per_layer", "bfp8", layers=1, whole_tiles=True),
    Request("per_layer", "bfloat16", layers=1, whole_tiles=True, **SMALL),
    Request("per_layer", "float32", layers=1, whole_tiles=True, **SMALL),
]
SIMULATED = ["simulated-p150", "simulated-7-banks", "simulated-n150"]


@pytest.fixture(scope="module", params=SIMULATED)
def opened(request: pytest.FixtureRequest, ttnn_device: Opener) -> TtnnProcess:
    return ttnn_device(request.param)


@pytest.fixture
def simulated(opened: TtnnProcess) -> Iterator[TtnnProcess]:
    """A device with no buffer of an earlier test, and none left for the next."""
    yield opened
    opened.ask("free_all")


def pools_on(device: TtnnProcess, request: Request) -> Pools:
    entry = device_named(device.device.catalog)
    tables = device.ask("bank_tables")
    assert len(tables[0]) == entry.banks
    return Pools(request, entry.banks, entry.alignment)


def put(device: TtnnProcess, pools: Pools, tensor: NDArray[np.float32], expected_address: int | None = None) -> int:
    """Has TTNN put a pool into its banks; returns its address."""
    found = device.ask(
        "put",
        name="pool",
        values=tensor,
        dtype=pools.request.codec,
        channels=pools.request.channels,
        shard=pools.shard,
    )
    assert found["pages"] == pools.layout.pool_pages(pools.num_blocks)
    assert found["page_pitch"] == pools.layout.page_pitch
    assert expected_address is None or found["address"] == expected_address
    return int(found["address"])


def blank(device: TtnnProcess, pools: Pools) -> int:
    """Zeroes the memory of the next pool, slots that no page will take among it; returns where that is."""
    address = put(device, pools, np.full_like(pools.tensors[0], 7.0))
    device.ask("write_banks", address=address, banks=np.zeros(pools.shape[1:], dtype=np.uint8))
    device.ask("free", name="pool")
    return address


def assert_same_bytes(found: NDArray[np.uint8], wanted: NDArray[np.uint8], pool: int) -> None:
    assert found.shape == wanted.shape
    for bank in range(len(wanted)):
        wrong = np.flatnonzero(found[bank] != wanted[bank])
        assert not len(wrong), f"pool {pool}, bank {bank}: {len(wrong)} bytes differ, the first at {wrong[0]}"


@pytest.mark.parametrize("request_", REQUESTS, ids=str)
def test_both_ways(simulated: TtnnProcess, request_: Request) -> None:
    """TTNN's bytes are HAWK's; TTNN reads HAWK's bytes as the tensor, and HAWK reads TTNN's as the request."""
    pools = pools_on(simulated, request_)
    ours = pools.packed()
    theirs = np.empty_like(ours)
    read: list[NDArray[np.float32]] = []
    for pool, tensor in enumerate(pools.tensors):
        address = blank(simulated, pools)
        put(simulated, pools, tensor, address)
        theirs[pool] = simulated.ask("read_banks", address=address, length=pools.shape[2])
        read.append(simulated.ask("get", name="pool"))
        simulated.ask("free", name="pool")
        assert_same_bytes(theirs[pool], ours[pool], pool)
        if request_.codec == "float32":
            np.testing.assert_array_equal(read[pool], tensor)

        put(simulated, pools, np.full_like(tensor, 7.0), address)
        simulated.ask("write_banks", address=address, banks=ours[pool])
        np.testing.assert_array_equal(simulated.ask("get", name="pool"), read[pool])
        simulated.ask("free", name="pool")

    np.testing.assert_array_equal(pools.unpacked(theirs), pools.gathered(read))


@pytest.mark.parametrize("channels", ["interleaved", "nd_sharded", "height_sharded"])
def test_addresses(simulated: TtnnProcess, channels: Channels) -> None:
    """Elements of TTNN's tensor lie at the absolute addresses that the layout gives, by the device's own bases."""
    pools = pools_on(simulated, Request("cross_layer", "float32", channels=channels, **SMALL))
    table = simulated.ask("bank_tables")[0]
    bases = BaseTable.of_device((bank["bank_id"], bank["base_addr"]) for bank in table)
    assert bases.bases == device_named(simulated.device.catalog).bases
    rng = np.random.default_rng(4)
    tensor = rng.standard_normal(pools.tensors[0].shape, dtype=np.float32)
    layout = pools.layout.pool_tensor(1, pools.num_blocks, bases, put(simulated, pools, tensor))
    elements = [[int(rng.integers(extent)) for extent in tensor.shape] for _ in range(100)]
    places = []
    for row, head, token, dim in elements:
        block, layer = divmod(row, pools.request.layers)
        found = layout.locate({"block": block, "layer": layer, "head": head, "token": token, "dim": dim})
        places.append([found.bank, found.address])
    read = simulated.ask("read_places", places=places, length=4).view("<f4")[:, 0]
    np.testing.assert_array_equal(read, [tensor[tuple(element)] for element in elements])


@pytest.mark.parametrize("request_", FILLED, ids=str)
def test_paged_fill_cache(simulated: TtnnProcess, request_: Request) -> None:
    """TTNN's own op fills a pool on the chip, layer after layer; layer l of block b is row ``b * layers + l``."""
    pools = pools_on(simulated, request_)
    ours = pools.packed()
    for pool, tensor in enumerate(pools.tensors):
        address = blank(simulated, pools)
        put(simulated, pools, np.zeros_like(tensor), address)
        for layer in range(request_.layers):
            for kv in (0, 1):
                if pools.layout.pool_of(layer, kv) == pool:
                    simulated.ask(
                        "paged_fill_cache",
                        cache="pool",
                        values=pools.stored(layer, kv)[None],
                        dtype=request_.codec,
                        page_table=[pools.row(block, layer) for block in pools.block_ids],
                    )
        found = simulated.ask("read_banks", address=address, length=pools.shape[2])
        simulated.ask("free", name="pool")
        assert_same_bytes(found, ours[pool], pool)
