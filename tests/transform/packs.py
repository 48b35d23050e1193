"""Caches of any bits, in each layout that vLLM has, and parcels of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from hawk_connector.layout.kv_pool import KVPoolLayout
from hawk_connector.plan.parcel import ChipShare, ParcelPlan
from hawk_connector.transform.reference import LayerSource

Family = Literal["LBHNC", "LBNHC", "cpu", "odd"]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
BLOCKS = 12


@dataclass(frozen=True)
class Pack:
    """One parcel.  Family "odd": no stride is 1.  ``shares``: heads of the rank that each chip gets."""

    family: Family = "LBHNC"
    dtype: str = "bfloat16"
    codec: str = "bfp8"
    head_dim: int = 64
    source_block: int = 16
    block_size: int = 32
    layers: int = 1
    heads: int = 2
    shares: tuple[tuple[int, ...], ...] = ((0, 1),)
    rotary_dim: int | None = None
    rope_interleaved: bool = True
    alignment: int = 64
    banks: int = 7
    kind: Literal["per_layer", "cross_layer"] = "cross_layer"
    tokens: int = 61
    first_block: int = 0
    blocks: int = 2
    seed: int = 0

    @property
    def plan(self) -> ParcelPlan:
        layout = KVPoolLayout(
            kind=self.kind,
            layers=self.layers,
            chips=len(self.shares),
            heads=len(self.shares[0]),
            block_size=self.block_size,
            head_dim=self.head_dim,
            codec=self.codec,
            banks=self.banks,
            alignment=self.alignment,
            rope_interleaved=self.rope_interleaved,
            rotary_dim=self.rotary_dim,
        )
        shares = tuple(
            ChipShare(chip, tuple((head, i) for i, head in enumerate(s))) for chip, s in enumerate(self.shares)
        )
        return ParcelPlan(layout, shares, self.blocks)

    @property
    def table(self) -> torch.Tensor:
        """The request's blocks."""
        order = np.random.default_rng(self.seed).permutation(BLOCKS)
        return torch.from_numpy(order[: -(-self.tokens // self.source_block)])

    def memory(self) -> torch.Tensor:
        """One layer's cache after another, random bits: ``[layers, elements]``."""
        size = 4 if self.dtype == "float32" else 2
        elements = BLOCKS * self.heads * self.source_block * 2 * self.head_dim * (2 if self.family == "odd" else 1)
        data = np.random.default_rng(self.seed).bytes(self.layers * elements * size)
        return torch.frombuffer(bytearray(data), dtype=DTYPES[self.dtype]).view(self.layers, elements)

    def sources(self, memory: torch.Tensor) -> list[LayerSource]:
        return [self._source(layer) for layer in memory]

    def _source(self, flat: torch.Tensor) -> LayerSource:
        heads, rows, dims = self.heads, self.source_block, self.head_dim
        if self.family == "cpu":
            pages = flat.view(BLOCKS, heads, 2, rows * dims)
            return LayerSource(
                pages[:, :, 0].unflatten(2, (dims, rows)).transpose(2, 3), pages[:, :, 1].unflatten(2, (rows, dims))
            )
        if self.family == "LBNHC":
            cache = flat.view(BLOCKS, rows, heads, 2 * dims).transpose(1, 2)
        elif self.family == "odd":
            cache = flat.view(BLOCKS, heads, rows, 2 * dims, 2)[..., 1]
        else:
            cache = flat.view(BLOCKS, heads, rows, 2 * dims)
        return LayerSource(cache[..., :dims], cache[..., dims:])


BIG = Pack(layers=16, heads=4, shares=((0, 1, 2, 3),), head_dim=128, source_block=32, tokens=256, blocks=8)
"""A parcel of 4.5 million bytes."""


def packed(pack: Pack, packer: Any, fill: int) -> torch.Tensor:
    """A packer's parcel, in a region whose bytes were ``fill`` before."""
    plan = pack.plan
    out = torch.full((plan.nbytes,), fill, dtype=torch.uint8)
    packer.pack(pack.sources(pack.memory()), pack.table, plan, pack.first_block, pack.tokens, out)
    return out
