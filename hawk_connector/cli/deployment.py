"""What a deployment file says: one prefill server, one decode server, one router.

The file is YAML. Its shape is given by the structs below; every mistake is a ConfigError that names the
file, the key and, for a key that does not exist, the nearest that does.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import yaml
from msgspec import Meta

from hawk_connector.config import DECODE_ROLE, PREFILL_ROLE, HawkConfig
from hawk_connector.errors import ConfigError

Port = Annotated[int, Meta(ge=1, le=65535)]
Seconds = Annotated[float, Meta(gt=0)]
# A command-line argument: true is `--key`, false `--no-key`, a list or dict is handed over as JSON.
Argument = bool | int | float | str | list[Any] | dict[str, Any]
# A variable's value; numbers need no quotes in YAML.
Variable = str | int | float

# Arguments of `vllm serve` that other keys of the file decide.
_OWNED_ARGUMENTS: Mapping[str, str] = {
    "model": "model",
    "served-model-name": "served_model_name",
    "host": "the section's own host",
    "port": "the section's own port",
    "kv-transfer-config": "the section's own hawk and kv_load_failure_policy",
}
_OWNED_ROUTER_ARGUMENTS: Mapping[str, str] = {
    "host": "router.host",
    "port": "router.port",
    "prometheus-port": "router.prometheus_port",
    "prefill": "prefill.host and prefill.port",
    "decode": "decode.host and decode.port",
    "kv-connector": "nothing: HAWK speaks the shape of NIXL's parameters",
    "vllm-pd-disaggregation": "nothing: it is always on",
}


class _Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class Npu(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The NPU under the decode server: ``kind`` chooses the vLLM platform, ``config`` is handed to it."""

    kind: Literal["simulated", "silicon"] = "simulated"
    config: dict[str, Any] = {}


