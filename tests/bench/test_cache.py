"""The synthetic cache: its formula is the oracle's, and the product's views find the values that it says."""

from __future__ import annotations

import pytest
import torch

from hawk_connector.bench.cache import CacheShape, Family, SyntheticCache, value_table
from tests.oracle import scalar

_ORACLE: dict[Family, scalar.Family] = {"gpu-nhd": "LBNHC", "gpu-hnd": "LBHNC", "cpu": "cpu"}


def shape_of(family: Family, dtype: str = "bf16") -> CacheShape:
    return CacheShape(family, layers=3, kv_heads=2, head_dim=64, block_size=32, blocks=5, dtype=dtype)


@pytest.mark.parametrize("family", list(_ORACLE))
def test_the_formula_is_the_oracles(family: Family) -> None:
    s = shape_of(family)
    source = scalar.Source(_ORACLE[family], s.blocks, s.kv_heads, s.block_size, s.head_dim, s.layers)
    seen = set()
    for layer in range(s.layers):
        for block in range(s.blocks):
            for head in range(s.kv_heads):
                for kv, tensor in enumerate(("k", "v")):
                    place = s.place(kv, layer, block, head)
                    wanted = [
                        [source.index(tensor, block, layer, head, token, d) for d in range(s.head_dim)]  # type: ignore[arg-type]
                        for token in range(s.block_size)
                    ]
                    assert place.tolist() == wanted
                    seen.update(place.reshape(-1).tolist())
    assert seen == set(range(s.elements))


@pytest.mark.parametrize("family", list(_ORACLE))
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_the_products_views_find_the_values_that_the_formula_says(family: Family, dtype: str) -> None:
    s = shape_of(family, dtype)
    cache = SyntheticCache(s, seed=5)
    table = value_table(s.torch_dtype, 5)
    for layer, source in enumerate(cache.sources()):
        for block in range(s.blocks):
            for head in range(s.kv_heads):
                for kv in (0, 1):
                    wanted = table[torch.from_numpy(s.place(kv, layer, block, head) % len(table))]
                    assert torch.equal(source.kind(kv)[block, head], wanted)


def test_values_repeat_only_after_the_whole_table() -> None:
    s = CacheShape("gpu-nhd", layers=3, kv_heads=8, head_dim=128, block_size=16, blocks=12, dtype="bf16")
    cache, table = SyntheticCache(s, seed=1), value_table(torch.bfloat16, 1)
    flat = cache.memory.view(torch.bfloat16)
    assert s.elements > len(table)
    assert torch.equal(flat[: len(table)], table)
    assert torch.equal(flat[len(table) :], table[: s.elements - len(table)])


def test_bytes_of_a_token() -> None:
    # Llama-3.1-70B: 2 x 80 layers x 8 heads x 128 dims x 2 bytes; 32 tokens are 10 MB.
    s = CacheShape("gpu-nhd", layers=80, kv_heads=8, head_dim=128, block_size=16, blocks=4, dtype="fp32")
    assert s.bf16_token_bytes == 327_680
    assert 32 * s.bf16_token_bytes == 10 * 2**20
    assert s.token_bytes == 655_360
    assert s.nbytes == 64 * 655_360
