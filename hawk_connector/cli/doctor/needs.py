"""What a configuration needs of a machine, side by side."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from hawk_connector.cli.commands import environment
from hawk_connector.cli.deployment import DeploymentConfig
from hawk_connector.config import DECODE_ROLE, PREFILL_ROLE, DecodeConfig, HawkConfig, PrefillConfig
from hawk_connector.layout.catalog import DEVICES

__all__ = ["Needs", "Side", "default_needs", "deployment_needs"]

Side = Literal["prefill", "decode"]

# A Blackhole with all its DRAM channels; a card with one harvested has seven.
_BANKS = 8


@dataclass(frozen=True)
class Needs:
    """One side's configuration as the checks ask it.

    ``given``: it comes from a deployment, else it is what a side has without one.  ``npu``: kind of the NPU under the
    decode side, None for none.  ``direct``: reads end in bank windows of real chips.  ``nodes``: the chips' device
    nodes, where the direct path names them.  ``banks``: DRAM banks of a chip.
    ``ports``: (key, host, port) that this side listens on.  ``environment``: variables that the deployment sets for it.
    """

    side: Side
    hawk: PrefillConfig | DecodeConfig
    given: bool
    npu: Literal["simulated", "silicon"] | None = None
    direct: bool = False
    nodes: tuple[str, ...] = ()
    chips: int = 1
    banks: int = _BANKS
    ports: tuple[tuple[str, str, int], ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def rdma(self) -> bool:
        return self.hawk.protocol == "rdma"

    @property
    def silicon(self) -> bool:
        return self.npu == "silicon"


def default_needs(side: Side) -> Needs:
    """What a side needs with nothing configured: TCP, and no hardware."""
    role = PREFILL_ROLE if side == "prefill" else DECODE_ROLE
    return Needs(side, HawkConfig.parse({}, role), given=False)


def deployment_needs(config: DeploymentConfig, side: Side) -> Needs:
    """What one side of a deployment needs."""
    own = tuple((key, host, port) for key, host, port in config.ports() if key.startswith(f"{side}."))
    if side == "prefill":
        variables = environment(config.env, config.prefill.env)
        hawk = HawkConfig.parse(config.prefill.hawk, PREFILL_ROLE)
        return Needs(side, hawk, given=True, ports=own, environment=variables)
    npu = config.decode.npu
    variables = environment(config.env, config.decode.env)
    plain = Needs(side, HawkConfig.parse(config.decode.hawk, DECODE_ROLE), given=True, ports=own, environment=variables)
    if npu is None:
        return plain
    # What the plugin reads; it checks it too, where it runs.
    landing = npu.config.get("landing")
    landing = landing if isinstance(landing, Mapping) else {}
    given = landing.get("device_nodes")
    nodes = tuple(map(str, given)) if isinstance(given, list) else ()
    return replace(
        plain,
        npu=npu.kind,
        direct=npu.kind == "silicon" and landing.get("path") == "direct",
        nodes=nodes,
        chips=len(nodes) or _number(npu.config.get("chips"), 1),
        banks=_banks(npu.config.get("device")),
    )


def _number(value: object, otherwise: int) -> int:
    return value if isinstance(value, int) and value > 0 else otherwise


def _banks(device: object) -> int:
    return next((entry.banks for entry in DEVICES if entry.name == device), _BANKS)
