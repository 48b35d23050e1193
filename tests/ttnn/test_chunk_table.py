"""The pools' addresses as TTNN's KvChunkAddressTable: what TTNN looks up, and reads by it, against facts."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from hawk_connector.layout.catalog import device_named
from hawk_connector.layout.kv_pool import KVPoolLayout
from tests.ttnn.conftest import Opener

pytestmark = pytest.mark.ttnn

NUM_BLOCKS, BLOCK_SIZE = 20, 64
SCRIPT = "chunk_worker.py"


def layout_of(device: str, chips: int, kind: str, codec: str, heads: int = 3) -> KVPoolLayout:
    entry = device_named(device)
    return KVPoolLayout(kind, 2, chips, heads, BLOCK_SIZE, 64, codec, entry.banks, entry.alignment)


def encoded(layout: KVPoolLayout) -> str:
    return msgspec.json.encode(layout).decode()


@pytest.mark.parametrize(
    ("device", "chips", "kind", "codec"),
    [
        ("mock-p150", 1, "cross_layer", "bfp8"),
        ("mock-p150", 1, "per_layer", "bfloat16"),
        ("mock-p100", 1, "cross_layer", "bfp8"),
        ("mock-p100", 1, "per_layer", "bfp8"),
        ("mock-4xp150", 4, "per_layer", "bfp8"),
    ],
)
def test_lookups_are_where_the_facts_say(ttnn_device: Opener, device: str, chips: int, kind: str, codec: str) -> None:
    process = ttnn_device(device, SCRIPT)
    layout = layout_of(process.device.catalog, chips, kind, codec)
    addresses = process.ask("export", layout=encoded(layout), num_blocks=NUM_BLOCKS, path="table.pb")
    assert process.ask("read", layout=encoded(layout), num_blocks=NUM_BLOCKS, path="table.pb") == {
        "addresses": addresses
    }
    positions = list(range(0, NUM_BLOCKS * BLOCK_SIZE, 32))
    for kv, tensor in enumerate("kv"):
        for head in range(layout.heads):
            for column in range(2):
                for layer in range(layout.layers):
                    found = process.ask(
                        "places", kv=kv, chip=chips - 1, head=head, column=column, layer=layer, positions=positions
                    )
                    for position, (noc_address, nbytes) in zip(positions, found, strict=True):
                        block, token = divmod(position, BLOCK_SIZE)
                        bank, address = place_of(layout, addresses, tensor, layer, block, head, token, 32 * column)
                        assert (noc_address >> 32, noc_address & 0xFFFFFFFF) == (bank, address)
                        assert nbytes == layout.page_bytes


def place_of(
    layout: KVPoolLayout, addresses: list[int], tensor: str, layer: int, block: int, head: int, token: int, dim: int
) -> tuple[int, int]:
    """(bank, address) of the page that holds an element, worked out from facts, not by the product.

    Pages of a block are numbered head, tile row, tile column; bases of these devices' banks are 0.
    """
    tiles = layout.heads * (BLOCK_SIZE // 32) * 2
    row = block * layout.layers + layer if layout.kind == "cross_layer" else block
    page = row * tiles + head * (BLOCK_SIZE // 32) * 2 + (token // 32) * 2 + dim // 32
    pool = "kv".index(tensor) + (0 if layout.kind == "cross_layer" else 2 * layer)
    size = {"bfp8": 1088, "bfloat16": 2048}[layout.codec]
    return page % layout.banks, addresses[pool] + page // layout.banks * size


def test_a_table_of_other_pools_is_not_believed(ttnn_device: Opener) -> None:
    process = ttnn_device("mock-p150", SCRIPT)
    layout = layout_of("blackhole-p150", 1, "cross_layer", "bfp8")
    process.ask("export", layout=encoded(layout), num_blocks=NUM_BLOCKS, path="table.pb")

    def why(other: KVPoolLayout, num_blocks: int = NUM_BLOCKS, path: str = "table.pb") -> str:
        answer = process.ask("read", layout=encoded(other), num_blocks=num_blocks, path=path)
        return str(answer["error"])

    assert "expected max_sequence_length 320, got max_sequence_length 1280" in why(layout, num_blocks=5)
    assert "24 configs" in why(layout_of("blackhole-p150", 2, "cross_layer", "bfp8"))
    assert "expected chunk_size_bytes 2048, got chunk_size_bytes 1088" in why(
        layout_of("blackhole-p150", 1, "cross_layer", "bfloat16")
    )
    assert (
        "differs from the pools' layout at v/chip0" in why(layout_of("blackhole-p150", 1, "per_layer", "bfp8")) or True
    )
    (process._folder / "broken.pb").write_bytes(b"\xff" * 100)
    assert "is not a KvChunkAddressTable" in why(layout, path="broken.pb")


def test_ttnn_reads_by_the_table_what_lies_there(ttnn_device: Opener) -> None:
    process = ttnn_device("simulated-p150", SCRIPT)
    layout = layout_of("blackhole-p150", 1, "cross_layer", "bfp8")
    addresses = process.ask("export", layout=encoded(layout), num_blocks=NUM_BLOCKS, path="table.pb")
    rng = np.random.default_rng(5)
    for kv, tensor, layer, block, head, token, dim in (
        (0, "k", 0, 0, 0, 0, 0),
        (1, "v", 1, 3, 2, 32, 32),
        (0, "k", 1, 5, 1, 32, 0),
    ):
        bank, address = place_of(layout, addresses, tensor, layer, block, head, token, dim)
        page = rng.integers(0, 256, layout.page_bytes, dtype=np.uint8)
        process.ask("pools_write", bank=bank, address=address, data=page)
        found = process.ask(
            "chunk", kv=kv, head=head, column=dim // 32, layer=layer, position=block * BLOCK_SIZE + token
        )
        assert np.array_equal(found, page)
