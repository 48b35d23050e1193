"""The decode scheduler without vLLM: what it makes of vLLM's calls, its client and the clock are ours."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from hawk_connector.config import HawkConfig
from hawk_connector.decode.metadata import DecodeFeedback, DecodeHandshake, RefusedLoad
from hawk_connector.decode.scheduler import DecodeScheduler
from hawk_connector.protocol.circuit import CircuitState
from hawk_connector.protocol.decode_actions import PeerOutcome
from hawk_connector.protocol.messages import PROTOCOL_VERSION, Welcome
from hawk_connector.transport.side_channel import SideChannelClient
from tests.protocol.world import BLOCK, decode_facts, prefill_facts
from tests.transport.waiting import eventually

DIGEST = "5" * 64


class Time:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class World:
    """Nobody listens on the ports that requests name: port 1 and up of this machine, which need privileges."""

    def __init__(self, **config_keys: Any) -> None:
        self.time = Time()
        self.client = SideChannelClient()
        ids = iter(f"{n:032x}" for n in range(10**6))
        config = HawkConfig.parse(config_keys, "kv_consumer")
        self.scheduler = DecodeScheduler(
            config, BLOCK, self.client, recompute=True, clock=self.time, new_id=lambda: next(ids)
        )
        self.scheduler.set_worker(DecodeHandshake("d" * 32, decode_facts(), "127.0.0.1:1"))

    def request(self, name: str, port: int) -> None:
        self.scheduler.new_request(name, params(port), DIGEST, 2 * BLOCK)

    def computes(self, name: str) -> bool:
        return self.scheduler.matched_tokens(name, 2 * BLOCK, 0) == (0, False)


def params(port: int) -> dict[str, Any]:
    ranks = [{"address": f"127.0.0.1:{port}", "epoch": "a" * 32}]
    return {
        "do_remote_prefill": True,
        "hawk": {"v": PROTOCOL_VERSION, "transfer": "1" * 32, "tokens": 2 * BLOCK, "ranks": ranks},
    }


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.scheduler.close()


def test_peers_that_nobody_needs_leave_no_connection_behind(world: World) -> None:
    for port in range(1, 21):
        world.request(f"r{port}", port)
    eventually(lambda: len(world.client.sockets()) == 20, "every peer is connected to")

    def gone() -> bool:
        world.time.now += 5.0
        for port in range(1, 21):
            world.scheduler.finished(f"r{port}")
        return not world.client.sockets()

    eventually(gone, "every connection is dropped")


def test_ports_that_clients_make_up_do_not_keep_a_new_prefill_side_out(world: World) -> None:
    for port in range(1, 257):
        world.request(f"r{port}", port)
    world.request("early", 999)
    assert world.computes("early")  # every link is awaited by somebody

    def all_over() -> bool:
        world.time.now += 1.0
        return all(world.computes(f"r{port}") for port in range(1, 257))

    eventually(all_over, "nobody answers, so all compute their own KV")

    def taken() -> bool:
        world.time.now += 1.0
        world.request("good", 1000)
        return world.scheduler.matched_tokens("good", 2 * BLOCK, 0) == (None, False)

    eventually(taken, "a new prefill side is asked")


def test_blocks_for_a_load_that_has_no_claim_are_reported_not_forgotten(world: World) -> None:
    """vLLM holds the request until it hears of its load."""
    world.scheduler.allocated("r1", 2 * BLOCK, BLOCK, [7, 8])
    step = world.scheduler.build_step()
    assert step.refused == [RefusedLoad("r1", (8,), "blocks", "its claim was given up before vLLM gave it blocks")]
    assert not step.loads
    world.scheduler.finished("r1")
    assert world.scheduler.build_step().aborted == ["r1"]


@pytest.mark.parametrize(
    ("whole", "tokens", "external", "wanted"),
    [
        (False, 3 * BLOCK + 5, 2 * BLOCK + 5, (6, 7, 8)),
        (True, 3 * BLOCK + 5, 2 * BLOCK, (6, 7)),
        (True, 3 * BLOCK, BLOCK, (6,)),
        (True, 2 * BLOCK + 1, 2 * BLOCK, (5, 6)),
    ],
)
def test_blocks_of_a_load_end_before_the_prompts_last_where_only_whole_ones_are_loaded(
    whole: bool, tokens: int, external: int, wanted: tuple[int, ...]
) -> None:
    world = World(load_whole_blocks=whole)
    try:
        world.scheduler.allocated("r1", tokens, external, [5, 6, 7, 8])
        assert [refused.block_ids for refused in world.scheduler.build_step().refused] == [wanted]
    finally:
        world.scheduler.close()


def test_after_a_cache_reset_waiting_requests_compute_their_own_kv(world: World) -> None:
    """Their transfers hold KV of before the reset, of other weights perhaps."""
    world.request("r1", 9)
    assert world.scheduler.matched_tokens("r1", 2 * BLOCK, 0) == (None, False)
    assert world.scheduler.reset() is True
    assert world.computes("r1")
    # A load that runs cannot be taken back in this step; vLLM is told so.
    world.scheduler.allocated("r2", 2 * BLOCK, 2 * BLOCK, [1, 2])
    assert world.scheduler.reset() is False
    world.scheduler.loaded({"r2"})
    assert world.scheduler.reset() is True


def test_the_worker_tells_of_ranks_that_fail_and_of_a_drain(world: World) -> None:
    """Both reach the admission: after three failed loads nobody waits for that rank, and a drained side asks nobody."""
    protocol = world.scheduler._protocol
    assert protocol is not None
    world.request("r0", 1)
    link = protocol.links["127.0.0.1:1"]
    link.receive(
        Welcome(
            epoch="a" * 32,
            to="d" * 32,
            version=PROTOCOL_VERSION,
            facts=prefill_facts(),
            engine="memory:1",
            lease_s=30.0,
            number=link.sent,
        )
    )
    failed = tuple(PeerOutcome(f"x{n}", "127.0.0.1:1", "a" * 32, False, "the read failed") for n in range(3))
    other_life = tuple(PeerOutcome(f"y{n}", "127.0.0.1:1", "b" * 32, False, "the read failed") for n in range(9))
    world.scheduler.worker_says(DecodeFeedback(other_life, False))
    assert link.circuit.state is CircuitState.CLOSED
    world.scheduler.worker_says(DecodeFeedback(failed, False))
    assert link.circuit.state is CircuitState.OPEN
    world.request("r1", 1)
    assert world.computes("r1")  # at once
    world.scheduler.worker_says(DecodeFeedback((PeerOutcome("x9", "127.0.0.1:1", "a" * 32, True),), False))
    world.request("r2", 1)
    assert world.scheduler.matched_tokens("r2", 2 * BLOCK, 0) == (None, False)  # it is asked for again
    world.scheduler.worker_says(DecodeFeedback((), True))
    world.request("r3", 1)
    assert world.computes("r3")
    assert world.scheduler.matched_tokens("r2", 2 * BLOCK, 0) == (None, False)  # asked for before the drain


def test_feedback_of_two_steps_is_joined_in_order() -> None:
    first, second = (PeerOutcome(name, "p:1", "a" * 32, None) for name in ("r1", "r2"))
    joined = DecodeFeedback((second,), True).following(DecodeFeedback((first,), False))
    assert joined == DecodeFeedback((first, second), True)
