"""`hawk up` drains what it stops: real side channels that answer as sides do."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import yaml

from hawk_connector.cli import deployment
from hawk_connector.cli.deployment import DeploymentConfig
from hawk_connector.cli.drain_deployment import drain_deployment, side_channels
from hawk_connector.config import DECODE_ROLE, PREFILL_ROLE
from hawk_connector.protocol.messages import Drain, Draining, decode_message, encode
from hawk_connector.transport.curve import load_curve_keys, write_key_pair
from hawk_connector.transport.side_channel import SideChannelServer, wait

pytestmark = pytest.mark.slow

SIMULATED = Path(__file__).parents[2] / "configs" / "cpu-simulated.yaml"
EPOCH = "0" * 32


class Side:
    """Answers each Drain with the next of ``held``; the last one is repeated.  ``order``: where it notes its first."""

    def __init__(self, role: str, held: list[dict[str, int]], order: list[str], keys: Any = None) -> None:
        self._role = role
        self._held = held
        self._order = order
        self._server = SideChannelServer("127.0.0.1", 0, keys=keys)
        self.port = self._server.address.port
        self.asked = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._serve)

    def __enter__(self) -> Side:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()
        self._server.close()

    def _serve(self) -> None:
        while not self._stopped.is_set():
            wait([self._server], None, 0.05)
            while (received := self._server.receive()) is not None:
                decode_message(received.payload, (Drain,))
                if not self.asked:
                    self._order.append(self._role)
                held = self._held[min(self.asked, len(self._held) - 1)]
                self.asked += 1
                answer = Draining(epoch=EPOCH, role=self._role, held=held)
                if not self._server.may_command(received.peer):
                    answer = Draining(epoch=EPOCH, role=self._role, refused="not yours")
                self._server.send(received.peer, encode(answer))


def config(prefill: int | None, decode: int | None, timeout_s: float = 20.0, **hawk: Any) -> DeploymentConfig:
    data = yaml.safe_load(SIMULATED.read_text())
    for name, port in (("prefill", prefill), ("decode", decode)):
        data[name]["hawk"] |= hawk
        data[name]["hawk"].pop("side_channel_port", None)
        if port is not None:
            data[name]["hawk"]["side_channel_port"] = port
    data["drain_timeout_s"] = timeout_s
    return deployment.parse(yaml.safe_dump(data))


def never(seconds: float) -> bool:
    threading.Event().wait(min(seconds, 0.02))
    return False


def test_prefill_is_drained_first_and_both_until_they_hold_nothing() -> None:
    order: list[str] = []
    shown: list[str] = []
    with (
        Side("prefill", [{"transfers": 2, "packs": 0}, {"transfers": 1}, {"transfers": 0}], order) as prefill,
        Side("decode", [{"loads": 1}, {"loads": 0}], order) as decode,
    ):
        lines = drain_deployment(config(prefill.port, decode.port), never, shown.append)
    assert lines == [] and order == ["prefill", "decode"]
    assert (prefill.asked, decode.asked) == (3, 2)
    texts = [text.partition("): ")[2] for text in shown]
    nothing = "drained, it holds nothing"
    assert texts == ["still holds 2 transfers", "still holds 1 transfers", nothing, "still holds 1 loads", nothing]


def test_what_is_not_drained_in_time_is_said_with_what_it_holds() -> None:
    with Side("prefill", [{"transfers": 3}], []) as prefill, Side("decode", [{}], []) as decode:
        lines = drain_deployment(config(prefill.port, decode.port, 0.2), never, lambda text: None)
    assert f"prefill is not drained: 127.0.0.1:{prefill.port} (prefill): still holds 3 transfers" in lines
    assert decode.asked == 0 and lines[-1].startswith("decode is not drained: no time was left")


def test_a_second_ctrl_c_ends_the_waiting() -> None:
    with Side("prefill", [{"transfers": 3}], []) as prefill, Side("decode", [{}], []) as decode:
        lines = drain_deployment(config(prefill.port, decode.port, 3600.0), lambda seconds: True, lambda text: None)
    assert prefill.asked == 1 and len(lines) == 1


def test_a_side_that_is_gone_or_has_no_known_port_is_no_reason_to_stay() -> None:
    with Side("decode", [{}], []) as decode:
        lines = drain_deployment(config(1, decode.port, 0.3), never, lambda text: None)
        assert "prefill is not drained: 127.0.0.1:1: no answer" in lines
    lines = drain_deployment(config(None, None), never, lambda text: None)
    names = ("prefill", "decode")
    assert lines == [f"{name} is not drained, since {name}.hawk.side_channel_port is not fixed" for name in names]


def test_sides_with_keys_are_drained_with_their_own(tmp_path: Path) -> None:
    public = write_key_pair(tmp_path / "pair").decode()
    (tmp_path / "known").write_text(f"127.0.0.1 {public}\n")
    files = {"curve_key_file": str(tmp_path / "pair"), "curve_known_keys_file": str(tmp_path / "known")}
    keys = load_curve_keys(files["curve_key_file"], files["curve_known_keys_file"])
    with Side("prefill", [{}], [], keys) as prefill, Side("decode", [{}], [], keys) as decode:
        assert drain_deployment(config(prefill.port, decode.port, **files), never, lambda text: None) == []


@pytest.mark.parametrize(("key", "value"), [("tensor_parallel_size", 3), ("tensor-parallel-size", "3")])
def test_every_prefill_rank_has_its_own_side_channel(key: str, value: Any) -> None:
    data = yaml.safe_load(SIMULATED.read_text())
    data["prefill"]["vllm"][key] = value
    parsed = deployment.parse(yaml.safe_dump(data))
    port = parsed.prefill.hawk["side_channel_port"]
    assert [a.port for a in side_channels(parsed.prefill, PREFILL_ROLE)] == [port, port + 1, port + 2]
    assert len(side_channels(parsed.decode, DECODE_ROLE)) == 1
