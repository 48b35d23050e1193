"""Reading vLLM's cache: from a layer's real tensor, its shape and strides, to K and V views, and to whole blocks.

Known source layouts (vLLM 0.24 to 0.33), all with logical shape ``[blocks, kv_heads, block_size, 2 * head_dim]``:

* GPU backends: K and V side by side in the last dimension, in any stride order (families LBHNC and LBNHC).
* vLLM's CPU backend (``CPU_ATTN``, 'vec' kernels): a (block, head) page is ``2 * block_size`` rows of head_dim; its
  first half holds K column-major, its second half V row-major (csrc/cpu/cpu_attn_vec.hpp).

Other kernels of the CPU backend ('amx', 'vec16') pack K in an order of their own.  Such a cache has no views; its
blocks can still be moved as they are, to a cache of the same kernels (mode direct).
"""

from __future__ import annotations

import logging
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ..errors import UnsupportedError
from ..layout.cache_layout import SOURCE_CODECS, CacheLayout, CacheMemory, ElementPlace
from ..transform.reference import LayerSource

__all__ = [
    "CPU_BACKEND",
    "CacheSource",
    "cache_source",
    "layer_source",
    "ordered_sources",
    "read_cache",
]

_log = logging.getLogger(__name__)

CPU_BACKEND = "CPU_ATTN"
_KNOWN_CPU = f"{CPU_BACKEND} vec"
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class CacheSource:
    """A whole cache.  ``blocks``: of each layer, uint8 ``[blocks, block bytes]``, whose memory they keep alive."""

    memory: CacheMemory
    blocks: tuple[torch.Tensor, ...]


def cache_source(layers: Sequence[LayerSource], block_size: int, backend: str = "vLLM") -> CacheSource:
    """The cache of which these are the views.  ``block_size``: tokens of vLLM's blocks.

    Raises UnsupportedError where the layers differ in their layout.
    """
    found = [_places(layer, len(layers), block_size, backend) for layer in layers]
    layouts = {layout for layout, _ in found}
    if len(layouts) != 1:
        raise UnsupportedError("this KV cache", reason="its layers are kept in several ways", got=str(layouts))
    (layout,) = layouts
    return _source(layout, [layer.k for layer in layers], [offset for _, offset in found])


def read_cache(
    caches: Mapping[str, torch.Tensor],
    layer_names: Sequence[str],
    backends: Mapping[str, str],
    heads: int,
    head_dim: int,
    block_size: int,
) -> tuple[list[LayerSource], CacheSource | None]:
    """What vLLM has registered: the views of all layers in the model's order, and the cache as whole blocks.

    No views where only their kernels can read the blocks; no whole blocks where the layers are not kept alike.  Raises
    UnsupportedError where neither can be had.
    """
    missing = [name for name in layer_names if not isinstance(caches.get(name), torch.Tensor)]
    if missing:
        raise UnsupportedError(
            "this vLLM's KV caches",
            reason="they are not registered layer by layer, as tensors",
            got=f"no tensor of {missing[0]}",
            fix="On a decode side with an NPU set mode to hawk or host.",
        )
    tensors = [caches[name] for name in layer_names]
    kernels = {_kernels(tensor, backends[name], head_dim) for name, tensor in zip(layer_names, tensors, strict=True)}
    backend = ", ".join(sorted(kernels))
    if any(name.startswith(CPU_BACKEND) and name != _KNOWN_CPU for name in kernels):
        return [], _opaque_source(tensors, heads, head_dim, block_size, backend)
    layers = ordered_sources(caches, list(layer_names), backends, heads, head_dim)
    try:
        return layers, cache_source(layers, block_size, backend)
    except UnsupportedError as error:
        _log.info("modes direct and host are not served: %s", error)
        return layers, None


