"""Synthetic prefill caches: written element by element where the oracle says, read by the product through its strides.

Everything that is not a token of a prompt is NaN, so whatever is moved beyond it shows.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch

from hawk_connector.prefill.kv_source import CPU_BACKEND, ordered_sources
from hawk_connector.transform.reference import LayerSource
from tests.oracle import scalar

Family = Literal["LBHNC", "LBNHC", "cpu"]


@dataclass(frozen=True)
class Geometry:
    """The model and how the prefill side keeps its cache."""

    family: Family = "LBHNC"
    layers: int = 2
    kv_heads: int = 4
    head_dim: int = 64
    block_size: int = 16
    ranks: int = 1
    blocks: int = 40
    dtype: torch.dtype = torch.float32

    def heads_of_rank(self, rank: int) -> list[int]:
        """vLLM gives ranks their heads as the oracle's chips get theirs."""
        return scalar.heads_of_chip(rank, self.ranks, self.kv_heads)


class Prompt:
    """Random K and V, as the source dtype holds them: float32 ``[2, layers, heads, tokens, dim]``."""

    def __init__(self, geometry: Geometry, tokens: int, seed: int) -> None:
        self.tokens = tokens
        shape = (2, geometry.layers, geometry.kv_heads, tokens, geometry.head_dim)
        values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        self.values = values.to(geometry.dtype).float().numpy()

    def row(self, layer: int, tensor: scalar.Tensor, head: int, token: int) -> list[float]:
        return [float(x) for x in self.values[0 if tensor == "k" else 1, layer, head, token]]


@dataclass
class Cache:
    """One rank's cache: a flat buffer in the family's memory order."""

    geometry: Geometry
    rank: int
    flat: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self._heads = self.geometry.heads_of_rank(self.rank)
        g = self.geometry
        self._source = scalar.Source(g.family, g.blocks, len(self._heads), g.block_size, g.head_dim, g.layers)
        size = g.layers * g.blocks * len(self._heads) * g.block_size * 2 * g.head_dim
        self.flat = torch.full((size,), float("nan"), dtype=g.dtype)

    def write(self, prompt: Prompt, table: list[int], first: int, last: int) -> None:
        """What a step does: the KV of tokens ``first`` .. ``last - 1`` into the request's blocks ``table``."""
        g, index = self.geometry, self._source.index
        where: list[int] = []
        what: list[np.ndarray] = []
        tensors: tuple[scalar.Tensor, ...] = ("k", "v")
        for kv, tensor in enumerate(tensors):
            for layer in range(g.layers):
                for local, head in enumerate(self._heads):
                    for token in range(first, last):
                        block, row = table[token // g.block_size], token % g.block_size
                        where += [index(tensor, block, layer, local, row, d) for d in range(g.head_dim)]
                        what.append(prompt.values[kv, layer, head, token])
        self.flat[torch.tensor(where)] = torch.from_numpy(np.concatenate(what)).to(g.dtype)

    def poison(self, table: list[int]) -> None:
        """Another request, or nobody, has written over these blocks."""
        g = self.geometry
        self.flat.view(g.layers, g.blocks, -1)[:, table] = float("nan")

    def sources(self) -> list[LayerSource]:
        """Through the product's own reading of shapes and strides."""
        g, heads = self.geometry, len(self._heads)
        caches = {}
        for layer, flat in enumerate(self.flat.view(g.layers, -1)):
            if g.family == "LBNHC":
                view = flat.view(g.blocks, g.block_size, heads, 2 * g.head_dim).permute(0, 2, 1, 3)
            else:
                view = flat.view(g.blocks, heads, g.block_size, 2 * g.head_dim)
            caches[f"layers.{layer}"] = view
        backend = CPU_BACKEND if g.family == "cpu" else "FLASH_ATTN"
        return ordered_sources(caches, list(caches), dict.fromkeys(caches, backend), heads, g.head_dim)


class BlockAllocator:
    """vLLM's blocks in small: hands them out in a scattered order."""

    def __init__(self, blocks: int, seed: int = 0) -> None:
        self._free = list(range(blocks))
        random.Random(seed).shuffle(self._free)

    def take(self, count: int) -> list[int]:
        taken, self._free = self._free[:count], self._free[count:]
        assert len(taken) == count, "the test's cache is too small"
        return taken

    def give_back(self, blocks: list[int]) -> None:
        self._free += blocks
