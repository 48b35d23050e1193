"""The layers of a model that Tenstorrent's plugin shows vLLM as one.

Models without a hook of their own are described by that plugin as a single layer of any name, since its runner sizes
the cache by itself.  HAWK moves every layer, so the overlay tells vLLM of all of them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TypeVar

from hawk_connector.errors import UnsupportedError

__all__ = ["every_layer", "layer_name", "names_its_layers"]

Spec = TypeVar("Spec")

# The convention of both vLLM and Tenstorrent's plugin: a layer's number follows "layers.".
_NUMBERED = re.compile(r"(?:^|\.)layers\.(\d+)(?:\.|$)")


def layer_name(index: int) -> str:
    """vLLM's usual name of a decoder layer's attention."""
    return f"model.layers.{index}.self_attn.attn"


def names_its_layers(specs: Mapping[str, Spec]) -> bool:
    """Whether each key has a layer's number in it."""
    return all(_NUMBERED.search(name) for name in specs)


def every_layer(specs: Mapping[str, Spec], layers: int) -> dict[str, Spec]:
    """One spec for each of the model's attention ``layers``: ``specs`` as they are where they name their layers.

    Raises UnsupportedError where they neither do nor stand for all layers alike.
    """
    if names_its_layers(specs):
        if len(specs) != layers:
            raise UnsupportedError(
                f"a model with {layers} attention layers of which {len(specs)} keep KV",
                reason="layers that share a cache, or have none, are not moved yet",
            )
        return dict(specs)
    if len(specs) != 1:
        raise UnsupportedError(
            "this model's KV cache",
            reason="its layers cannot be told apart",
            expected="names with the layer's number, or one entry that stands for all",
            got=", ".join(sorted(specs)),
        )
    (spec,) = specs.values()
    return {layer_name(index): spec for index in range(layers)}
