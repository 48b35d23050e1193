"""Views of vLLM's caches against the oracle's index formulas and against vLLM itself; refusals."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

from hawk_connector.errors import UnsupportedError
from hawk_connector.prefill.kv_source import CPU_BACKEND, layer_source, ordered_sources
from hawk_connector.transform.reference import LayerSource
from tests.oracle.scalar import Source

BLOCKS, HEADS, DIMS = 2, 3, 32


def flat_of(source: Source) -> torch.Tensor:
    """Every element of the cache is its own index (exact in fp32)."""
    count = source.layers * source.blocks * source.heads * source.block_size * 2 * source.head_dim
    assert count < 1 << 24
    return torch.arange(count, dtype=torch.float32)


def caches_of(source: Source, flat: torch.Tensor) -> torch.Tensor:
    """vLLM's tensors of all layers: ``[layers, blocks, heads, block_size, 2 * head_dim]``."""
    s = source
    if s.family == "LBNHC":
        return flat.view(s.layers, s.blocks, s.block_size, s.heads, 2 * s.head_dim).transpose(2, 3)
    return flat.view(s.layers, s.blocks, s.heads, s.block_size, 2 * s.head_dim)


def assert_elements(found: LayerSource, source: Source, layer: int) -> None:
    for kind in (0, 1):
        view, tensor = found.kind(kind), ("k", "v")[kind]
        assert view.shape == (source.blocks, source.heads, source.block_size, source.head_dim)
        values = view.tolist()
        for b, h, n, d in product(*map(range, view.shape)):
            assert values[b][h][n][d] == source.index(tensor, b, layer, h, n, d)  # type: ignore[arg-type]


@pytest.mark.parametrize("family", ["LBHNC", "LBNHC", "cpu"])
@pytest.mark.parametrize("block_size", [32, 64])
def test_views_read_the_oracles_elements(family: Any, block_size: int) -> None:
    """Two layers in one buffer, so that a storage offset counts too."""
    source = Source(family, BLOCKS, HEADS, block_size, DIMS, layers=2)
    flat = flat_of(source)
    backend = CPU_BACKEND if family == "cpu" else "FLASH_ATTN"
    for layer, cache in enumerate(caches_of(source, flat)):
        found = layer_source("layer", cache, backend, HEADS, DIMS)
        assert_elements(found, source, layer)
        for view in (found.k, found.v):  # views, not copies: what vLLM writes later is seen
            assert view.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()


@pytest.mark.parametrize("block_size", [16, 48, 128])
@pytest.mark.parametrize("family", ["LBHNC", "LBNHC"])
def test_gpu_block_sizes(family: Any, block_size: int) -> None:
    source = Source(family, BLOCKS, HEADS, block_size, DIMS)
    assert_elements(layer_source("l", caches_of(source, flat_of(source))[0], "FLASHINFER", HEADS, DIMS), source, 0)


def test_layers_come_in_the_models_order() -> None:
    source = Source("LBHNC", BLOCKS, HEADS, 16, DIMS, layers=3)
    caches = caches_of(source, flat_of(source))
    names = ["model.layers.0.attn", "model.layers.1.attn", "model.layers.2.attn"]
    jumbled = {names[i]: caches[i] for i in (2, 0, 1)}
    found = ordered_sources(jumbled, names, dict.fromkeys(names, "FLASH_ATTN"), HEADS, DIMS)
    for layer, one in enumerate(found):
        assert_elements(one, source, layer)


