"""The channel loop outlives what goes wrong in a turn, and does not fill the log with it."""

from __future__ import annotations

import logging
import threading

import pytest

from hawk_connector.errors import ProtocolError
from hawk_connector.transport.loop import ChannelLoop
from hawk_connector.transport.side_channel import SideChannelServer


class Failing(SideChannelServer):
    """A server whose first looks fail, as where no descriptor is left."""

    def __init__(self, failures: int) -> None:
        super().__init__("127.0.0.1", 0)
        self.failures = failures

    def receive(self):  # type: ignore[no-untyped-def]
        if self.failures:
            self.failures -= 1
            raise OSError("no descriptor left")
        return super().receive()


def test_a_failing_turn_is_followed_by_the_next(caplog: pytest.LogCaptureFixture) -> None:
    turned = threading.Event()

    def on_turn() -> float:
        turned.set()
        return 0.01

    loop = ChannelLoop("test-loop", [Failing(3)], lambda *_: None, on_turn)
    with caplog.at_level(logging.ERROR):
        loop.start()
        assert turned.wait(10)
    loop.close()
    assert sum("it goes on" in record.message for record in caplog.records) == 3


def test_what_peers_do_wrong_is_logged_once_a_second(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    turns = [0]
    done = threading.Event()

    def on_turn() -> float:
        turns[0] += 1
        if turns[0] == 40:
            now[0] = 2.0
        if turns[0] > 41:
            done.set()
            return 10.0
        raise ProtocolError(f"bad message {turns[0]}")

    loop = ChannelLoop("test-loop", [SideChannelServer("127.0.0.1", 0)], lambda *_: None, on_turn, lambda: now[0])
    with caplog.at_level(logging.WARNING):
        loop.start()
        assert done.wait(30)
    loop.close()
    said = [record.getMessage() for record in caplog.records if "bad message" in record.getMessage()]
    assert said == ["bad message 1", "bad message 40 (38 more like this were not logged)"]