class Server(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One `vllm serve`. ``vllm`` holds its arguments, ``hawk`` the connector's own configuration."""

    host: str = "127.0.0.1"
    port: Port
    vllm: dict[str, Argument] = {}
    env: dict[str, Variable] = {}
    hawk: dict[str, Any] = {}
    kv_load_failure_policy: Literal["recompute", "fail"] = "recompute"


class DecodeServer(Server, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The decode server; without ``npu`` vLLM chooses the platform as ever."""

    npu: Npu | None = None


class Router(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """vllm-router in front of both; ``args`` holds further arguments."""

    host: str = "127.0.0.1"
    port: Port
    prometheus_port: Port = 29000
    args: dict[str, Argument] = {}
    env: dict[str, Variable] = {}


class DeploymentConfig(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A whole deployment. ``env`` is for every process, a section's own ``env`` overrides it.

    ``ready_timeout_s``: how long the start of all processes may take together.
    ``drain_timeout_s``: how long both sides together have to finish what they owe before they are stopped, 0 for none.
    ``stop_timeout_s``: how long each process has to end by itself when it is stopped.
    """

    model: str
    served_model_name: str | None = None
    prefill: Server
    decode: DecodeServer
    router: Router
    env: dict[str, Variable] = {}
    ready_timeout_s: Seconds = 300.0
    drain_timeout_s: Annotated[float, Meta(ge=0)] = 10.0
    stop_timeout_s: Seconds = 20.0

    @property
    def public_model_name(self) -> str:
        """The name that clients put into `"model"`."""
        return self.served_model_name if self.served_model_name is not None else self.model

    @property
    def url(self) -> str:
        """Where clients connect."""
        return url(self.router.host, self.router.port)

    def ports(self) -> Iterator[tuple[str, str, int]]:
        """(key, host, port) of every port that this deployment opens at a known place."""
        for name, server in (("prefill", self.prefill), ("decode", self.decode)):
            yield f"{name}.port", server.host, server.port
            side_channel = server.hawk.get("side_channel_port", 0)
            if side_channel:
                host = server.hawk.get("side_channel_host", "127.0.0.1")
                yield f"{name}.hawk.side_channel_port", host, side_channel
        yield "router.port", self.router.host, self.router.port
        yield "router.prometheus_port", self.router.host, self.router.prometheus_port


def url(host: str, port: int) -> str:
    """The base URL under which this machine reaches a server that listens on ``host``:``port``."""
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)
    return f"http://[{reachable}]:{port}" if ":" in reachable else f"http://{reachable}:{port}"


def load(path: Path) -> DeploymentConfig:
    """The checked deployment in the file ``path``; raises ConfigError."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the deployment file {path}: {error}") from error
    return parse(text, source=str(path))


def parse(text: str, source: str = "deployment") -> DeploymentConfig:
    """The checked deployment in the YAML ``text``; ``source`` names it in errors. Raises ConfigError."""
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{source} is no YAML: {error}") from None
    if not isinstance(data, dict):
        raise ConfigError(source, expected="a mapping with model, prefill, decode, router", got=type(data).__name__)
    _refuse_unknown_keys(data, DeploymentConfig, source, ())
    try:
        config = msgspec.convert(data, DeploymentConfig)
    except msgspec.ValidationError as error:
        raise _validation_error(str(error), data, source) from None
    sides = (("prefill", config.prefill, PREFILL_ROLE), ("decode", config.decode, DECODE_ROLE))
    for name, server, role in sides:
        try:
            HawkConfig.parse(server.hawk, role)
        except ConfigError as error:
            raise ConfigError(
                f"{source}: {name}.hawk: {error.what}", expected=error.expected, got=error.got, fix=error.fix
            ) from None
        _refuse_owned(server.vllm, _OWNED_ARGUMENTS, f"{source}: {name}.vllm")
    _refuse_owned(config.router.args, _OWNED_ROUTER_ARGUMENTS, f"{source}: router.args")
    if config.decode.npu is not None and any(flag_name(key) == "additional-config" for key in config.decode.vllm):
        raise ConfigError(
            f"{source}: decode.vllm has additional-config beside decode.npu",
            fix="Both mean --additional-config. Keep decode.npu, or drop it and set HAWK_NPU in decode.env.",
        )
    _refuse_shared_ports(config, source)
    return config


def flag_name(key: str) -> str:
    """The long option that ``key`` means, without its dashes: `max_model_len` is `max-model-len`."""
    return key.lstrip("-").replace("_", "-")


def _refuse_unknown_keys(data: Any, struct: type[msgspec.Struct], source: str, path: tuple[str, ...]) -> None:
    """Raises ConfigError for a key that ``struct`` or a struct inside it does not have.

    msgspec would refuse it too, but without the nearest right name.
    """
    if not isinstance(data, dict):
        return
    sections = _inner_structs(struct)
    known = struct.__struct_fields__
    for key, value in data.items():
        if key not in known:
            where = ".".join((*path, str(key)))
            near = difflib.get_close_matches(str(key), known, n=1, cutoff=0.5)
            meant = ".".join((*path, *near))
            fix = f"Did you mean {meant!r}?" if near else f"Known keys: {', '.join(known)}."
            raise ConfigError(f"{source}: unknown key {where!r}", fix=fix)
        if key in sections:
            _refuse_unknown_keys(value, sections[key], source, (*path, key))


def _inner_structs(struct: type[msgspec.Struct]) -> dict[str, type[msgspec.Struct]]:
    found = {}
    for field in msgspec.structs.fields(struct):
        for kind in (field.type, *getattr(field.type, "__args__", ())):
            if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
                found[field.name] = kind
    return found


def _validation_error(message: str, data: dict[str, Any], source: str) -> ConfigError:
    """msgspec's "Expected `int`, got `str` - at `$.prefill.port`" with the key in front."""
    place = re.search(r" - at `\$\.?(.*)`$", message)
    if place is None:
        return ConfigError(f"{source}: {message}")
    key = place.group(1)
    if key.endswith("[...]"):
        key = key.removesuffix("[...]") + "." + _ill_typed_key(key.removesuffix("[...]").split("."), data)
    return ConfigError(f"{source}: {key + ': ' if key else ''}{message[: place.start()].replace('`', '')}")


def _ill_typed_key(path: list[str], data: dict[str, Any]) -> str:
    """The key, in the mapping at ``path``, whose value is of no allowed type (msgspec says "[...]")."""
    struct: type[msgspec.Struct] = DeploymentConfig
    for name in path[:-1]:
        struct, data = _inner_structs(struct)[name], data[name]
    kind = next(field.type for field in msgspec.structs.fields(struct) if field.name == path[-1])
    for key, value in data[path[-1]].items():
        try:
            msgspec.convert({key: value}, kind)
        except msgspec.ValidationError:
            return str(key)
    return "[...]"


def _refuse_owned(arguments: Mapping[str, Argument], owned: Mapping[str, str], where: str) -> None:
    for key in arguments:
        owner = owned.get(flag_name(key))
        if owner is not None:
            raise ConfigError(f"{where}: {key!r} is not set there", fix=f"It follows from {owner}.")


def _refuse_shared_ports(config: DeploymentConfig, source: str) -> None:
    ports = list(config.ports())
    for _, _, port in ports:
        keys = [key for key, _, other in ports if other == port]
        if len(keys) > 1:
            text = f"{source}: port {port} is given to {' and '.join(keys)}"
            raise ConfigError(text, fix="Give each its own.")
