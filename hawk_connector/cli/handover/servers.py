"""The `vllm serve` processes of each system, and which systems are up together."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hawk_connector.address import Address
from hawk_connector.cli.commands import CONNECTOR_NAME, environment, executable, flags
from hawk_connector.cli.deployment import url
from hawk_connector.cli.free_ports import free_ports
from hawk_connector.cli.processes import ProcessSpec
from hawk_connector.config import DECODE_ROLE, PREFILL_ROLE
from hawk_connector.errors import CapacityError, ConfigError

from .options import HandoverOptions, System

__all__ = ["MODEL_NAME", "SERVER_BYTES", "Running", "groups", "pair", "refuse_missing"]

MODEL_NAME = "bench"
SERVER_BYTES = int(2.9 * 2**30)
"""What a server takes: two processes that import vLLM, the weights in float32, and its KV cache."""

_HOST = "127.0.0.1"
_BLOCK = 128
_NPU_BLOCK = 64
_SEND_BUFFER_BYTES = 256 << 20
_SLOWED = Path(__file__).with_name("nixl_slowed")


@dataclass(frozen=True, slots=True)
class Running:
    """A system with its servers: the last one decodes.  ``sides``: HAWK's side channels, where it has them."""

    system: System
    servers: tuple[ProcessSpec, ...]
    urls: tuple[str, ...]
    sides: tuple[Address, ...] = ()


def _is_installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def refuse_missing(systems: Sequence[System], is_installed: Callable[[str], bool] = _is_installed) -> None:
    """ConfigError where one of ``systems`` needs a module that is not installed."""
    wanted = [system.name for system in systems if system.connector == "nixl"]
    if wanted and not all(is_installed(module) for module in ("nixl", "nixl_cu12")):
        raise ConfigError(
            f"NIXL is not installed, and {' and '.join(wanted)} need it",
            fix="Run `pip install --no-deps nixl nixl-cu12`, or choose others with --systems.",
        )


def groups(systems: Sequence[System], available: int) -> Iterator[tuple[System, ...]]:
    """``systems`` in groups whose servers fit into ``available`` bytes together, in their order.

    CapacityError where not even one system fits.
    """
    room = available // SERVER_BYTES
    group: list[System] = []
    used = 0
    for system in systems:
        count = 1 if system.connector is None else 2
        if count > room:
            raise CapacityError(
                f"no room for the servers of {system.name}",
                expected=f"{count * SERVER_BYTES / 2**30:.1f} GiB of memory",
                got=f"{available / 2**30:.1f} GiB that may be used now",
                fix="End what else runs on this machine.",
            )
        if group and (used + count > room or system.alone or group[-1].alone):
            yield tuple(group)
            group, used = [], 0
        group.append(system)
        used += count
    if group:
        yield tuple(group)


def pair(system: System, options: HandoverOptions, model: str) -> Running:
    """The servers of ``system`` on free ports of this machine; ``model``: what `vllm serve` is given."""
    if system.connector is None:
        (port,) = free_ports(1)
        return Running(system, (_server(system.name, options, model, port),), (url(_HOST, port),))
    ports = free_ports(4)
    make = _hawk if system.connector == "hawk" else _nixl
    urls = tuple(url(_HOST, port) for port in ports[:2])
    sides = tuple(Address(_HOST, port) for port in ports[2:]) if system.connector == "hawk" else ()
    return Running(system, make(system, options, model, ports), urls, sides)


def _hawk(system: System, options: HandoverOptions, model: str, ports: Sequence[int]) -> tuple[ProcessSpec, ...]:
    protocol = {"protocol": system.protocol}
    prefill = {"side_channel_port": ports[2], "send_buffer_bytes": _SEND_BUFFER_BYTES, **protocol}
    decode = {
        "mode": system.mode,
        "side_channel_port": ports[3],
        "peers": [f"{_HOST}:{ports[2]}"],
        **protocol,
    }
    env, extra, block = {}, {}, _BLOCK
    if system.npu:
        # float32 pools: an answer is to be the one instance's, token for token.
        npu = {"device": "blackhole-p150", "chips": 1, "pool": "cross_layer", "kv_dtype": "float32"}
        env, extra, block = {"HAWK_NPU": "simulated"}, {"additional-config": {"tt_plugin": npu}}, _NPU_BLOCK
    return (
        _server(f"{system.name}-prefill", options, model, ports[0], _transfer(CONNECTOR_NAME, PREFILL_ROLE, prefill)),
        _server(
            f"{system.name}-decode",
            options,
            model,
            ports[1],
            _transfer(CONNECTOR_NAME, DECODE_ROLE, decode) | extra,
            env,
            block,
        ),
    )


def _nixl(system: System, options: HandoverOptions, model: str, ports: Sequence[int]) -> tuple[ProcessSpec, ...]:
    made = []
    for name, role, port, channel in zip(
        ("prefill", "decode"), (PREFILL_ROLE, DECODE_ROLE), ports[:2], ports[2:], strict=True
    ):
        env = {"VLLM_NIXL_SIDE_CHANNEL_HOST": _HOST, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(channel)}
        if system.slowed:
            env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(_SLOWED), os.environ.get("PYTHONPATH"))))
        # Threads of NIXL's own beside the model's would be on the same cores.
        transfer = _transfer("NixlConnector", role, {"num_threads": 0})
        made.append(_server(f"{system.name}-{name}", options, model, port, transfer, env))
    return tuple(made)


def _transfer(connector: str, role: str, extra: dict[str, Any]) -> dict[str, Any]:
    return {
        "kv-transfer-config": {
            "kv_connector": connector,
            "kv_role": role,
            # A benchmark of requests that computed their KV themselves would be none.
            "kv_load_failure_policy": "fail",
            "kv_connector_extra_config": extra,
        }
    }


def _server(
    name: str,
    options: HandoverOptions,
    model: str,
    port: int,
    arguments: dict[str, Any] | None = None,
    env: dict[str, str] | None = None,
    block: int = _BLOCK,
) -> ProcessSpec:
    length = -(-(options.prompt_tokens + options.new_tokens + 1) // _BLOCK) * _BLOCK
    at_once = max(options.concurrency)
    vllm = {
        "served-model-name": MODEL_NAME,
        "host": _HOST,
        "port": port,
        "dtype": "float32",
        "max-model-len": length,
        "max-num-seqs": max(8, at_once),
        "block-size": block,
        "num-gpu-blocks-override": (at_once + 1) * length // block,
        "kv-cache-memory-bytes": 512 << 20,
        "enforce-eager": True,
        "enable-prefix-caching": False,
        "distributed-executor-backend": "uni",
        **(arguments or {}),
    }
    threads = str(options.threads)
    variables = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        # So many threads for each server, no pinning, and the engine's worker inside the engine's process: with
        # fewer cores than processes anything else makes them wait for each other.
        "OMP_NUM_THREADS": threads,
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "MC_FORCE_TCP": "1",
        # Between two rounds a connection may rest; the legs' times are not to hold its making.
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "600",
    }
    return ProcessSpec(
        name=name,
        argv=(executable("vllm"), "serve", model, *flags(vllm)),
        env=environment(variables, env or {}),
        health_url=f"{url(_HOST, port)}/health",
    )
