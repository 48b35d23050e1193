"""The bytes in the banks, taken when a load has landed and before decode's first step, against the scalar oracle.

The oracle packs the prefill side's own cache, read from that process; it shares no code with the product.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.e2e.conftest import prompt
from tests.e2e.harness import REMOTE_DECODE, Engine
from tests.oracle import scalar

pytestmark = pytest.mark.e2e

Start = Callable[..., tuple[Engine, Engine]]


def expected(
    source: np.ndarray, table: list[int], tokens: int, block_ids: list[int], geometry: dict[str, Any]
) -> dict[tuple[int, int], dict[int, bytes]]:
    """Pages by (chip, bank) and address, by the oracle, for the request's source blocks ``table``."""
    layout = geometry["layout"]
    block_size, layers = source.shape[4], layout["layers"]

    def kv(layer: int, tensor: str, head: int, token: int) -> list[float]:
        row = source[layer, 0 if tensor == "k" else 1, table[token // block_size], head, token % block_size]
        return [float(x) for x in row]

    addresses = geometry["buffer_addresses"]
    if layout["kind"] == "cross_layer":
        buffers: Any = {"k": addresses[0], "v": addresses[1]}
    else:
        buffers = [{"k": addresses[2 * layer], "v": addresses[2 * layer + 1]} for layer in range(layers)]
    pool = scalar.Pool(
        kind=layout["kind"],
        layers=layers,
        heads=layout["heads"],
        block_size=layout["block_size"],
        head_dim=layout["head_dim"],
        banks=geometry["bases"],
        buffer_address=buffers,
        codec=layout["codec"],
        alignment=layout["alignment"],
    )
    return scalar.expected_banks(
        kv,
        pool,
        num_tokens=tokens,
        block_ids=block_ids,
        kv_heads=source.shape[3],
        chips=layout["chips"],
        rotary_dim=layout["head_dim"],
    )


@pytest.mark.parametrize(
    ("kv_dtype", "npu"),
    [
        ("float32", {"pool": "cross_layer"}),
        ("bf16", {"pool": "per_layer", "chips": 2}),
        ("bfp8", {"pool": "cross_layer", "chips": 4, "device": "blackhole-p100"}),
        ("bfp8", {"pool": "per_layer", "device": "wormhole-n150"}),
        ("bfp8", {"pool": "per_layer", "landing": {"path": "bounce", "placement": "staged"}}),
    ],
)
def test_landed_bytes_are_the_oracles(
    tiny: Path, start_pair: Start, tmp_path: Path, kv_dtype: str, npu: dict[str, Any]
) -> None:
    prefill, decode = start_pair(tiny, decode={"npu": {"kv_dtype": kv_dtype, **npu}})
    geometry = decode.call("geometry")
    layout = geometry["layout"]
    pitch = None
    for number, tokens in enumerate((1, 65, 150)):
        ids = prompt(tokens, seed=number)
        # Nothing else runs on the prefill side, so the blocks keep their contents after they are freed.
        sent = prefill.call("prefill_only", prompt=ids, params=REMOTE_DECODE)
        decode.call("banks", path=str(tmp_path / "before.npy"))
        held = decode.call("load_only", prompt=ids, params=sent["params"], max_tokens=4)
        prefill.call("source", path=str(tmp_path / "source.npy"))
        decode.call("banks", path=str(tmp_path / "banks.npy"))
        source, banks = np.load(tmp_path / "source.npy"), np.load(tmp_path / "banks.npy")
        report = decode.call("reports")["reports"][-1]
        assert report["outcome"] == "completed"
        pages = expected(source, sent["block_ids"], tokens, held["block_ids"], geometry)
        wrong = checked = 0
        before = np.load(tmp_path / "before.npy")
        for (chip, bank), by_address in pages.items():
            for address, content in by_address.items():
                found = page_at(banks, geometry, chip, bank, address)
                pitch = found.nbytes
                checked += 1
                wrong += found[: len(content)].tobytes() != content
                found[:] = page_at(before, geometry, chip, bank, address)
        assert (wrong, checked) == (0, len(held["block_ids"]) * blocks_pages(layout))
        # With the request's pages put back to what they held, nothing in the pools differs: no other byte was written.
        assert np.array_equal(banks, before)
        # What was read is what the pages of these blocks hold, not a byte more.
        assert report["wire_bytes"] == checked * pitch
        assert sum(n for _, _, n in report["bank_fill"]) == report["wire_bytes"]
        decode.call("finish", request=held["request"])
    prefill.wait_idle()
    decode.wait_idle()


def blocks_pages(layout: dict[str, Any]) -> int:
    """Pages of one decode block on all chips: layers x K and V x local heads x tile rows x tile columns."""
    tiles = (layout["block_size"] // 32) * (layout["head_dim"] // 32)
    return int(layout["chips"] * layout["layers"] * 2 * layout["heads"] * tiles)


def page_at(banks: np.ndarray, geometry: dict[str, Any], chip: int, bank: int, address: int) -> np.ndarray:
    """A view of a page in the dump ``[chips, pools, banks, slots, pitch]`` by its address in the bank."""
    base, pitch = geometry["bases"][bank], banks.shape[-1]
    for pool, start in enumerate(geometry["buffer_addresses"]):
        offset = address - base - start
        if 0 <= offset < banks.shape[3] * pitch:
            assert offset % pitch == 0
            page: np.ndarray = banks[chip, pool, bank, offset // pitch]
            return page
    raise AssertionError(f"no pool at {address:#x} of bank {bank}")


def test_decode_reads_the_banks_and_nothing_else(tiny: Path, start_pair: Start) -> None:
    prefill, decode = start_pair(tiny)
    geometry = decode.call("geometry")
    layout = geometry["layout"]
    tokens = 100
    ids = prompt(tokens)

    def held() -> dict[str, Any]:
        sent = prefill.generate([ids], [REMOTE_DECODE], max_tokens=1)[0]
        return decode.call("load_only", prompt=ids, params=sent["params"], max_tokens=6, logprobs=5)

    plain = decode.call("finish", request=held()["request"])
    again = decode.call("finish", request=held()["request"])
    assert again == plain

    # Every memory that could hold the request's KV in another layout, and every other block of the banks.
    request = held()
    one_layer = tokens * layout["heads"] * layout["head_dim"] * 4
    filled = decode.call("poison", nbytes=one_layer, keep_blocks=request["block_ids"])["filled"]
    assert filled >= layout["layers"]
    assert decode.call("finish", request=request["request"]) == plain

    # One byte: the highest exponent bits of K's first element of the request's first block, layer 0.
    request = held()
    page = request["block_ids"][0] * layout["layers"] * blocks_pages(layout) // (2 * layout["layers"])
    bank, slot = page % layout["banks"], page // layout["banks"]
    decode.call("flip", chip=0, pool=0, bank=bank, slot=slot, byte=3, mask=0x3F)
    changed = decode.call("finish", request=request["request"])
    assert changed["logprobs"] != plain["logprobs"]
    decode.wait_idle()
    prefill.wait_idle()
