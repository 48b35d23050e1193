"""The caches that Tenstorrent's runner has allocated, as pools that a landing can aim at."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hawk_connector.errors import ConfigError, UnsupportedError
from hawk_connector.layout.kv_pool import KVPoolLayout

from ...config import LandingChoice, SiliconConfig
from ...device.interface import Pools
from ...device.ttnn_device import TtnnDevice
from ...device.ttnn_pools import TtnnPools, codec_of

__all__ = ["LayerHandle", "interleaved_rope", "live_pools"]


@dataclass(frozen=True, slots=True)
class LayerHandle:
    """What the connector is given for a layer in place of a tensor: it names the pools, and how parcels get there."""

    pools: Pools
    landing: LandingChoice


def live_pools(
    mesh: Any, kv_caches: Sequence[Sequence[Sequence[Any]]], *, layers: int, config: SiliconConfig, model: Any
) -> TtnnPools:
    """The pools in the runner's ``kv_caches``: a list over submeshes of a list over layers of ``[k, v]`` tensors.

    Everything that the layout says is read from the tensors and the device, but the order of K's dims, which is the
    model's.  UnsupportedError for several submeshes (data parallelism inside one engine).
    """
    if len(kv_caches) != 1:
        raise UnsupportedError(
            f"a model on {len(kv_caches)} submeshes",
            reason="the KV of a request goes to all chips of an engine",
            fix="Run one vLLM instance for each submesh (TT_VISIBLE_DEVICES).",
        )
    caches = kv_caches[0]
    if len(caches) != layers:
        raise UnsupportedError(
            f"a model with {layers} attention layers and {len(caches)} caches",
            reason="layers that share a cache, or have none, are not moved yet",
        )
    tensors = tuple(_one_of_each(caches))
    shared = len(tensors) == 2 and layers > 1
    if shared != (config.pool == "cross_layer" and layers > 1):
        raise ConfigError(
            "the model's caches are not what tt_plugin.pool says",
            expected="one K and one V tensor for all layers"
            if config.pool == "cross_layer"
            else "two tensors for each layer",
            got=f"{len(tensors)} tensors",
            fix=f'Set "pool": "{"cross_layer" if shared else "per_layer"}" under tt_plugin in --additional-config.',
        )
    device = TtnnDevice(mesh)
    _, heads, block_size, head_dim = (int(n) for n in tensors[0].shape)
    layout = KVPoolLayout(
        kind=config.pool,
        layers=layers,
        chips=device.chips,
        heads=heads,
        block_size=block_size,
        head_dim=head_dim,
        codec=codec_of(device.ttnn, tensors[0].dtype),
        banks=device.table.banks,
        alignment=device.table.alignment,
        rope_interleaved=interleaved_rope(model, config.rope_interleaved),
    )
    config.check(layout)
    return TtnnPools(device, layout, tensors)


def interleaved_rope(model: Any, configured: bool | None) -> bool:
    """Whether the model keeps K in interleaved (Meta's) RoPE order.

    tt_transformers' models say ``use_hf_rope`` in their arguments.  ConfigError where that and the configuration
    contradict each other: attention would be wrong with every byte in its place.
    """
    arguments = getattr(model, "model_args", None)
    if isinstance(arguments, (list, tuple)):
        arguments = arguments[0] if arguments else None
    half_split = getattr(arguments, "use_hf_rope", None)
    if half_split is None:
        return True if configured is None else configured
    if configured is not None and configured == half_split:
        raise ConfigError(
            "tt_plugin.rope_interleaved contradicts the model",
            expected=f"{not half_split} (the model's arguments say use_hf_rope {bool(half_split)})",
            got=str(configured),
            fix="Leave rope_interleaved out of --additional-config.",
        )
    return not half_split


def _one_of_each(caches: Sequence[Sequence[Any]]) -> Iterator[Any]:
    """K and V tensors in KVPoolLayout's order, each once."""
    seen: set[int] = set()
    for pair in caches:
        for tensor in pair:
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield tensor
