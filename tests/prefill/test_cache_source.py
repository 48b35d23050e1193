"""Whole blocks of vLLM's caches: where they lie, where K and V lie in them by the oracle, and what is opaque."""

from __future__ import annotations

import platform
from itertools import product
from typing import Any

import pytest
import torch

from hawk_connector.errors import UnsupportedError
from hawk_connector.layout.kv_pool import KVPoolLayout
from hawk_connector.layout.kv_shape import KVShape
from hawk_connector.plan.pairing import DecodeFacts, HostPairing, PrefillFacts, pair
from hawk_connector.prefill.kv_source import CPU_BACKEND, CacheSource, cache_source, ordered_sources, read_cache
from hawk_connector.prefill.raw_copy import copy_blocks
from tests.oracle.scalar import Source, Tensor
from tests.prefill.test_kv_source import BLOCKS, DIMS, HEADS, caches_of, flat_of

TENSORS: tuple[Tensor, ...] = ("k", "v")


def source_of(family: Any, block_size: int, layers: int = 2) -> tuple[Source, torch.Tensor, CacheSource]:
    """The oracle's cache, in which every element is its own index, and what is read of it."""
    source = Source(family, BLOCKS, HEADS, block_size, DIMS, layers=layers)
    flat = flat_of(source)
    caches = {f"l{i}": cache for i, cache in enumerate(caches_of(source, flat))}
    backend = CPU_BACKEND if family == "cpu" else "FLASH_ATTN"
    names, backends = list(caches), dict.fromkeys(caches, backend)
    _, found = read_cache(caches, names, backends, HEADS, DIMS, block_size)
    assert found is not None
    assert (
        found.memory
        == cache_source(
            ordered_sources(caches, names, backends, HEADS, DIMS), block_size, found.memory.layout.backend
        ).memory
    )
    return source, flat, found


@pytest.mark.parametrize("family", ["LBHNC", "LBNHC", "cpu"])
@pytest.mark.parametrize("block_size", [32, 64])
def test_k_and_v_lie_in_a_block_where_the_oracle_says(family: Any, block_size: int) -> None:
    source, flat, found = source_of(family, block_size)
    layout = found.memory.layout
    assert layout.sound and layout.dense and not layout.opaque
    assert (layout.layers, layout.heads, layout.head_dim, layout.block_size) == (2, HEADS, DIMS, block_size)
    assert layout.block_bytes == 2 * HEADS * block_size * DIMS * 4
    assert found.memory.num_blocks == BLOCKS
    start = flat.data_ptr()
    for place, tensor in zip((layout.k, layout.v), TENSORS, strict=True):
        assert place is not None
        axes = map(range, (2, BLOCKS, HEADS, block_size, DIMS))
        for layer, block, head, token, dim in product(*axes):
            element = place.offset + head * place.head + token * place.token + dim * place.dim
            address = found.memory.bases[layer] + block * layout.block_stride + element * 4
            assert address == start + 4 * source.index(tensor, block, layer, head, token, dim)


def test_blocks_are_the_memory_itself() -> None:
    _, flat, found = source_of("LBNHC", 32)
    each = flat.view(2, BLOCKS, -1).view(torch.uint8)
    for layer, blocks in enumerate(found.blocks):
        assert torch.equal(blocks, each[layer])
        assert blocks.data_ptr() == found.memory.bases[layer]
    assert found.memory.regions == [(base, BLOCKS * found.memory.layout.block_bytes) for base in found.memory.bases]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="names of vLLM's CPU kernels are looked at on x86-64")
def test_blocks_that_only_their_kernels_read_are_opaque() -> None:
    """16 is no multiple of 32, so vLLM's CPU backend packs K for 16 lanes."""
    flat = torch.arange(2 * 3 * HEADS * 16 * 2 * DIMS, dtype=torch.float32)
    caches = {f"l{i}": x for i, x in enumerate(flat.view(2, 3, HEADS, 16, 2 * DIMS))}
    backends = dict.fromkeys(caches, CPU_BACKEND)
    views, found = read_cache(caches, list(caches), backends, HEADS, DIMS, 16)
    assert views == [] and found is not None
    layout = found.memory.layout
    assert layout.opaque and layout.backend == "CPU_ATTN vec16" and layout.sound
    assert found.memory.bases == tuple(cache.data_ptr() for cache in caches.values())
    assert torch.equal(found.blocks[1][2].view(torch.float32), caches["l1"][2].reshape(-1))
    with pytest.raises(UnsupportedError, match="shape or dtype is not known"):
        read_cache(caches, list(caches), backends, HEADS + 1, DIMS, 16)


def test_what_is_no_tensor_is_refused_by_its_layer() -> None:
    with pytest.raises(UnsupportedError, match="no tensor of l1"):
        read_cache({"l0": torch.zeros(1)}, ["l0", "l1"], {"l0": "X", "l1": "X"}, 1, 1, 16)


def test_blocks_that_do_not_divide_vllms_are_refused() -> None:
    source = Source("LBHNC", BLOCKS, HEADS, 32, DIMS)
    views = ordered_sources({"l": caches_of(source, flat_of(source))[0]}, ["l"], {"l": "X"}, HEADS, DIMS)
    assert cache_source(views, 96).memory.layout.split == 3
    with pytest.raises(UnsupportedError, match="do not divide 80 tokens"):
        cache_source(views, 80)


def test_layers_that_are_kept_in_several_ways_have_no_whole_blocks() -> None:
    one, other = (Source(family, BLOCKS, HEADS, 32, DIMS) for family in ("LBHNC", "LBNHC"))
    caches = {"l0": caches_of(one, flat_of(one))[0], "l1": caches_of(other, flat_of(other))[0]}
    views, found = read_cache(caches, ["l0", "l1"], dict.fromkeys(caches, "FLASH_ATTN"), HEADS, DIMS, 32)
    assert len(views) == 2 and found is None


def test_a_raw_parcel_is_block_after_block_and_of_each_all_layers() -> None:
    _, flat, found = source_of("LBNHC", 32)
    shape = KVShape(2, HEADS, DIMS, "float32")
    facts = PrefillFacts(shape, "m", 1, 0, 32, 1 << 20, cache=found.memory.layout)
    pools = KVPoolLayout("cross_layer", 2, 1, HEADS, 32, DIMS, "float32", 8, 64)
    pairing = pair(facts, DecodeFacts(shape, "m", pools, "host"))
    assert isinstance(pairing, HostPairing)
    plan = pairing.parcel(1, 2, 90)  # tokens 32 up to 89, which are the request's blocks 1 and 2
    out = torch.zeros(plan.nbytes, dtype=torch.uint8)
    copy_blocks(found.blocks, torch.tensor([0, 1, 0]), plan, 1, out)
    layers = flat.view(2, BLOCKS, -1)
    wanted = torch.cat([layers[layer, block] for block in (1, 0) for layer in (0, 1)])
    assert torch.equal(out.view(torch.float32), wanted)
