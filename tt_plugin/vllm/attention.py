"""vLLM's attention backend for the simulated NPU: reads and writes KV tiles in the banks, and nothing else.

Requests with few query tokens (decode) are computed straight from the tiles.  Those with many (prefill, or a prompt
that the NPU computes itself) read one request's K and V of one layer and chip into a scratch that is dropped at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import scaled_dot_product_attention
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    MultipleOf,
)
from vllm.v1.kv_cache_interface import KVCacheLayout

from hawk_connector.errors import UnsupportedError

from ..device.layer_tiles import LayerTiles
from .handle import KVHandle

if TYPE_CHECKING:
    from vllm.v1.attention.backend import CommonAttentionMetadata

__all__ = [
    "TileAttentionBackend",
    "TileAttentionImpl",
    "TileAttentionMetadata",
    "TileAttentionMetadataBuilder",
]

# Up to this many query tokens a request is computed straight from the tiles.
FEW_QUERIES = 8


@dataclass(frozen=True)
class TileAttentionMetadata(AttentionMetadata):
    """One step's batch, as numpy views on vLLM's host tensors.

    ``query_start``: int32 ``[requests + 1]``.  ``seq_lens``: int32 ``[requests]``, tokens with this step's.
    ``tables``: int32 ``[requests, blocks]``.  ``few``, ``many``: requests by number of query tokens.
    """

    query_start: NDArray[np.int32]
    seq_lens: NDArray[np.int32]
    tables: NDArray[np.int32]
    few: NDArray[np.int64]
    many: tuple[int, ...]

    @classmethod
    def of(
        cls, query_start: NDArray[np.int32], seq_lens: NDArray[np.int32], tables: NDArray[np.int32]
    ) -> TileAttentionMetadata:
        counts = np.diff(query_start)
        few = np.flatnonzero((counts > 0) & (counts <= FEW_QUERIES))
        many = tuple(int(request) for request in np.flatnonzero(counts > FEW_QUERIES))
        return cls(query_start, seq_lens, tables, few, many)


class TileAttentionMetadataBuilder(AttentionMetadataBuilder[TileAttentionMetadata]):
    """Makes the metadata once for each step; all layers use it."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> TileAttentionMetadata:
        """The step's metadata.  UnsupportedError for a batch that is not causal."""
        common = common_attn_metadata
        if common.causal is not True:
            raise UnsupportedError("non-causal attention", reason="the NPU's attention is causal")
        requests = common.num_reqs
        return TileAttentionMetadata.of(
            _int32(common.query_start_loc[: requests + 1]),
            _int32(common.seq_lens[:requests]),
            _int32(common.block_table_tensor[:requests]),
        )


