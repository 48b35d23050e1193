"""The same program packs for other NPUs than Tenstorrent's: whole caches, by the index that each maker states."""

from __future__ import annotations

import ctypes
import itertools
import random
import struct
from typing import Any

import numpy as np
import pytest
import torch

from hawk_connector.layout.catalog import layout_named
from hawk_connector.layout.codec import codec_named
from hawk_connector.layout.kv_shape import KVShape
from hawk_connector.plan.pairing import DecodeFacts, Pairing, PrefillFacts, pair
from hawk_connector.plan.segments import PoolPlacement, pool_segments
from hawk_connector.transform.reference import LayerSource, encode_pages, pack_parcel, unpack_parcel
from tests.layout.test_catalog import FORMULAS
from tests.oracle.scalar import heads_of_chip

pytestmark = pytest.mark.slow

UNTOUCHED = 0x5A5A
LAYERS, KV_HEADS, TOKENS, POOL_BLOCKS, SOURCE_BLOCK = 2, 4, 70, 6, 16


def source_of(rank: int, ranks: int, dims: int, dtype: torch.dtype) -> tuple[list[LayerSource], torch.Tensor, Any]:
    """One rank's caches ``[blocks, heads, 16, 2 * dims]``, its block table, and the values by (layer, kv, head)."""
    made = torch.Generator().manual_seed(5)
    logical = torch.randn((LAYERS, 2, KV_HEADS, TOKENS, dims), generator=made).to(dtype)
    heads = heads_of_chip(rank, ranks, KV_HEADS)
    table = random.Random(3).sample(range(8), -(-TOKENS // SOURCE_BLOCK))
    layers = []
    for layer in range(LAYERS):
        cache = torch.full((8, len(heads), SOURCE_BLOCK, 2 * dims), float("nan"), dtype=dtype)
        for token in range(TOKENS):
            for kv in (0, 1):
                row = logical[layer, kv, heads, token]
                cache[table[token // SOURCE_BLOCK], :, token % SOURCE_BLOCK, kv * dims : (kv + 1) * dims] = row
        layers.append(LayerSource(cache[..., :dims], cache[..., dims:]))
    return layers, torch.tensor(table), logical


@pytest.mark.parametrize(("ranks", "chips"), [(1, 1), (1, 2), (2, 1), (2, 4), (4, 2)])
@pytest.mark.parametrize("name", sorted(FORMULAS))
@pytest.mark.parametrize("kind", ["per_layer", "cross_layer"])
def test_a_request_crosses_and_returns(kind: Any, name: str, ranks: int, chips: int) -> None:
    dims, size = (64, 32) if name == "tpu-bf16" else (80, 32)
    ids = [4, 0, 3]
    held = len(heads_of_chip(0, chips, KV_HEADS))
    layout = layout_named(name).pool(kind=kind, layers=LAYERS, chips=chips, heads=held, block_size=size, head_dim=dims)
    dtype = {"float16": torch.float16, "bfloat16": torch.bfloat16}[layout.codec]
    pool_elements = layout.pool_pages(POOL_BLOCKS) * layout.page_bytes // 2
    assert layout.page_pitch == layout.page_bytes  # no gaps: the region is the array
    memory = np.full((chips, layout.pools, pool_elements), UNTOUCHED, dtype=np.uint16)
    origins = np.array([[memory[chip].ctypes.data] for chip in range(chips)], dtype=np.int64)
    buffers = tuple(2 * pool_elements * pool for pool in range(layout.pools))
    placement = PoolPlacement(origins, buffers, POOL_BLOCKS)
    shape = KVShape(LAYERS, KV_HEADS, dims, layout.codec)
    logical = None
    for rank in range(ranks):
        layers, table, logical = source_of(rank, ranks, dims, dtype)
        facts = PrefillFacts(shape, "m", ranks, rank, SOURCE_BLOCK, 1 << 30)
        pairing = pair(facts, DecodeFacts(shape, "m", layout))
        assert isinstance(pairing, Pairing), [str(mismatch) for mismatch in pairing]
        plan = pairing.plan(len(ids))
        parcel = torch.full((plan.nbytes,), 0xA5, dtype=torch.uint8)
        pack_parcel(layers, table, plan, 0, TOKENS, parcel)
        segments = pool_segments(plan, parcel.data_ptr(), ids, placement)
        reads = list(zip(segments.remote.tolist(), segments.local.tolist(), segments.length.tolist(), strict=True))
        for remote, local, length in reads:
            ctypes.memmove(local, remote, length)
        # And back, into caches that hold nothing.
        returned = torch.full((plan.nbytes,), 0xA5, dtype=torch.uint8)
        for remote, local, length in reads:
            ctypes.memmove(remote - parcel.data_ptr() + returned.data_ptr(), local, length)
        empty = [LayerSource(torch.zeros_like(source.k), torch.zeros_like(source.v)) for source in layers]
        unpack_parcel(returned, plan, empty, table, 0, TOKENS)
        for source, back in zip(layers, empty, strict=True):
            assert torch.equal(source.k.nan_to_num(nan=0.0), back.k)
            assert torch.equal(source.v.nan_to_num(nan=0.0), back.v)
    assert logical is not None
    assert (memory == expected(name, kind, layout, dims, size, ids, logical)).all()


def expected(
    name: str, kind: str, layout: Any, dims: int, size: int, ids: list[int], logical: torch.Tensor
) -> np.ndarray[Any, np.dtype[np.uint16]]:
    """The caches by the oracle's index; of padded blocks what is no element is zeros."""
    rows = POOL_BLOCKS * (LAYERS if kind == "cross_layer" else 1)
    memory = np.full((layout.chips, layout.pools, layout.pool_pages(POOL_BLOCKS) * layout.page_bytes // 2), UNTOUCHED)
    values = logical.view(torch.int16).numpy().view(np.uint16)
    per_row = memory.shape[2] // rows
    for chip, layer, kv in itertools.product(range(layout.chips), range(LAYERS), (0, 1)):
        pool = memory[chip, kv if kind == "cross_layer" else 2 * layer + kv]
        heads = heads_of_chip(chip, layout.chips, KV_HEADS)
        for index, block in enumerate(ids):
            row = block * LAYERS + layer if kind == "cross_layer" else block
            pool[row * per_row : (row + 1) * per_row] = 0
            for h, t, d in itertools.product(range(len(heads)), range(size), range(dims)):
                if index * size + t >= TOKENS:
                    continue
                flat = FORMULAS[name](row, h, t, d, blocks=rows, heads=len(heads), size=size, dims=dims)
                pool[flat] = values[layer, kv, heads[h], index * size + t, d]
    return memory.astype(np.uint16)


def test_float16_is_rounded_to_nearest_even() -> None:
    """As Python's own half floats are, denormals included."""
    made = torch.Generator().manual_seed(2)
    exponents = torch.randint(-26, 14, (1, 1, 4096), generator=made)
    values = torch.ldexp(torch.randn((1, 1, 4096), generator=made), exponents)
    wanted = struct.pack("<4096e", *values.flatten().tolist())
    assert encode_pages(values, codec_named("float16")).numpy().tobytes() == wanted
