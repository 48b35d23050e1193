"""Entry point of ``vllm.general_plugins``: makes ``kv_connector: HawkConnector`` known by name.  Imports vLLM."""

from __future__ import annotations

import contextlib

__all__ = ["register"]


def register() -> None:
    """Registers HawkConnector with vLLM's connector factory; vLLM calls it in each of its processes."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    # vLLM may load plugins more than once in a process, and answers a second registration with ValueError.
    with contextlib.suppress(ValueError):
        KVConnectorFactory.register_connector("HawkConnector", "hawk_connector.connector", "HawkConnector")
