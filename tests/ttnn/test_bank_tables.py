"""What TTNN says of a device's banks against what the catalog says: on mock devices, which have no memory."""

from __future__ import annotations

import numpy as np
import pytest

from hawk_connector.layout.bases import BaseTable
from hawk_connector.layout.catalog import device_named
from hawk_connector.layout.kv_pool import KVPoolLayout
from tests.ttnn.conftest import Opener
from tests.ttnn.devices import DEVICES

pytestmark = pytest.mark.ttnn

MOCKS = [name for name in DEVICES if name.startswith("mock-")]


@pytest.mark.parametrize("name", MOCKS)
def test_bank_table(ttnn_device: Opener, name: str) -> None:
    device = ttnn_device(name)
    entry = device_named(device.device.catalog)
    tables = device.ask("bank_tables")
    assert len(tables) == device.device.chips
    for table in tables:
        bases = BaseTable.of_device((bank["bank_id"], bank["base_addr"]) for bank in table)
        assert bases.bases == entry.bases
        assert {bank["bank_size"] for bank in table} == {entry.bank_bytes}
        # Two banks may share a channel, but no two the same port.
        assert len({(bank["noc_x"], bank["noc_y"]) for bank in table}) == entry.banks
    assert device.ask("alignment") == entry.alignment


def test_a_mesh_has_four_chips_alike(ttnn_device: Opener) -> None:
    tables = ttnn_device("mock-4xp150").ask("bank_tables")
    assert len(tables) == 4
    assert tables == [ttnn_device("mock-p150").ask("bank_tables")[0]] * 4


def test_p100_lacks_a_bank(ttnn_device: Opener) -> None:
    assert len(ttnn_device("mock-p100").ask("bank_tables")[0]) == 7


@pytest.mark.parametrize("name", MOCKS)
def test_first_address(ttnn_device: Opener, name: str) -> None:
    """The first buffer of a fresh process, and the next one behind it."""
    device = ttnn_device(name)
    entry = device_named(device.device.catalog)
    rows = np.zeros((1, 1, 32, 32), dtype=np.float32)
    first = device.ask("put", name="first", values=rows, dtype="float32")
    second = device.ask("put", name="second", values=rows, dtype="float32")
    assert first["address"] == entry.first_address
    assert second["address"] == entry.first_address + 4096
    device.ask("free", name="second")
    device.ask("free", name="first")


@pytest.mark.parametrize("codec", ["float32", "bfloat16", "bfp8", "bfp4"])
@pytest.mark.parametrize("name", MOCKS)
def test_pages(ttnn_device: Opener, name: str, codec: str) -> None:
    device = ttnn_device(name)
    entry = device_named(device.device.catalog)
    layout = KVPoolLayout("per_layer", 1, 1, 3, 64, 96, codec, entry.banks, entry.alignment)
    pool = np.zeros((5, 3, 64, 96), dtype=np.float32)
    found = device.ask("put", name="pool", values=pool, dtype=codec)
    device.ask("free", name="pool")
    assert found["pages"] == layout.pool_pages(5)
    assert found["page_pitch"] == layout.page_pitch
