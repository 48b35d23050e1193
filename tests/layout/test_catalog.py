"""Index to (bank, address) and back, for every layout of the catalog, against the oracle's formulas."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hawk_connector.layout.bases import BaseTable
from hawk_connector.layout.catalog import DEVICES, LAYOUTS, device_named, layout_named
from hawk_connector.layout.kv_pool import KVPoolLayout
from hawk_connector.layout.tilings import TILINGS, tiling_named
from tests.oracle import other_npus
from tests.oracle.scalar import PAGE_BYTES, Pool, k_order
from tests.oracle.sharded import ShardedPool

FORMULAS: dict[str, Callable[..., int]] = {
    "ascend-310p": other_npus.ascend_nz,
    "ascend-910b": other_npus.linear_tokens,
    "tpu-bf16": other_npus.tpu_bf16,
    "linear": other_npus.linear_heads,
}


def test_every_layout_is_judged_by_somebody() -> None:
    assert {entry.name for entry in LAYOUTS if not entry.needs_device} == set(FORMULAS)
    assert {entry.tiling for entry in LAYOUTS} == {tiling.name for tiling in TILINGS}
    assert all(entry.source for entry in (*LAYOUTS, *DEVICES, *TILINGS))


@pytest.mark.parametrize("name", sorted(FORMULAS))
@pytest.mark.parametrize(("heads", "size", "dims"), [(2, 16, 64), (3, 32, 128), (1, 16, 80), (2, 24, 160)])
def test_one_region_by_its_makers_formula(name: str, heads: int, size: int, dims: int) -> None:
    """All elements of two blocks of three; the memory is 16-bit elements without gaps, from 0x1000 on."""
    entry = layout_named(name)
    if size % tiling_named(entry.tiling).tile("token") and "token" not in tiling_named(entry.tiling).padded:
        with pytest.raises(ValueError, match=f"token must be a multiple of 16 for ascend-nz tiles; got {size}"):
            entry.pool(kind="per_layer", layers=1, chips=1, heads=heads, block_size=size, head_dim=dims).rule  # noqa: B018
        return
    layout = entry.pool(kind="per_layer", layers=1, chips=1, heads=heads, block_size=size, head_dim=dims)
    pool = layout.pool_tensor(0, 3, buffer_address=0x1000)
    for block, head, token, dim in itertools.product((0, 2), range(heads), range(size), range(dims)):
        index = {"block": block, "head": head, "token": token, "dim": dim}
        flat = FORMULAS[name](block, head, token, dim, blocks=3, heads=heads, size=size, dims=dims)
        found = pool.locate(index)
        assert (found.bank, found.address, found.bit) == (0, 0x1000 + 2 * flat, 0)
        assert found.exponent_address is None
        back = pool.at(0, found.address)
        assert (back.index, back.part, back.padding) == (index, "element", False)


def test_fractal_nz_is_the_definition_of_a_matrix() -> None:
    """A block of the 310P's cache is the block's [tokens, heads * dims] matrix in FRACTAL_NZ."""
    for token, column in itertools.product(range(32), range(96)):
        assert other_npus.ascend_nz(
            0, column // 48, token, column % 48, blocks=1, heads=2, size=32, dims=48
        ) == other_npus.ascend_nz_by_blocks_of_16(token, column, tokens=32, columns=96)


def test_tpu_pads_dims_and_tokens_with_nothing_of_the_model() -> None:
    layout = layout_named("tpu-bf16").pool(
        kind="per_layer", layers=1, chips=1, heads=1, block_size=20, head_dim=64
    )
    pool = layout.pool_tensor(0, 1)
    assert pool.order.size == 24 * 128
    inside = [not pool.at(0, 2 * flat).padding for flat in range(24 * 128)]
    assert sum(inside) == 20 * 64
    assert pool.at(0, 2).index == {"block": 0, "head": 0, "token": 1, "dim": 0}  # the word's upper half: the next row
    assert pool.at(0, 2).padding is False


@st.composite
def ttnn_pools(draw: st.DrawFn) -> tuple[KVPoolLayout, Pool, int, BaseTable, int]:
    """A pool by its catalog entry, the oracle's pool, the rotary dim, bases and the kv that is looked at."""
    device = draw(st.sampled_from(DEVICES))
    name = draw(st.sampled_from(["ttnn-interleaved", "ttnn-nd-sharded"]))
    kind: Any = draw(st.sampled_from(["per_layer", "cross_layer"]))
    layers, heads = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    head_dim = draw(st.sampled_from([32, 64, 80, 96, 128]))
    rotary = draw(st.sampled_from([None, 16, 32]))
    shard_rows = draw(st.integers(1, 3)) if name == "ttnn-nd-sharded" else 1
    layout = layout_named(name).pool(
        kind=kind,
        layers=layers,
        chips=1,
        heads=heads,
        block_size=draw(st.sampled_from([16, 32, 64])),
        head_dim=head_dim,
        codec=draw(st.sampled_from(sorted(PAGE_BYTES))),
        device=device,
        rotary_dim=rotary,
        shard_rows=shard_rows,
    )
    bases = draw(st.sampled_from([device.base_table, BaseTable(tuple(range(0, device.banks << 34, 1 << 34)))]))
    pools = {"k": 0x100080, "v": 0x900080}
    made: dict[str, Any] = {
        "kind": kind,
        "layers": layers,
        "heads": heads,
        "block_size": layout.block_size,
        "head_dim": -(-head_dim // 32) * 32,
        "banks": bases.bases,
        "buffer_address": pools if kind == "cross_layer" else [pools] * layers,
        "codec": layout.codec,
        "alignment": device.alignment,
    }
    oracle = ShardedPool(**made, shard_rows=shard_rows) if name == "ttnn-nd-sharded" else Pool(**made)
    return layout, oracle, head_dim if rotary is None else rotary, bases, draw(st.integers(0, 1))


@given(ttnn_pools(), st.data())
@settings(deadline=None, max_examples=200)
def test_banks_by_the_oracles_address(case: Any, data: st.DataObject) -> None:
    layout, oracle, rotary, bases, kv = case
    tensor: Any = "kv"[kv]
    pool = layout.pool_tensor(kv, 9, bases, {"k": 0x100080, "v": 0x900080}[tensor])
    index = {
        "block": data.draw(st.integers(0, 8)),
        "layer": data.draw(st.integers(0, layout.layers - 1)),
        "head": data.draw(st.integers(0, layout.heads - 1)),
        "token": data.draw(st.integers(0, layout.block_size - 1)),
        "dim": data.draw(st.integers(0, layout.head_dim - 1)),
    }
    order = rotary if kv == 0 else 0
    place = next(d for d in range(layout.head_dim) if k_order(d, layout.head_dim, order) == index["dim"])
    bank, page, element = oracle.address(tensor, index["block"], index["layer"], index["head"], index["token"], place)
    if layout.kind == "per_layer":
        del index["layer"]
    found = pool.locate(index)
    bits = {"float32": 32, "bfloat16": 16, "bfp8": 8, "bfp4": 4, "bfp2": 2}[layout.codec]
    head = 64 if layout.codec.startswith("bfp") else 0
    assert (found.bank, found.element) == (bank, element)
    assert (found.address, found.bit) == (page + head + element * bits // 8, element * bits % 8)
    assert found.exponent_address == (page + element // 16 if head else None)
    back = pool.at(bank, found.address)
    # A byte may hold several elements: it is known by its first one.
    first = pool.locate(back.index)
    assert (first.bank, first.address, first.bit, back.part) == (bank, found.address, 0, "element")
    if bits >= 8:
        assert back.index == index and not back.padding
    if found.exponent_address is not None:
        exponent = pool.at(bank, found.exponent_address)
        assert exponent.part == "exponent"
        if not exponent.padding:
            assert pool.locate(exponent.index).element == element // 16 * 16


def test_addresses_that_are_none() -> None:
    layout = layout_named("ttnn-interleaved").pool(
        kind="per_layer",
        layers=1,
        chips=1,
        heads=2,
        block_size=32,
        head_dim=64,
        codec="bfp2",
        device=device_named("blackhole-p100"),
    )
    wide = KVPoolLayout("per_layer", 1, 1, 2, 32, 64, "bfp2", 7, 256)
    assert (layout.page_pitch, wide.page_pitch) == (320, 512)
    pool = wide.pool_tensor(0, 2, buffer_address=0x1000)
    assert pool.at(0, 0x1000 + 319).index == {"block": 0, "head": 0, "token": 31, "dim": k_order(28, 64, 64)}
    for bank, address, message in (
        (0, 0x1000 + 320, "lies between two pages"),
        (1, 0x1000 + 512, "lies past the tensor's 8 pages"),
        (0, 0xFFF, "1 bytes before the buffer"),
        (7, 0x1000, r"bank must lie in 0\.\.6; got 7"),
    ):
        with pytest.raises(ValueError, match=message):
            pool.at(bank, address)
    with pytest.raises(ValueError, match=r"head must lie in 0\.\.1; got 2"):
        pool.locate({"head": 2})
    with pytest.raises(ValueError, match="no axis 'layer'; it has block, head, token, dim"):
        pool.locate({"layer": 0})


def test_a_layout_for_banks_needs_a_device() -> None:
    shape: Any = {"kind": "per_layer", "layers": 1, "chips": 1, "heads": 1, "block_size": 32, "head_dim": 64}
    with pytest.raises(ValueError, match="ttnn-nd-sharded deals pages out to banks: name a device"):
        layout_named("ttnn-nd-sharded").pool(**shape)
    with pytest.raises(ValueError, match=r"ttnn-interleaved, ttnn-nd-sharded, .*linear; got 'gaudi'"):
        layout_named("gaudi")
    with pytest.raises(ValueError, match=r"ttnn, ascend-nz, .*; got 'nz'"):
        tiling_named("nz")


def test_a_linear_pool_has_one_bank() -> None:
    with pytest.raises(ValueError, match="a linear pool has one bank; got 8"):
        KVPoolLayout("per_layer", 1, 1, 1, 32, 64, "bfp8", 8, 64, channels="linear").rule  # noqa: B018