class TileAttentionImpl(AttentionImpl[TileAttentionMetadata]):
    """Attention of one layer."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        **unknown: Any,
    ) -> None:
        refused = {
            "ALiBi": alibi_slopes is not None,
            "sliding-window attention": sliding_window is not None,
            "a soft cap on logits": bool(logits_soft_cap),
            f"{attn_type} attention": attn_type != AttentionType.DECODER,
            "KV shared between layers": kv_sharing_target_layer_name is not None,
            **{name: value is not None for name, value in unknown.items()},
        }
        for what, asked in refused.items():
            if asked:
                raise UnsupportedError(
                    what,
                    reason="the simulated NPU has plain causal attention",
                    fix="Serve this model on vLLM's own platform (unset HAWK_NPU).",
                )
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_kv_heads if num_kv_heads is not None else num_heads
        self.kv_cache_dtype = kv_cache_dtype

    def do_kv_cache_update(
        self,
        layer: torch.nn.Module,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Writes this step's tokens into their tiles.

        ``key``, ``value``: ``[tokens, kv_heads, head_size]``.  ``slot_mapping``: int64, -1 for tokens to skip.
        """
        if not isinstance(kv_cache, KVHandle):
            return  # vLLM runs the model before there is a cache
        tokens = min(len(slot_mapping), len(key))
        slots = slot_mapping[:tokens].to(torch.int64).contiguous().numpy()
        kv_cache.tiles.write(slots, _float32(key[:tokens]), _float32(value[:tokens]))

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: TileAttentionMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of this step's queries over the tiles.

        ``query``, ``output``: ``[tokens, num_heads, head_size]`` in the model's dtype.  ``key`` and ``value`` are not
        used: they are in the tiles already, rounded as the pool stores them.
        """
        if attn_metadata is None or not isinstance(kv_cache, KVHandle):
            return output
        metadata, tiles = attn_metadata, kv_cache.tiles
        tokens = int(metadata.query_start[-1])
        queries = query[:tokens].reshape(tokens, self.num_heads, self.head_size).float()
        target = output.view(len(output), self.num_heads, self.head_size)[:tokens]
        direct = target.dtype == torch.float32 and target.is_contiguous()
        result = target if direct else torch.empty_like(queries)
        if len(metadata.few):
            tiles.attend(
                queries.contiguous().numpy(),
                metadata.query_start,
                metadata.seq_lens,
                metadata.tables,
                metadata.few,
                self.scale,
                result.numpy(),
            )
        for request in metadata.many:
            first, end = int(metadata.query_start[request]), int(metadata.query_start[request + 1])
            length = int(metadata.seq_lens[request])
            self._attend_many(tiles, queries[first:end], metadata.tables[request], length, result[first:end])
        if not direct:
            target.copy_(result)
        return output

    def _attend_many(
        self,
        tiles: LayerTiles,
        queries: torch.Tensor,
        blocks: NDArray[np.int32],
        length: int,
        out: torch.Tensor,
    ) -> None:
        """One request's attention for many query tokens, fp32 ``queries`` and ``out`` ``[tokens, heads, dim]``."""
        count = len(queries)
        order = torch.from_numpy(tiles.dim_order)
        mask = None
        if count < length:
            mask = torch.ones(count, length, dtype=torch.bool).tril(length - count)
        for chip, heads in enumerate(tiles.chips):
            if not heads.group:
                continue
            key, value = (torch.from_numpy(rows) for rows in tiles.read(chip, blocks, length))
            shape = (heads.kv_count, heads.group, length, self.head_size)
            chosen = slice(heads.query_first, heads.query_first + heads.kv_count * heads.group)
            grouped = queries[:, chosen].index_select(2, order).view(count, *shape[:2], self.head_size)
            attended = scaled_dot_product_attention(
                grouped.permute(1, 2, 0, 3),
                key[:, None].expand(shape),
                value[:, None].expand(shape),
                attn_mask=mask,
                is_causal=mask is None,
                scale=self.scale,
            )
            out[:, chosen] = attended.permute(2, 0, 1, 3).reshape(count, -1, self.head_size)


class TileAttentionBackend(AttentionBackend):
    """Attention over KV tiles in the simulated NPU's banks."""

    forward_includes_kv_cache_update: bool = False
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float32, torch.bfloat16, torch.float16]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto"]

    @staticmethod
    def get_name() -> str:
        # vLLM looks the name up among its registered backends; out-of-tree ones share this one.
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[TileAttentionImpl]:
        return TileAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[TileAttentionMetadataBuilder]:
        return TileAttentionMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(16)]

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size % 32 == 0

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        # The handles have no layout; vLLM asks for one that all backends of a model share.
        return (KVCacheLayout.LBHNC,)


def _float32(tensor: torch.Tensor) -> NDArray[np.float32]:
    """The tensor as a contiguous fp32 array (a view where it is one already)."""
    array: NDArray[np.float32] = tensor.to(torch.float32).contiguous().numpy()
    return array


def _int32(tensor: torch.Tensor) -> NDArray[np.int32]:
    array: NDArray[np.int32] = tensor.to(torch.int32).contiguous().numpy()
    return array
