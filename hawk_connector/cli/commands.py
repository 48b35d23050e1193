"""The command lines of a deployment, which `hawk up` runs, and prints so that they can be run by hand."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from hawk_connector.cli.deployment import Argument, DeploymentConfig, Server, Variable, flag_name, url
from hawk_connector.cli.processes import ProcessSpec
from hawk_connector.config import DECODE_ROLE, PREFILL_ROLE
from hawk_connector.errors import LocalError

CONNECTOR_NAME = "HawkConnector"


def process_stages(config: DeploymentConfig, model: str) -> tuple[tuple[ProcessSpec, ...], ...]:
    """The deployment's processes in the order of their start: both servers, then the router.

    ``model``: what `vllm serve` is given (see models.model_reference).
    """
    return ((prefill_process(config, model), decode_process(config, model)), (router_process(config),))


def prefill_process(config: DeploymentConfig, model: str) -> ProcessSpec:
    """The prefill server's process."""
    return _server_process("prefill", config, config.prefill, model, PREFILL_ROLE, {}, ())


def decode_process(config: DeploymentConfig, model: str) -> ProcessSpec:
    """The decode server's process; its NPU is chosen by HAWK_NPU and described by --additional-config."""
    npu = config.decode.npu
    if npu is None:
        return _server_process("decode", config, config.decode, model, DECODE_ROLE, {}, ())
    extra = ("--additional-config", json.dumps({"tt_plugin": npu.config}))
    env: dict[str, str] = {"HAWK_NPU": npu.kind}
    if npu.kind == "silicon":
        # Tenstorrent's own platform may not be loaded beside HAWK's, which is made of it.
        env["VLLM_PLUGINS"] = "hawk,hawk_npu,tt_model_registry"
    return _server_process("decode", config, config.decode, model, DECODE_ROLE, env, extra)


def router_process(config: DeploymentConfig) -> ProcessSpec:
    """vllm-router, unmodified, in its NIXL mode: it hands kv_transfer_params on as they are."""
    router = config.router
    argv = [
        executable("vllm-router"),
        "--vllm-pd-disaggregation",
        *("--kv-connector", "nixl"),
        *("--host", router.host, "--port", str(router.port)),
        *("--prefill", url(config.prefill.host, config.prefill.port)),
        *("--decode", url(config.decode.host, config.decode.port)),
        *("--prometheus-port", str(router.prometheus_port)),
        *flags(router.args),
    ]
    return ProcessSpec(
        name="router",
        argv=tuple(argv),
        env=environment(config.env, router.env),
        health_url=f"{config.url}/health",
    )


def _server_process(
    name: str,
    config: DeploymentConfig,
    server: Server,
    model: str,
    role: str,
    env: Mapping[str, str],
    extra: tuple[str, ...],
) -> ProcessSpec:
    transfer = {
        "kv_connector": CONNECTOR_NAME,
        "kv_role": role,
        "kv_load_failure_policy": server.kv_load_failure_policy,
        "kv_connector_extra_config": server.hawk,
    }
    argv = (
        *(executable("vllm"), "serve", model),
        *("--served-model-name", config.public_model_name),
        *("--host", server.host, "--port", str(server.port)),
        *flags(server.vllm),
        *extra,
        *("--kv-transfer-config", json.dumps(transfer)),
    )
    return ProcessSpec(
        name=name,
        argv=argv,
        env=environment(config.env, server.env, env),
        health_url=f"{url(server.host, server.port)}/health",
    )


def environment(*layers: Mapping[str, Variable]) -> dict[str, str]:
    """The variables of all ``layers``, later ones winning, as text."""
    return {key: str(value) for layer in layers for key, value in layer.items()}


def flags(arguments: Mapping[str, Argument]) -> list[str]:
    """``arguments`` as command-line words: true is `--key`, false `--no-key`, lists and dicts are JSON."""
    words: list[str] = []
    for key, value in arguments.items():
        flag = flag_name(key)
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, (list, dict)):
            words += [f"--{flag}", json.dumps(value)]
        else:
            words += [f"--{flag}", str(value)]
    return words


def executable(name: str) -> str:
    """The program ``name`` beside this Python: its bare name where a shell finds the same, else its path."""
    beside = Path(sys.executable).parent / name
    on_path = shutil.which(name)
    if not os.access(beside, os.X_OK):
        if on_path is None:
            raise LocalError(f"no `{name}` beside {sys.executable} or on PATH", fix="Run `make setup`.")
        return name
    if on_path is not None and Path(on_path).resolve() == beside.resolve():
        return name
    return str(beside)


def shell_text(spec: ProcessSpec) -> str:
    """A command that does in a shell what ``spec`` does here; one flag with its value a line."""
    # Only the value is quoted: to a shell a quoted KEY=value is a program's name.
    variables = " ".join(f"{key}={shlex.quote(value)}" for key, value in spec.env.items())
    groups: list[list[str]] = [[]]
    for word in spec.argv:
        if word.startswith("--"):
            groups.append([])
        groups[-1].append(word)
    lines = [shlex.join(group) for group in groups]
    return " \\\n  ".join([variables, *lines] if variables else lines)
