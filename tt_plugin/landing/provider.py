"""Which landing a device's pools get: from the choice that their platform makes, or by the device's kind."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from hawk_connector.decode.landing import Landing
from hawk_connector.errors import CapacityError, ConfigError
from hawk_connector.plan.facts import Mode

from ..config import LandingChoice
from ..device.interface import Pools
from ..device.kv_pool import KVPools
from ..device.ttnn_pools import TtnnPools
from .bounce import BounceLanding
from .pool import PoolLanding
from .silicon import window_landing
from .staged import StagedLanding
from .stages import Stages

__all__ = ["LandingChoice", "from_kv_caches", "make_landing"]

_log = logging.getLogger(__name__)


def make_landing(pools: Pools, choice: LandingChoice, mode: Mode = "hawk") -> Landing:
    """The landing in ``pools`` for parcels of ``mode``, hawk or host.

    In mode host the choice's path and placement play no part: parcels are converted in host memory, and written from
    there to the pools.
    ConfigError where the direct path is asked for and the banks have no host addresses here, CapacityError where
    stages or the bounce buffer do not fit; for bank windows what ``window_landing`` raises.  Their mappings and nodes
    go with the process.
    """
    if mode == "host":
        return _host_landing(pools, choice)
    if mode != "hawk":
        raise ConfigError("the mode of a device's landing", expected="'hawk' or 'host'", got=repr(mode))
    stages = _stages(pools, choice)
    mapped = isinstance(pools, KVPools)
    if choice.path == "bounce" or (choice.path is None and not mapped):
        return BounceLanding(
            pools, choice.bounce_buffer_bytes, choice.bounce_wait_s, stages=stages, placement=choice.placement
        )
    if isinstance(pools, TtnnPools) and choice.placement == "pool":
        return window_landing(pools, choice.device_nodes)[1]
    if not isinstance(pools, KVPools):
        raise ConfigError(
            "the banks of this device have no host addresses here",
            expected="path bounce, or path direct and placement pool on pools of TTNN's",
            got=f"path direct, placement {choice.placement or 'by counts'}",
            fix='Set {"tt_plugin": {"landing": {"path": "bounce"}}}.',
        )
    direct = PoolLanding(pools)
    if stages is None:
        return direct
    return StagedLanding(pools, direct, stages, pools.device.origins, placement=choice.placement)


def _stages(pools: Pools, choice: LandingChoice) -> Stages | None:
    """Stages where they are asked for, or may be chosen: by a device that copies by itself, if it has room for them."""
    if choice.placement == "pool" or (choice.placement is None and not pools.device.copies_inside):
        return None
    try:
        return Stages(pools.device, choice.stage_bytes_per_bank, choice.bounce_wait_s)
    except CapacityError as full:
        if choice.placement == "staged":
            raise
        _log.info("every parcel goes straight to the pools: %s", full)
        return None


def _host_landing(pools: Pools, choice: LandingChoice) -> Landing:
    # torch and a compiler, which no other landing needs.
    import torch

    from hawk_connector.transform.packing import parcel_packer

    from .host import HostLanding

    threads = choice.convert_threads
    nbytes, wait_s = choice.bounce_buffer_bytes, choice.bounce_wait_s
    return HostLanding(pools, nbytes, wait_s, lambda: parcel_packer(torch.device("cpu"), threads))


def from_kv_caches(kv_caches: Mapping[str, Any], mode: Mode = "hawk") -> Landing:
    """The landing for the KV caches that vLLM registered: layer name -> a handle that names its ``pools``, and with
    ``landing`` the choice of its platform.

    ConfigError where they are not this platform's handles.
    """
    pools = {id(found): found for cache in kv_caches.values() if (found := getattr(cache, "pools", None)) is not None}
    if len(pools) != 1 or any(getattr(cache, "pools", None) is None for cache in kv_caches.values()):
        kinds = ", ".join(sorted({type(cache).__name__ for cache in kv_caches.values()})) or "nothing"
        raise ConfigError(
            "the KV caches that vLLM registered do not lie in a Tenstorrent device",
            expected="handles of one set of pools",
            got=kinds,
            fix="Start the decode side with HAWK_NPU=simulated or HAWK_NPU=silicon.",
        )
    choices = [choice for cache in kv_caches.values() if (choice := getattr(cache, "landing", None)) is not None]
    return make_landing(next(iter(pools.values())), choices[0] if choices else LandingChoice(), mode)
