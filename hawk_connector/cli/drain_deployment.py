"""Draining the two sides of a deployment before they are stopped."""

from __future__ import annotations

import time
from collections.abc import Callable

from hawk_connector.address import Address
from hawk_connector.cli.deployment import DeploymentConfig, Server, flag_name
from hawk_connector.cli.drain import Drainer, SideDrain
from hawk_connector.config import DECODE_ROLE, PREFILL_ROLE, HawkConfig
from hawk_connector.errors import ConfigError
from hawk_connector.transport.curve import load_own_keys

__all__ = ["drain_deployment", "side_channels"]


def side_channels(server: Server, role: str) -> list[Address]:
    """Where the side's ranks listen; empty where its port is not fixed."""
    config = HawkConfig.parse(server.hawk, role)
    if not config.side_channel_port:
        return []
    size = next((v for k, v in server.vllm.items() if flag_name(k) in ("tensor-parallel-size", "tp")), 1)
    ranks = int(size) if role == PREFILL_ROLE and isinstance(size, (int, str)) else 1
    return [Address(config.peer_host, config.side_channel_port + rank) for rank in range(ranks)]


def drain_deployment(
    config: DeploymentConfig,
    pause: Callable[[float], bool],
    live: Callable[[str], None],
    *,
    clock: Callable[[], float] = time.monotonic,
) -> list[str]:
    """Drains both sides, prefill first, for ``drain_timeout_s`` at most; a line on each that is not drained.

    ``pause`` says whether the user wants no more of it, ``live`` is shown what is going on.  A side that cannot be
    drained is no reason not to stop it.
    """
    deadline = clock() + config.drain_timeout_s
    lines: list[str] = []
    for name, server, role in (("prefill", config.prefill, PREFILL_ROLE), ("decode", config.decode, DECODE_ROLE)):
        addresses = side_channels(server, role)
        if not addresses:
            lines.append(f"{name} is not drained, since {name}.hawk.side_channel_port is not fixed")
            continue
        left = deadline - clock()
        if left <= 0:
            lines.append(f"{name} is not drained: no time was left (drain_timeout_s {config.drain_timeout_s:g} s)")
            continue

        def look(sides: list[SideDrain], name: str = name) -> None:
            live(f"draining {name}: " + "; ".join(str(side) for side in sides))

        try:
            key_file = HawkConfig.parse(server.hawk, role).curve_key_file
            with Drainer(addresses, keys=load_own_keys(key_file) if key_file else None, clock=clock) as drainer:
                drainer.wait(left, pause, look)
                lines += [f"{name} is not drained: {side}" for side in drainer.sides if not side.done]
        except ConfigError as error:
            lines.append(f"{name} is not drained: {error}")
    return lines
