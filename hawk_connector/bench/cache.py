"""A prefill side's cache without a model: known values in one of vLLM's layouts, in memory of its own.

The element at place ``i`` of the whole memory is ``table[i % len(table)]``, so that whoever knows the layout's index
formula can say what any element holds without reading the cache.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from hawk_connector.prefill.kv_source import CPU_BACKEND, ordered_sources
from hawk_connector.transform.reference import LayerSource

__all__ = ["DTYPES", "CacheShape", "Family", "SyntheticCache"]

Family = Literal["gpu-nhd", "gpu-hnd", "cpu"]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# A prime, so that equal places of two blocks or heads never hold the same values.
_TABLE = 1_000_003
_BF16_BYTES = 2


@dataclass(frozen=True)
class CacheShape:
    """Model and cache.  ``family``: vLLM's GPU backends in their two stride orders, or its CPU backend.

    ``blocks`` of ``block_size`` tokens.  ``dtype``: a key of DTYPES.
    """

    family: Family
    layers: int
    kv_heads: int
    head_dim: int
    block_size: int
    blocks: int
    dtype: str

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def block_elements(self) -> int:
        """Elements of one block in one layer, K and V."""
        return 2 * self.kv_heads * self.block_size * self.head_dim

    @property
    def elements(self) -> int:
        return self.layers * self.blocks * self.block_elements

    @property
    def nbytes(self) -> int:
        return self.elements * self.torch_dtype.itemsize

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's K and V, all layers, in this dtype."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.torch_dtype.itemsize

    @property
    def bf16_token_bytes(self) -> int:
        """The same counted in bfloat16, as sizes of transfers are."""
        return 2 * self.layers * self.kv_heads * self.head_dim * _BF16_BYTES

    def place(self, kv: int, layer: int, block: int, head: int) -> NDArray[np.int64]:
        """Where the elements of a head's K (kv 0) or V (kv 1) in one block lie: int64 ``[block_size, head_dim]``.

        The formulas are vLLM's: ``[block, token, head, 2 * dim]`` and ``[block, head, token, 2 * dim]`` of the GPU
        backends; pages of K by columns and then V by rows of the CPU backend (csrc/cpu/cpu_attn_vec.hpp).
        """
        heads, size, dim = self.kv_heads, self.block_size, self.head_dim
        start = (layer * self.blocks + block) * self.block_elements
        token = np.arange(size, dtype=np.int64)[:, None]
        place = np.arange(dim, dtype=np.int64)[None, :]
        if self.family == "gpu-nhd":
            return start + (token * heads + head) * 2 * dim + kv * dim + place
        if self.family == "gpu-hnd":
            return start + (head * size + token) * 2 * dim + kv * dim + place
        page = start + head * 2 * size * dim
        return page + place * size + token if kv == 0 else page + size * dim + token * dim + place


class SyntheticCache:
    """``memory``: uint8, the whole cache, layer after layer."""

    def __init__(self, shape: CacheShape, seed: int, device: torch.device | None = None) -> None:
        self.shape = shape
        self.table = value_table(shape.torch_dtype, seed)
        if device is None or device.type == "cpu":
            self._mapping = mmap.mmap(-1, shape.nbytes)
            memory = torch.frombuffer(self._mapping, dtype=torch.uint8)
        else:
            memory = torch.empty(shape.nbytes, dtype=torch.uint8, device=device)
        self.memory = memory
        flat = memory.view(shape.torch_dtype)
        table = self.table.to(flat.device)
        for start in range(0, shape.elements, _TABLE):
            part = flat[start : start + _TABLE]
            part.copy_(table[: len(part)])

    @property
    def address(self) -> int:
        return int(self.memory.data_ptr())

    def caches(self) -> dict[str, torch.Tensor]:
        """The tensors as vLLM registers them: ``[blocks, heads, block_size, 2 * head_dim]``, by layer."""
        s = self.shape
        found = {}
        for layer, flat in enumerate(self.memory.view(s.torch_dtype).view(s.layers, -1)):
            if s.family == "gpu-nhd":
                view = flat.view(s.blocks, s.block_size, s.kv_heads, 2 * s.head_dim).permute(0, 2, 1, 3)
            else:
                view = flat.view(s.blocks, s.kv_heads, s.block_size, 2 * s.head_dim)
            found[f"layers.{layer}"] = view
        return found

    @property
    def backend(self) -> str:
        """vLLM's name of an attention backend that keeps its cache so."""
        return CPU_BACKEND if self.shape.family == "cpu" else "FLASH_ATTN"

    def sources(self) -> list[LayerSource]:
        """Through the product's own reading of shapes and strides."""
        caches, s = self.caches(), self.shape
        return ordered_sources(caches, list(caches), dict.fromkeys(caches, self.backend), s.kv_heads, s.head_dim)


def value_table(dtype: torch.dtype, seed: int) -> torch.Tensor:
    """The values that caches repeat: ``[_TABLE]``, normally distributed."""
    return torch.randn(_TABLE, generator=torch.Generator().manual_seed(seed)).to(dtype)
