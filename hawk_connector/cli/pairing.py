"""What the decode side says about the prefill sides that it has paired with."""

from __future__ import annotations

import time
from collections.abc import Callable

from hawk_connector.address import Address
from hawk_connector.cli.deployment import DeploymentConfig
from hawk_connector.cli.status import StatusClient
from hawk_connector.config import DECODE_ROLE, HawkConfig
from hawk_connector.errors import ConfigError
from hawk_connector.transport.curve import load_curve_keys

Pause = Callable[[float], bool]

_UNDECIDED = ("idle", "connecting")
_ASK_AGAIN_S = 0.5


def pairing_report(
    config: DeploymentConfig, pause: Pause, *, timeout_s: float = 10.0, clock: Callable[[], float] = time.monotonic
) -> list[str]:
    """A line for each prefill side that decode knows: its address, the verdict, and the map of heads to chips.

    Asks the decode side's side channel until every configured peer has a verdict, for ``timeout_s`` at most or
    until ``pause`` says that the user wants the end. Where there is no answer, a line says so: a pairing that
    cannot be shown is no reason to stop a deployment that serves.
    """
    decode = HawkConfig.parse(config.decode.hawk, DECODE_ROLE)
    if decode.side_channel_port == 0:
        return ["pairing: not shown, since decode.hawk.side_channel_port is not fixed"]
    address = Address(decode.peer_host, decode.side_channel_port)
    try:
        keys = load_curve_keys(decode.curve_key_file, decode.curve_known_keys_file)
        client = StatusClient(address, keys=keys, clock=clock)
    except ConfigError as error:
        return [f"pairing: not shown: {error}"]
    deadline = clock() + timeout_s
    with client:
        while True:
            status = client.ask(max(_ASK_AGAIN_S, deadline - clock()))
            if status is None:
                return [f"pairing: no answer from decode's side channel {address} within {timeout_s:g} s"]
            undecided = any(pairing.state in _UNDECIDED for pairing in status.pairings)
            if not undecided or clock() >= deadline or pause(_ASK_AGAIN_S):
                break
    if not status.pairings:
        return ["pairing: none yet, decode pairs with the prefill side that a request names"]
    return [f"pairing: {pairing.peer} {pairing.state}: {pairing.detail}" for pairing in status.pairings]
