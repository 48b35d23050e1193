"""kv_transfer_params as a hostile client writes them: no connection, no work in proportion, no forged log line."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hawk_connector.config import HawkConfig
from hawk_connector.decode.metadata import DecodeHandshake
from hawk_connector.decode.scheduler import DecodeScheduler
from hawk_connector.protocol.messages import PROTOCOL_VERSION
from hawk_connector.transport.side_channel import SideChannelClient
from tests.protocol.world import BLOCK, decode_facts

TOKENS = 2 * BLOCK
ALLOWED = "10.9.8.7:18550"


class Watched(SideChannelClient):
    """Connects nowhere and remembers who was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    def connect(self, address: Any) -> str:
        self.asked.append(str(address))
        return str(address)


@pytest.fixture(scope="module")
def side() -> Iterator[tuple[DecodeScheduler, Watched]]:
    client = Watched()
    config = HawkConfig.parse({"peers": [ALLOWED]}, "kv_consumer")
    scheduler = DecodeScheduler(config, BLOCK, client, recompute=True)
    scheduler.set_worker(DecodeHandshake("d" * 32, decode_facts(), "127.0.0.1:1"))
    yield scheduler, client
    scheduler.close()


def params(*addresses: Any, **changed: Any) -> dict[str, Any]:
    ranks = [{"address": address, "epoch": "a" * 32} for address in addresses]
    hawk = {"v": PROTOCOL_VERSION, "transfer": "1" * 32, "tokens": TOKENS, "ranks": ranks, **changed}
    return {"do_remote_prefill": True, "hawk": hawk}


def answer(side: tuple[DecodeScheduler, Watched], given: Any, tokens: int = TOKENS) -> tuple[int | None, bool]:
    """What vLLM is told of a request with these parameters; the request is dropped again."""
    scheduler, _ = side
    scheduler.new_request("r", given, "5" * 64, tokens)
    told = scheduler.matched_tokens("r", tokens, 0)
    scheduler.finished("r")
    return told


COMPUTES = (0, False)


def test_the_configured_peer_is_asked(side: tuple[DecodeScheduler, Watched]) -> None:
    assert answer(side, params(ALLOWED)) == (None, False)


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1:6379",
        "localhost:22",
        "[::1]:22",
        "169.254.169.254:80",
        # 10.9.8.7 in other clothes: what is not written as it is in the list is not in the list.
        "[::ffff:10.9.8.7]:18550",
        "[::ffff:0a09:0807]:18550",
        "168364039:18550",
        "0x0a090807:18550",
        "012.011.010.007:18550",
        "10.9.2055:18550",
        "10.9.8.7:018550",
        "10.9.8.7:18550 ",
        " 10.9.8.7:18550",
        "10.9.8.7:18551",
        "10.9.8.7",
        "10.9.8.7:",
        "10.9.8.7:0",
        "10.9.8.7:65536",
        "10.9.8.7:-1",
        "10.9.8.7:1e4",
        "10.9.8.7:１８５５０",  # full-width digits
        "10.9.8.7.:18550",
        "10.9.8.7.nip.io:18550",
        "10.9.8.7@evil.example:18550",
        "evil.example:18550",
        "tcp://10.9.8.7:18550",
        "10.9.8.7:18550/../",
        "ipc:///tmp/x:1",
        "10.9.8.7\x00:18550",
        "10.9.8.7\n:18550",
        "[10.9.8.7]:18550",
        "[fe80::1%25eth0]:18550",
        "*:18550",
        "0.0.0.0:18550",
        ":18550",
        "",
        "x" * 1025,
        7,
        None,
        ["10.9.8.7", 18550],
        {"host": "10.9.8.7"},
        b"10.9.8.7:18550",
    ],
    ids=lambda value: ascii(value)[:40],
)
def test_nobody_else_is_connected_to(side: tuple[DecodeScheduler, Watched], address: Any) -> None:
    for ranks in ((address,), (ALLOWED, address), (address, ALLOWED)):
        assert answer(side, params(*ranks)) == COMPUTES
    assert set(side[1].asked) <= {ALLOWED}


def test_no_name_is_resolved(side: tuple[DecodeScheduler, Watched], monkeypatch: pytest.MonkeyPatch) -> None:
    """The list is of names as they are written: a name that resolves to an allowed address is not allowed."""
    looked_up: list[str] = []
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *_, **__: looked_up.append(host))
    monkeypatch.setattr(socket, "gethostbyname", lambda host: looked_up.append(host))
    assert answer(side, params("rebind.example:18550")) == COMPUTES
    assert looked_up == []


