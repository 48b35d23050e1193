"""Pools, channel rules, codecs' sizes and the catalog against the oracle and published device tables."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hawk_connector.layout.catalog import device_named
from hawk_connector.layout.channels import InterleavedRule
from hawk_connector.layout.codec import CODECS, codec_named
from hawk_connector.layout.kv_pool import KVPoolLayout
from hawk_connector.layout.kv_shape import KVShape
from hawk_connector.layout.tilings import tiling_named
from tests.layout.pools import KINDS, pool_of
from tests.oracle.scalar import PAGE_BYTES

layouts = st.builds(
    KVPoolLayout,
    kind=st.sampled_from(KINDS),
    layers=st.integers(1, 4),
    chips=st.integers(1, 4),
    heads=st.integers(1, 4),
    block_size=st.sampled_from([16, 32, 48, 64, 128]),
    head_dim=st.sampled_from([32, 64, 96, 128]),
    codec=st.sampled_from(sorted(PAGE_BYTES)),
    banks=st.sampled_from([1, 7, 8, 12]),
    alignment=st.sampled_from([32, 64, 128, 256]),
)


@given(layouts, st.integers(0, 9))
@settings(deadline=None)
def test_pages_and_addresses_are_the_oracles(layout: KVPoolLayout, block: int) -> None:
    """Every page of a block, found through the layout's own numbers, lies where the oracle says."""
    buffers = [0x100080 + index * 0x4000000 for index in range(layout.pools)]
    pool = pool_of(layout, [bank * 0x40000000 for bank in range(layout.banks)], buffers)
    assert layout.pages_per_block == pool.tiles_per_block()
    tiles, columns = layout.pages_per_block // layout.heads, layout.head_dim // 32
    tensors: Any = ("k", "v")
    for layer, (kv, tensor), head in itertools.product(
        range(layout.layers), enumerate(tensors), range(layout.heads)
    ):
        for tile in range(tiles):
            page = block * layout.pages_per_unit + layout.first_page_of(layer) + head * tiles + tile
            token, dim = tile // columns * 32, tile % columns * 32
            bank, address, place = pool.address(tensor, block, layer, head, token, dim)
            assert place == 0
            assert layout.rule.bank(page) == bank
            found = bank * 0x40000000 + buffers[layout.pool_of(layer, kv)] + layout.rule.offset(page)
            assert found == address
            assert page < layout.pool_pages(block + 1)


@given(layouts, st.integers(1, 5))
@settings(deadline=None)
def test_a_pool_has_the_slots_that_its_last_page_needs(layout: KVPoolLayout, blocks: int) -> None:
    pages = layout.pool_pages(blocks)
    slots = layout.rule.slots(pages)
    used = {(layout.rule.bank(page), layout.rule.offset(page)) for page in range(pages)}
    assert len(used) == pages  # no two pages in one place
    assert max(offset for _, offset in used) == (slots - 1) * layout.page_pitch


@pytest.mark.parametrize(
    ("kind", "unit", "block"),
    [("cross_layer", 8 * 174_080, 16 * 174_080), ("per_layer", 8 * 2_176, 16 * 174_080)],
)
def test_llama_70b_on_four_chips(kind: Any, unit: int, block: int) -> None:
    """Published figure: 80 layers, 8 KV heads of 128, 64-token blocks in bfp8: 174,080 B per bank and pool."""
    layout = KVPoolLayout(kind, 80, 4, 2, 64, 128, "bfp8", 8, 64)
    assert layout.unit_bytes == unit
    assert layout.block_bytes == block


@pytest.mark.parametrize("name", sorted(PAGE_BYTES))
def test_page_bytes_are_ttnns(name: str) -> None:
    assert codec_named(name).page_bytes(1024) == PAGE_BYTES[name]
    assert codec_named(name).name == name


def test_ttnns_codecs_are_those_of_the_oracle() -> None:
    """float16 is for other NPUs."""
    assert set(tiling_named("ttnn").codecs) == set(PAGE_BYTES) == {codec.name for codec in CODECS} - {"float16"}
    with pytest.raises(ValueError, match="float32, bfloat16, float16, bfp8, bfp4, bfp2; got 'fp8'"):
        codec_named("fp8")


@pytest.mark.parametrize(
    ("name", "bases", "alignment", "first"),
    [
        ("blackhole-p150", [0] * 8, 64, 0x100080),
        ("blackhole-p100", [0] * 7, 64, 0x100080),
        ("wormhole-n150", [0, 0x40000000] * 6, 32, 0x100040),
    ],
)
def test_devices_are_those_that_ttnn_showed(name: str, bases: list[int], alignment: int, first: int) -> None:
    device = device_named(name)
    assert (list(device.bases), device.banks, device.alignment, device.first_address) == (
        bases,
        len(bases),
        alignment,
        first,
    )


def test_an_unknown_device_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="blackhole-p150, blackhole-p100, wormhole-n150; got 'p300'"):
        device_named("p300")


def test_a_rule_needs_banks_and_a_pitch() -> None:
    with pytest.raises(ValueError, match="at least one bank; got 0"):
        InterleavedRule(0, 64)
    with pytest.raises(ValueError, match="pitch must be positive; got 0 bytes"):
        InterleavedRule(8, 0)


@pytest.mark.parametrize("field", ["layers", "chips", "heads", "block_size", "head_dim", "banks", "alignment"])
@pytest.mark.parametrize("value", [0, -1, 1 << 40])
def test_a_layout_from_the_wire_is_bounded(field: str, value: int) -> None:
    """A peer's numbers size our tables: absurd ones are no layout at all."""
    good = msgspec.to_builtins(KVPoolLayout("per_layer", 2, 2, 2, 64, 64, "bfp8", 8, 64))
    assert msgspec.convert(good, KVPoolLayout).chips == 2
    with pytest.raises(msgspec.ValidationError, match=field):
        msgspec.convert(good | {field: value}, KVPoolLayout)


@pytest.mark.parametrize("field", ["layers", "kv_heads", "head_dim"])
@pytest.mark.parametrize("value", [0, -1, 1 << 40])
def test_a_shape_from_the_wire_is_bounded(field: str, value: int) -> None:
    good = msgspec.to_builtins(KVShape(2, 2, 64, "float32"))
    assert msgspec.convert(good, KVShape).layers == 2
    with pytest.raises(msgspec.ValidationError, match=field):
        msgspec.convert(good | {field: value}, KVShape)
