"""`hawk layouts` as a user runs it: the catalog, diagrams, and indices turned into addresses as the oracle has them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hawk_connector.cli.layouts_pool import ShownPool
from hawk_connector.errors import ConfigError
from hawk_connector.layout.catalog import DEVICES, LAYOUTS
from tests.oracle.scalar import PAGE_BYTES, Pool, k_order

pytestmark = pytest.mark.slow  # most of these start the command

WORMHOLE = ("--device", "wormhole-n150", "--buffer-address", "0x200040")
SMOLLM2 = ("--model", "smollm2-135m", "--chips", "1", "--block-size", "32")


def hawk(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hawk_connector.cli.main", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def layouts(*words: str) -> dict[str, Any]:
    done = hawk("layouts", *words, "--json")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def shown(name: str = "ttnn-interleaved", **changed: Any) -> ShownPool:
    given: dict[str, Any] = {
        "name": name,
        "model": "smollm2-135m",
        "chips": 1,
        "pool": None,
        "block_size": 32,
        "num_blocks": 64,
        "codec": None,
        "device": "wormhole-n150",
        "kv": 0,
        "buffer_address": "0x200040",
    }
    return ShownPool.of(**(given | changed))


def test_the_catalog_names_everything() -> None:
    done = hawk("layouts")
    assert done.returncode == 0
    for entry in (*DEVICES, *LAYOUTS):
        assert f" {entry.name} " in done.stdout


def test_a_device_is_its_bank_table() -> None:
    """Wormhole: twelve banks of 1 GiB, every second one in the upper half of its channel."""
    lines = hawk("layouts", "wormhole-n150").stdout.splitlines()
    rows = [line.split() for line in lines if line.strip().endswith("1,073,741,824")]
    assert [row[1] for row in rows] == ["0x0", "0x40000000"] * 6


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        (
            "ttnn-interleaved",
            ["token // 16 % 2 2 512 elements", "dim // 32 4 1 page", "64 exponents", "= 1,088 bytes", "bank p % 8"],
        ),
        ("ttnn-nd-sharded", ["shard s = p // 16", "bank s % 8"]),
        ("ascend-310p", ["dim // 16 8 1,024 elements", "token % 16 16 16 elements", "one region: page p at 0x0"]),
        ("tpu-bf16", ["token // 2 % 4 4 256 elements", "token % 2 2 1 element"]),
    ],
)
def test_a_layout_is_a_diagram_of_its_factors(name: str, lines: list[str]) -> None:
    """Llama-3.1-70B's two heads of 128 dims on a chip, 64-token blocks."""
    done = hawk("layouts", name)
    assert done.returncode == 0
    text = " ".join(done.stdout.split())
    for line in lines:
        assert line in text


def test_an_index_has_the_oracles_address() -> None:
    """bfp8 on 12 banks with two base addresses; K's dim 40 stands at place 17 (2 * 8 + 1, 1 * 32 + 8)."""
    pool = Pool(
        kind="cross_layer",
        layers=30,
        heads=3,
        block_size=32,
        head_dim=64,
        banks=[0, 0x40000000] * 6,
        buffer_address={"k": 0x200040, "v": 0},
        codec="bfp8",
        alignment=32,
    )
    for block, layer, head, token, place in ((5, 7, 2, 19, 17), (0, 29, 1, 31, 63), (63, 0, 0, 0, 0)):
        dim = k_order(place, 64, 64)
        words = f"block={block},layer={layer},head={head},token={token},dim={dim}"
        found = layouts("ttnn-interleaved", *SMOLLM2, *WORMHOLE, "--index", words)
        bank, page, element = pool.address("k", block, layer, head, token, place)
        assert (found["bank"], found["address"]) == (bank, page + 64 + element)
        assert found["exponent_address"] == page + element // 16
    assert k_order(17, 64, 64) == 40


def test_v_keeps_its_dims_and_has_a_pool_of_its_own() -> None:
    words = ("ttnn-interleaved", *SMOLLM2, "--kv", "v", "--codec", "bfloat16", "--index", "token=1,dim=17")
    found = layouts(*words, "--buffer-address", "4096")
    # face 1 (dims 16 to 31), row 1, column 1, two bytes each
    assert (found["bank"], found["address"], found["exponent_address"]) == (0, 4096 + 2 * (256 + 16 + 1), None)