@pytest.mark.parametrize(
    "changed",
    [
        {"tokens": TOKENS + 1},
        {"tokens": 10**30},
        {"tokens": -1},
        {"tokens": float("nan")},
        {"tokens": True},
        {"tokens": "128"},
        {"v": PROTOCOL_VERSION + 1},
        {"v": 10**30},
        {"transfer": "1" * 31},
        {"transfer": "1" * 32 + "\n"},
        {"transfer": "G" * 32},
        {"ranks": []},
        {"ranks": [{"address": ALLOWED, "epoch": "a" * 32}] * 2},
        {"ranks": [{"address": f"10.9.8.7:{port}", "epoch": "a" * 32} for port in range(1, 66)]},
        {"ranks": {"address": ALLOWED}},
        {"ranks": [{"address": ALLOWED, "epoch": "a" * 32, "pid": 1}], "tp_size": 10**9},
        {"unheard_of": 1},
        {"x\nERROR forged\x1b[2J" + "y" * 10_000: 1},
        {"first_token": "no token"},
    ],
    ids=lambda value: ascii(value)[:40],
)
def test_numbers_and_names_that_a_client_chose_size_nothing(
    side: tuple[DecodeScheduler, Watched], changed: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert answer(side, params(ALLOWED, **changed)) == COMPUTES
    assert all(record.getMessage().isprintable() for record in caplog.records)
    assert side[0]._protocol is not None and side[0]._protocol.held()["admissions"] == 0


def test_a_clients_text_is_a_part_of_one_line(caplog: pytest.LogCaptureFixture) -> None:
    client = Watched()
    scheduler = DecodeScheduler(HawkConfig.parse({}, "kv_consumer"), BLOCK, client, recompute=True)
    scheduler.set_worker(DecodeHandshake("d" * 32, decode_facts(), "127.0.0.1:1"))
    hostile = "x\nERROR forged\x1b[2J" + "y" * 100_000
    with caplog.at_level(logging.WARNING):
        scheduler.new_request(f"cmpl-{hostile}", params(ALLOWED, **{hostile: 1}), "5" * 64, TOKENS)
    scheduler.close()
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.isprintable() and len(line) < 4000
    assert r"x\nERROR forged\x1b[2J" in line and "event=parameters" in line
    taken = scheduler.log.take()
    assert taken is not None and taken["counters"]["recomputes"] == {"parameters": 1}


deep: Any = []
for _ in range(5000):
    deep = [deep]


@pytest.mark.parametrize(
    "given",
    [
        None,
        [],
        "hawk",
        {"do_remote_prefill": 1},
        {"do_remote_prefill": True},
        {"do_remote_prefill": True, "hawk": deep},
        {"do_remote_prefill": True, "hawk": {"ranks": deep}},
        {"do_remote_prefill": True, "hawk": None, "remote_host": "evil.example", "remote_port": 80, "tp_size": 10**9},
        {"do_remote_prefill": True, "hawk": {1: 2}},
    ],
    ids=range(9),
)
def test_what_is_no_ticket_costs_nothing(side: tuple[DecodeScheduler, Watched], given: Any) -> None:
    assert answer(side, given) == COMPUTES
    assert set(side[1].asked) <= {ALLOWED}


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.binary(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=12,
)


@pytest.mark.slow
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    given=st.fixed_dictionaries(
        {"do_remote_prefill": st.just(True)},
        optional={
            "hawk": anything
            | st.fixed_dictionaries(
                {},
                optional={
                    "v": st.just(PROTOCOL_VERSION) | anything,
                    "transfer": st.just("1" * 32) | anything,
                    "tokens": st.just(TOKENS) | anything,
                    "ranks": st.lists(
                        st.fixed_dictionaries(
                            {}, optional={"address": st.just(ALLOWED) | anything, "epoch": st.just("a" * 32) | anything}
                        ),
                        max_size=4,
                    )
                    | anything,
                },
            )
        },
    )
)
def test_anything_at_all(side: tuple[DecodeScheduler, Watched], given: dict[str, Any]) -> None:
    assert answer(side, given) in (COMPUTES, (None, False))
    assert set(side[1].asked) <= {ALLOWED}
