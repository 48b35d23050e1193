"""The engines that a side's configuration asks for."""

from __future__ import annotations

from ..config import HawkConfig, PrefillConfig
from .engine import EngineFactory
from .local import local_factory
from .mooncake import mooncake_factory

__all__ = ["configured_factory"]


def configured_factory(config: HawkConfig, max_segments_per_batch: int) -> EngineFactory:
    """A factory of engines of ``config.protocol``.  What it makes raises ConfigError where that cannot be had here."""
    if config.protocol == "local":
        return local_factory(
            timeout_s=config.transfer_timeout_s,
            max_segments_per_batch=max_segments_per_batch,
            readable=isinstance(config, PrefillConfig),
        )
    return mooncake_factory(
        config.peer_host,
        protocol=config.protocol,
        timeout_s=config.transfer_timeout_s,
        max_segments_per_batch=max_segments_per_batch,
    )
