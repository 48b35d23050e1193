"""The channel loop outlives what goes wrong in a turn, and does not fill the log with it."""

from __future__ import annotations

import contextlib
import logging
import os
import threading

import pytest

from hawk_connector.errors import ProtocolError
from hawk_connector.transport.loop import ChannelLoop
from hawk_connector.transport.side_channel import SideChannelClient, SideChannelServer


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


def test_what_peers_do_wrong_does_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    turns = [0]
    done = threading.Event()

    def on_turn() -> float:
        turns[0] += 1
        if turns[0] == 40:
            now[0] = 5.0
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
    assert said == [
        *(f"bad message {number} [event=turn]" for number in range(1, 11)),
        "bad message 40 (29 more like this were not logged) [event=turn]",
    ]


def test_a_message_that_cannot_be_read_is_counted_and_costs_itself_only(caplog: pytest.LogCaptureFixture) -> None:
    taken: list[bytes] = []
    done = threading.Event()

    def on_message(_channel: object, _peer: str, payload: bytes) -> None:
        if payload == b"bad":
            raise ProtocolError("expected something\nelse")
        taken.append(payload)
        done.set()

    server = SideChannelServer("127.0.0.1", 0)
    loop = ChannelLoop("test-loop", [server], on_message, lambda: 0.05)
    client = SideChannelClient()
    peer = client.connect(server.address)
    with caplog.at_level(logging.WARNING):
        loop.start()
        for payload in (b"bad", b"bad", b"good"):
            client.send(peer, payload)
        assert done.wait(30)
    loop.close()
    client.close()
    assert taken == [b"good"]
    assert server.counts.malformed == 2
    said = [record.getMessage() for record in caplog.records if "expected something" in record.getMessage()]
    assert len(said) == 2
    assert all(line.startswith(r"expected something\nelse [event=message peer=") for line in said)


def test_a_closed_loop_leaves_no_descriptor_and_no_thread_and_late_wakes_write_nowhere() -> None:
    def descriptors() -> dict[str, str]:
        links = {}
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # the listing's own
                links[name] = os.readlink(f"/proc/self/fd/{name}")
        return links

    before = descriptors()
    channels = [SideChannelServer("127.0.0.1", 0), SideChannelClient()]
    loop = ChannelLoop("closing-loop", channels, lambda *_: None, lambda: 0.01)
    loop.start()
    opened = descriptors()
    assert len(opened) > len(before)
    loop.close()
    assert descriptors() == before
    assert not [thread for thread in threading.enumerate() if thread.name == "closing-loop"]
    # The number of the eventfd is another file's now.
    read, write = os.pipe2(os.O_NONBLOCK)
    try:
        fillers = [os.dup(write) for _ in range(len(opened) - len(before))]
        loop.wake.set()
        with pytest.raises(BlockingIOError):
            os.read(read, 8)
    finally:
        for descriptor in (read, write, *fillers):
            os.close(descriptor)
    loop.close()


def test_a_loop_that_was_never_started_leaves_nothing_either() -> None:
    before = len(os.listdir("/proc/self/fd"))
    ChannelLoop("unstarted", [SideChannelServer("127.0.0.1", 0)], lambda *_: None, lambda: 1.0).close()
    assert len(os.listdir("/proc/self/fd")) == before