def _kernels(cache: torch.Tensor, backend: str, head_dim: int) -> str:
    """The attention kernels that keep the cache, by name."""
    if backend != CPU_BACKEND or cache.dim() != 4:
        return backend
    return f"{backend} {_cpu_isa(cache.dtype, cache.shape[2], head_dim)}"


def _opaque_source(
    caches: Sequence[torch.Tensor], heads: int, head_dim: int, block_size: int, backend: str
) -> CacheSource:
    """The cache whose blocks only ``backend``'s kernels can read: tensors ``[blocks, heads, tokens, 2 * head_dim]``.

    Raises UnsupportedError where a block does not lie in one piece, or the layers differ.
    """
    layouts = set()
    for cache in caches:
        size, codec = cache.element_size(), str(cache.dtype).removeprefix("torch.")
        block_bytes = cache[0].numel() * size
        if cache.dim() != 4 or (cache.shape[1], cache.shape[3]) != (heads, 2 * head_dim) or codec not in SOURCE_CODECS:
            raise UnsupportedError(
                "this KV cache", reason="its shape or dtype is not known", got=str(list(cache.shape))
            )
        if not cache[0].is_contiguous():
            raise UnsupportedError(
                "this KV cache", reason="its blocks do not lie in one piece", got=str(cache.stride())
            )
        layouts.add(
            CacheLayout(
                *(backend, len(caches), heads, head_dim, cache.shape[2], codec, block_bytes, cache.stride(0) * size),
                k=None,
                v=None,
                split=_split(block_size, cache.shape[2]),
            )
        )
    if len(layouts) != 1:
        raise UnsupportedError("this KV cache", reason="its layers are kept in several ways", got=str(layouts))
    return _source(layouts.pop(), caches, [cache.storage_offset() * cache.element_size() for cache in caches])


def _places(source: LayerSource, layers: int, block_size: int, backend: str) -> tuple[CacheLayout, int]:
    """A layer's layout, and the byte of its memory at which its first block begins."""
    k, v = source.k, source.v
    _, heads, tokens, dims = k.shape
    first = min(k.storage_offset(), v.storage_offset())
    places = [ElementPlace(x.storage_offset() - first, x.stride(1), x.stride(2), x.stride(3)) for x in (k, v)]
    size = k.element_size()
    same = k.untyped_storage().data_ptr() == v.untyped_storage().data_ptr()
    if not same or k.stride(0) != v.stride(0) or k.dtype != v.dtype or k.shape != v.shape:
        raise UnsupportedError("this KV cache", reason="K and V are not kept in one block")
    block_bytes = max(place.end(heads, tokens, dims) for place in places) * size
    codec = str(k.dtype).removeprefix("torch.")
    stride = k.stride(0) * size
    if codec not in SOURCE_CODECS or stride < block_bytes:
        raise UnsupportedError("this KV cache", reason="its blocks overlap or its dtype is not known", got=codec)
    split = _split(block_size, tokens)
    k_place, v_place = places
    layout = CacheLayout(backend, layers, heads, dims, tokens, codec, block_bytes, stride, k_place, v_place, split)
    return layout, first * size


def _split(block_size: int, tokens: int) -> int:
    """How many of the cache's blocks one of vLLM's is: it may split its blocks for the attention kernel."""
    if block_size % tokens:
        raise UnsupportedError("this KV cache", reason=f"its blocks of {tokens} do not divide {block_size} tokens")
    return block_size // tokens


def _source(layout: CacheLayout, tensors: Sequence[torch.Tensor], offsets: Sequence[int]) -> CacheSource:
    count = tensors[0].shape[0]
    blocks = []
    for tensor, offset in zip(tensors, offsets, strict=True):
        whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        shape, strides = (count, layout.block_bytes), (layout.block_stride, 1)
        blocks.append(whole.set_(tensor.untyped_storage(), offset, shape, strides))
    bases = tuple(int(block.data_ptr()) for block in blocks)
    return CacheSource(CacheMemory(layout, bases, count), tuple(blocks))


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
