"""What vLLM holds in place of a KV cache: a tensor that names the pools in the device's banks."""

from __future__ import annotations

import torch

from ..config import LandingChoice
from ..device.kv_pool import KVPools
from ..device.layer_tiles import LayerTiles

__all__ = ["KVHandle"]


class KVHandle(torch.Tensor):
    """uint8 ``[num_blocks, 1, 1, 1]``: one byte for each block, so that vLLM's checks of shape and device hold.

    The bytes mean nothing.  ``pools`` has the cache, ``tiles`` the layer's part of it, ``landing`` says how
    parcels get there.  Operations give plain tensors.
    """

    pools: KVPools
    tiles: LayerTiles
    landing: LandingChoice

    # PyTorch's documented way to leave operations alone.
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def make(tiles: LayerTiles, landing: LandingChoice) -> KVHandle:
        """The handle of a layer."""
        handle: KVHandle = torch.zeros((tiles.pools.num_blocks, 1, 1, 1), dtype=torch.uint8).as_subclass(KVHandle)
        handle.pools = tiles.pools
        handle.tiles = tiles
        handle.landing = landing
        return handle
