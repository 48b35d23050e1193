"""Transfer engines of a benchmark's processes, made as the product makes its own."""

from __future__ import annotations

from typing import Literal

from hawk_connector.config import MAX_SEGMENTS_IN_FLIGHT, DecodeConfig, HawkConfig
from hawk_connector.transport.carrier import configured_factory
from hawk_connector.transport.engine import EngineFactory

__all__ = ["Protocol", "engines"]

Protocol = Literal["tcp", "rdma", "local"]


def engines(config: HawkConfig) -> EngineFactory:
    """What ``vllm_sides`` gives to a worker of this configuration."""
    batch = config.max_segments_per_batch if isinstance(config, DecodeConfig) else MAX_SEGMENTS_IN_FLIGHT
    return configured_factory(config, batch)