def test_an_address_has_its_element() -> None:
    done = hawk("layouts", "ttnn-interleaved", *SMOLLM2, *WORMHOLE, "--index", "block=5,layer=7,head=2,token=19,dim=40")
    where = done.stdout.partition("bank ")[2]
    bank, address = where.split(",")[0], where.split("address ")[1].split(";")[0]
    back = hawk("layouts", "ttnn-interleaved", *SMOLLM2, *WORMHOLE, "--address", f"{bank}:{address}")
    assert back.stdout == done.stdout
    assert done.stdout.startswith("K[block 5, layer 7, head 2, token 19, dim 40]: ")


@pytest.mark.parametrize("entry", [entry.name for entry in LAYOUTS])
@pytest.mark.parametrize("kv", [0, 1])
def test_every_element_comes_back_from_its_address(entry: str, kv: int) -> None:
    pool = shown(entry, kv=kv, num_blocks=13)
    extents = {"block": 13, "layer": 30, "head": 3, "token": 32, "dim": 64}
    seen = set()
    for number in range(200):
        index = {axis: (number * 7919 + place * 104_729) % extents[axis] for place, axis in enumerate(pool.axes)}
        there = pool.element(index)
        back = pool.element_at(there.bank, there.address)
        assert back.index == there.index == index
        assert not back.padding
        seen.add((there.bank, there.address, there.bit))
    assert len(seen) > 150


def test_exponents_and_padding_are_told_apart() -> None:
    """16-token blocks: rows 16 to 31 of a tile are padding; byte 1 of a page is the exponent of its second row."""
    pool = shown(block_size=16, kv=1)
    exponent = pool.element_at(0, 0x200040 + 1)
    assert (exponent.part, exponent.index["token"], exponent.index["dim"]) == ("exponent", 1, 0)
    assert "exponent shared by V[" in exponent.text()
    padding = pool.element_at(0, 0x200040 + 64 + 512)
    assert (padding.part, padding.padding, padding.index["token"]) == ("element", True, 16)
    assert "(padding)" in padding.text()
    assert PAGE_BYTES["bfp8"] == 1088


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("ttnn-interleave",), "Did you mean 'ttnn-interleaved'?"),
        (("blackhole",), "Did you mean 'blackhole-p150'?"),
        (("ttnn-interleaved", "--device", "p150"), "Did you mean 'blackhole-p150'?"),
        (("ttnn-interleaved", "--model", "qwen3"), "Did you mean 'qwen3-8b'?"),
        (("ttnn-interleaved", "--index", "block=3,row=1"), "no axis 'row'"),
        (("ttnn-interleaved", "--index", "token=64"), "token must lie in 0..63; got 64"),
        (("ttnn-interleaved", "--index", "token"), "'token' is no AXIS=NUMBER"),
        (("ttnn-interleaved", "--index", "token=x"), "'x' is no number"),
        (("ttnn-interleaved", "--address", "0x100080"), "is no BANK:ADDRESS"),
        (("ttnn-interleaved", "--address", "9:0x100080"), "bank must lie in 0..7; got 9"),
        (("ttnn-interleaved", "--address", "0:0"), "bytes before the buffer"),
        (("ttnn-interleaved", "--chips", "3"), "8 KV heads cannot be split over 3 chips"),
        (("ascend-310p", "--codec", "bfp8"), "got bfp8"),
        (("ascend-310p", "--block-size", "20"), "token must be a multiple of 16"),
        (("--index", "block=3"), "need the NAME of a layout"),
        (("blackhole-p150", "--index", "block=3"), "is a device"),
    ],
)
def test_what_cannot_be_is_said_with_code_2(words: tuple[str, ...], text: str) -> None:
    done = hawk("layouts", *words)
    assert done.returncode == 2
    assert done.stdout == ""
    assert text in done.stderr


def test_the_documentation_shows_what_is_printed() -> None:
    """docs/layouts.md works the address of its example out by hand."""
    text = (Path(__file__).parents[2] / "docs" / "layouts.md").read_text()
    diagram = hawk("layouts", "ttnn-interleaved").stdout.splitlines()
    for line in (line.rstrip() for line in diagram if "   " in line or line.startswith(("page", "bank", "dims"))):
        assert line in text
    index = ("--index", "block=5,layer=7,head=1,token=40,dim=70")
    for words in (index, ("--address", "4:0x1d890d")):
        printed = hawk("layouts", "ttnn-interleaved", *words).stdout
        assert f"hawk layouts ttnn-interleaved {' '.join(words)}\n{printed}" in text


def test_bytes_past_the_pool_are_nobodys() -> None:
    pool = shown(num_blocks=1)
    with pytest.raises(ConfigError, match="lies past the tensor"):
        pool.element_at(0, 0x200040 + 15 * 1088)