@pytest.mark.parametrize(
    ("shape", "what"),
    [
        ((2, 4, 3, 16, 64), "five dimensions: K and V apart, as older vLLM had them"),
        ((4, 16, 3, 64), "tokens where heads should be"),
        ((4, 3, 16, 32), "no room for V"),
        ((4, 2, 16, 64), "another number of heads"),
        ((4, 16, 576), "an MLA latent"),
    ],
)
def test_unknown_shapes_are_refused(shape: tuple[int, ...], what: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        layer_source("model.layers.7.attn", torch.zeros(shape), "SOME_ATTN", 3, 32)
    error = caught.value
    assert "model.layers.7.attn" in error.what
    assert error.expected == "[blocks, 3 heads, block_size, 64]"
    assert str(list(shape)) in str(error.got) and "SOME_ATTN" in str(error.got)
    assert error.fix is not None and "FLASH_ATTN" in error.fix


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8, torch.int8])
@pytest.mark.parametrize("backend", [CPU_BACKEND, "FLASH_ATTN"])
def test_quantised_caches_are_refused(dtype: torch.dtype, backend: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        layer_source("layer", torch.zeros((2, 3, 32, 64), dtype=dtype), backend, 3, 32)
    assert caught.value.expected == "float32, bfloat16 or float16"
    assert caught.value.got == str(dtype)
    assert caught.value.fix is not None and "--kv-cache-dtype auto" in caught.value.fix


@pytest.mark.parametrize(
    "cache",
    [
        torch.zeros((2, 32, 3, 64)).transpose(1, 2),  # heads inside tokens
        torch.zeros((2, 3, 32, 128))[..., :64],  # rows with gaps
        torch.zeros((2, 3, 32, 128))[..., ::2],
    ],
    ids=["NHD", "gaps", "every other"],
)
def test_cpu_pages_must_be_contiguous(cache: torch.Tensor) -> None:
    with pytest.raises(UnsupportedError) as caught:
        layer_source("layer", cache, CPU_BACKEND, 3, 32)
    assert caught.value.expected == "row stride 64, element stride 1"
    assert caught.value.got == f"strides {list(cache.stride())}"


@pytest.mark.parametrize("block_size", [16, 48])
def test_cpu_blocks_that_are_no_whole_vectors_are_refused(block_size: int) -> None:
    with pytest.raises(UnsupportedError) as caught:
        layer_source("layer", torch.zeros((2, 3, block_size, 64)), CPU_BACKEND, 3, 32)
    assert "'vec16'" in str(caught.value)
    assert caught.value.got == f"torch.float32 with block size {block_size} on this processor"
    assert caught.value.fix is not None and "--dtype float32" in caught.value.fix


# ---- vLLM itself ------------------------------------------------------------------------------------------


@pytest.mark.vllm
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("block_size", [16, 32, 48, 64])
@pytest.mark.parametrize("head_dim", [32, 64, 80, 128])
def test_a_cpu_cache_is_read_where_vllm_writes_it_with_vec(dtype: torch.dtype, block_size: int, head_dim: int) -> None:
    """On this processor: with AMX, vLLM packs bf16 in another order, and the cache must be refused."""
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    isa = _get_attn_isa(dtype, block_size, head_dim)
    cache = torch.zeros((2, 3, block_size, 2 * head_dim), dtype=dtype)
    if isa == "vec":
        assert layer_source("layer", cache, CPU_BACKEND, 3, head_dim).k.shape == (2, 3, block_size, head_dim)
    else:
        with pytest.raises(UnsupportedError, match=f"'{isa}'"):
            layer_source("layer", cache, CPU_BACKEND, 3, head_dim)


@pytest.mark.vllm
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(("block_size", "head_dim"), [(32, 64), (64, 128), (96, 64)])
def test_what_vllms_cpu_writer_stored(dtype: torch.dtype, block_size: int, head_dim: int) -> None:
    """The dtypes that 'vec' writes on every x86; NaN everywhere else."""
    from vllm._custom_ops import cpu_attn_reshape_and_cache

    tokens, table = block_size + 7, [3, 1]
    cache = torch.full((4, HEADS, block_size, 2 * head_dim), float("nan"), dtype=dtype)
    keys, values = torch.randn((2, tokens, HEADS, head_dim), generator=torch.Generator().manual_seed(5)).to(dtype)
    slots = torch.tensor([table[t // block_size] * block_size + t % block_size for t in range(tokens)])
    key_cache, value_cache = cache.view(4, HEADS, 2 * block_size, head_dim).chunk(2, dim=2)
    cpu_attn_reshape_and_cache(keys, values, key_cache, value_cache, slots, "vec")
    found = layer_source("layer", cache, CPU_BACKEND, HEADS, head_dim)
    for t in range(tokens):
        block, row = table[t // block_size], t % block_size
        assert found.k[block, :, row].equal(keys[t])
        assert found.v[block, :, row].equal(values[t])
    written = torch.zeros(4, block_size, dtype=torch.bool)
    written.view(-1)[slots] = True
    assert found.k.isnan().all(dim=3).all(dim=1).equal(~written)
