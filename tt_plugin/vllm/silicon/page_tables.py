"""Page tables for a cross_layer pool, and the model as Tenstorrent's runner sees it when the pool is one.

Layer ``l`` of block ``b`` is pool block ``b * layers + l`` (docs/layouts.md), so a kernel finds its layer through a
page table of that layer's own.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

from hawk_connector.errors import UnsupportedError

__all__ = ["CrossLayerModel", "layer_page_tables"]

_PER_LAYER = "page_tables_per_layer"
# A table that the kernels keep in L1 holds 16-bit entries.
LARGEST_ENTRY = 0xFFFF


def layer_page_tables(table: torch.Tensor, layers: int) -> list[torch.Tensor]:
    """The page table of each layer.  ``table``: integer ``[rows, blocks]`` of block ids, -1 where there is none.

    Entries of -1 stay -1: ``paged_fill_cache`` skips them, while ``-1 * layers + l`` would name a block.
    """
    absent = table < 0
    return [torch.where(absent, table, table * layers + layer) for layer in range(layers)]


class CrossLayerModel:
    """Stands before a Tenstorrent model so that its layers share one K pool and one V pool.

    The runner calls it as it would the model; everything that is not about the cache goes through unchanged.
    """

    def __init__(self, model: Any, layers: int) -> None:
        """UnsupportedError where the model's code cannot be given a page table for each layer."""
        for name in ("prefill_forward", "decode_forward"):
            if not _takes(getattr(model, name), _PER_LAYER):
                raise UnsupportedError(
                    f"a cross_layer pool with {type(model).__name__}",
                    reason=f"its {name} takes one page table for all layers, or does not say otherwise",
                    expected=f"a parameter named {_PER_LAYER}",
                    fix='Set "pool": "per_layer" under tt_plugin in --additional-config.',
                )
        self._model = model
        self._layers = layers

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def allocate_kv_cache(self, shape: tuple[int, ...], dtype: Any, layers: int) -> Any:
        """One pair of pools ``[num_blocks * layers, heads, block_size, head_dim]`` that every layer is given.

        Returns what the model's own does: a list over submeshes of a list over layers of ``[k, v]``.
        """
        num_blocks, *rest = shape
        if num_blocks * layers > LARGEST_ENTRY:
            raise UnsupportedError(
                f"a cross_layer pool of {num_blocks} blocks x {layers} layers",
                reason="page tables with 16-bit entries cannot name so many",
                expected=f"at most {LARGEST_ENTRY} in all",
                got=str(num_blocks * layers),
                fix="Lower --num-gpu-blocks-override or --max-model-len, or set tt_plugin.pool to per_layer.",
            )
        submeshes = self._model.allocate_kv_cache((num_blocks * layers, *rest), dtype, 1)
        return [[pools[0]] * layers for pools in submeshes]

    def prefill_forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._model.prefill_forward(*args, **self._with_tables(kwargs))

    def decode_forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._model.decode_forward(*args, **self._with_tables(kwargs))

    def _with_tables(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        return {**kwargs, _PER_LAYER: layer_page_tables(kwargs["page_table"], self._layers)}


def _takes(function: Any, parameter: str) -> bool:
    """Whether it names the parameter.  One that takes any keyword may drop this one, and all layers would then write
    to one another's blocks."""
    return parameter in inspect.signature(function).parameters
