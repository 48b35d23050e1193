"""What `hawk up` says about the pairing: a real side channel, answered as the decode side's worker answers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from hawk_connector.cli import deployment
from hawk_connector.cli.pairing import pairing_report
from hawk_connector.protocol.messages import PairingStatus, Status, StatusQuery, decode_message, encode
from hawk_connector.transport.side_channel import SideChannelServer, wait

SIMULATED = Path(__file__).parents[2] / "configs" / "cpu-simulated.yaml"
EPOCH = "0" * 32


class DecodeSide:
    """Answers each status query with the next of ``answers``; the last one is repeated."""

    def __init__(self, answers: list[tuple[PairingStatus, ...]]) -> None:
        self._server = SideChannelServer("127.0.0.1", 0)
        self.port = self._server.address.port
        self._answers = answers
        self.asked = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._serve)

    def __enter__(self) -> DecodeSide:
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
                decode_message(received.payload, (StatusQuery,))
                pairings = self._answers[min(self.asked, len(self._answers) - 1)]
                self.asked += 1
                status = Status(epoch=EPOCH, role="decode", held={}, pairings=pairings, reports=())
                self._server.send(received.peer, encode(status))


def config(side_channel_port: int) -> deployment.DeploymentConfig:
    data = yaml.safe_load(SIMULATED.read_text())
    data["decode"]["hawk"]["side_channel_port"] = side_channel_port
    return deployment.parse(yaml.safe_dump(data))


def patient(seconds: float) -> bool:
    return False


@pytest.fixture
def slow_clock() -> Iterator[Callable[[], float]]:
    """A clock that never comes to a deadline."""
    yield lambda: 0.0


def test_every_peer_is_listed_once_its_verdict_is_known(slow_clock: Callable[[], float]) -> None:
    connecting = PairingStatus("127.0.0.1:18550", "connecting", "")
    paired = PairingStatus("127.0.0.1:18550", "paired", "rank 0 of 1; chip 0: heads 0->0, 1->1, 2->2")
    refused = PairingStatus("127.0.0.1:18551", "refused", "layers: here 30, there 32 (serve the same model)")
    with DecodeSide([(connecting, refused), (paired, refused)]) as side:
        lines = pairing_report(config(side.port), patient, clock=slow_clock)
    assert lines == [
        "pairing: 127.0.0.1:18550 paired: rank 0 of 1; chip 0: heads 0->0, 1->1, 2->2",
        "pairing: 127.0.0.1:18551 refused: layers: here 30, there 32 (serve the same model)",
    ]


def test_an_undecided_peer_is_shown_as_such_when_the_user_wants_the_end(slow_clock: Callable[[], float]) -> None:
    with DecodeSide([(PairingStatus("127.0.0.1:18550", "connecting", ""),)]) as side:
        lines = pairing_report(config(side.port), lambda seconds: True, clock=slow_clock)
    assert lines == ["pairing: 127.0.0.1:18550 connecting: "]


def test_no_answer_is_said_and_no_error() -> None:
    closed = SideChannelServer("127.0.0.1", 0)
    port = closed.address.port
    closed.close()
    lines = pairing_report(config(port), patient, timeout_s=0.6)
    assert lines == [f"pairing: no answer from decode's side channel 127.0.0.1:{port} within 0.6 s"]


def test_a_decode_side_with_no_peers_says_when_it_pairs(slow_clock: Callable[[], float]) -> None:
    with DecodeSide([()]) as side:
        assert pairing_report(config(side.port), patient, clock=slow_clock) == [
            "pairing: none yet, decode pairs with the prefill side that a request names"
        ]
