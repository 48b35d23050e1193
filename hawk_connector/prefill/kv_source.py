"""Reading vLLM's cache: from a layer's real tensor, its shape and strides, to K and V views.

Known source layouts (vLLM 0.24 to 0.33), all with logical shape ``[blocks, kv_heads, block_size, 2 * head_dim]``:

* GPU backends: K and V side by side in the last dimension, in any stride order (families LBHNC and LBNHC).
* vLLM's CPU backend (``CPU_ATTN``, 'vec' kernels): a (block, head) page is ``2 * block_size`` rows of head_dim; its
  first half holds K column-major, its second half V row-major (csrc/cpu/cpu_attn_vec.hpp).
"""

from __future__ import annotations

import platform
from collections.abc import Mapping

import torch

from ..errors import UnsupportedError
from ..transform.reference import LayerSource

__all__ = ["CPU_BACKEND", "layer_source", "ordered_sources"]

CPU_BACKEND = "CPU_ATTN"
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def ordered_sources(
    caches: Mapping[str, torch.Tensor],
    layer_names: list[str],
    backends: Mapping[str, str],
    kv_heads: int,
    head_dim: int,
) -> list[LayerSource]:
    """Sources of all layers in the model's order.

    ``kv_heads``: heads of this rank.  Raises UnsupportedError where a layer's tensor is none of the known layouts.
    """
    return [layer_source(name, caches[name], backends[name], kv_heads, head_dim) for name in layer_names]


def layer_source(name: str, cache: torch.Tensor, backend: str, kv_heads: int, head_dim: int) -> LayerSource:
    """K and V of one layer as views ``[blocks, heads, block_size, head_dim]``."""
    fused = (kv_heads, 2 * head_dim)
    if cache.dim() != 4 or (cache.shape[1], cache.shape[3]) != fused:
        raise UnsupportedError(
            f"KV cache layout of {name}",
            reason="the prefill side does not know how this attention backend stores K and V",
            expected=f"[blocks, {kv_heads} heads, block_size, {2 * head_dim}]",
            got=f"{list(cache.shape)} with strides {list(cache.stride())} ({backend})",
            fix="Use an attention backend with the fused KV layout (FLASH_ATTN, FLASHINFER, TRITON_ATTN, CPU_ATTN).",
        )
    if cache.dtype not in _DTYPES:
        raise UnsupportedError(
            f"KV cache dtype of {name}",
            reason="a quantised source cache has scales that HAWK does not move",
            expected="float32, bfloat16 or float16",
            got=str(cache.dtype),
            fix="Start the prefill side with --kv-cache-dtype auto; HAWK converts in flight.",
        )
    if backend == CPU_BACKEND:
        return _cpu_pages(name, cache, head_dim)
    return LayerSource(cache[..., :head_dim], cache[..., head_dim:])


def _cpu_pages(name: str, cache: torch.Tensor, head_dim: int) -> LayerSource:
    blocks, heads, block_size, _ = cache.shape
    block_stride, head_stride, row_stride, dim_stride = cache.stride()
    if row_stride != 2 * head_dim or dim_stride != 1:
        raise UnsupportedError(
            f"KV cache layout of {name}",
            reason="pages of vLLM's CPU backend must be contiguous",
            expected=f"row stride {2 * head_dim}, element stride 1",
            got=f"strides {list(cache.stride())}",
        )
    isa = _cpu_isa(cache.dtype, block_size, head_dim)
    if isa != "vec":
        raise UnsupportedError(
            f"KV cache layout of {name}",
            reason=f"vLLM's CPU kernels for '{isa}' pack K in an order of their own",
            expected="the 'vec' kernels",
            got=f"{cache.dtype} with block size {block_size} on this processor",
            fix="Start the prefill side with --dtype float32 and a --block-size that is a multiple of 32.",
        )
    offset = cache.storage_offset()
    k = cache.as_strided((blocks, heads, block_size, head_dim), (block_stride, head_stride, 1, block_size), offset)
    v = cache.as_strided(
        (blocks, heads, block_size, head_dim),
        (block_stride, head_stride, head_dim, 1),
        offset + block_size * head_dim,
    )
    return LayerSource(k, v)


def _cpu_isa(dtype: torch.dtype, block_size: int, head_dim: int) -> str:
    """Which of vLLM's CPU kernels writes the cache, by the same rules as ``cpu_attn._get_attn_isa`` on x86."""
    if platform.machine() != "x86_64":
        return platform.machine()
    if head_dim % 32 and head_dim % 16 == 0:
        return "vec16"
    if dtype == torch.bfloat16 and block_size % 32 == 0 and torch.cpu._is_amx_tile_supported():
        return "amx"
    return "vec" if block_size % 32 == 0 else "vec16"
