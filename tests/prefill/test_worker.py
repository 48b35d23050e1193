"""The prefill worker's edges: what it says of itself, and steps that mean nothing to it."""

from __future__ import annotations

from hawk_connector.address import Address
from hawk_connector.config import PrefillConfig
from hawk_connector.layout.kv_shape import KVShape
from hawk_connector.plan.pairing import PrefillFacts
from hawk_connector.prefill.metadata import BeginTransfer, PrefillStep, RequestProgress
from hawk_connector.prefill.worker import PrefillWorker
from hawk_connector.transport.memory import MemoryFabric
from hawk_connector.transport.side_channel import SideChannelServer
from tests.transport.waiting import eventually
from tests.workers.sides import ask
from tests.workers.source import Cache, Geometry

GEOMETRY = Geometry(blocks=4)


def worker(fabric: MemoryFabric, config: PrefillConfig | None = None) -> PrefillWorker:
    shape = KVShape(2, 4, 64, "float32")
    facts = PrefillFacts(shape, "m", 1, 0, 16, 1 << 20)
    return PrefillWorker(config or PrefillConfig(), facts, SideChannelServer("127.0.0.1", 0), fabric.factory())


def test_the_handshake_names_the_advertised_host() -> None:
    fabric = MemoryFabric()
    for host, shown in ((None, "127.0.0.1"), ("gpu-7.example", "gpu-7.example"), ("2001:db8::7", "[2001:db8::7]")):
        made = worker(fabric, PrefillConfig(advertise_host=host))
        try:
            address = made.handshake.address
            assert address.rpartition(":")[0] == shown
            assert Address.parse(address).port > 0
        finally:
            made.close()


def test_each_life_has_an_epoch_of_its_own() -> None:
    fabric = MemoryFabric()
    lives = [worker(fabric) for _ in range(3)]
    assert len({life.handshake.epoch for life in lives}) == 3
    for life in lives:
        life.close()


def test_steps_before_the_caches_are_registered_change_nothing() -> None:
    """vLLM profiles with dummy steps before it has a cache."""
    made = worker(MemoryFabric())
    step = PrefillStep(begun=[BeginTransfer("r", "0" * 32, "0" * 64, 10)], preempted=["r"], finished=["r"])
    made.before_step(step)
    made.after_step(step)
    assert made.take_finished({"r"}) is None
    made.close()


def test_requests_that_are_not_transfers_are_not_held() -> None:
    made = worker(MemoryFabric())
    made.register(Cache(GEOMETRY, 0).sources(), GEOMETRY.block_size)
    try:
        step = PrefillStep(preempted=["x"], progress=[RequestProgress("x", 10, (0,))], finished=["x"], abandoned=["y"])
        made.before_step(step)
        made.after_step(step)
        assert made.take_finished({"x", "y"}) is None
        assert not any(ask(made.handshake.address).held.values())
    finally:
        made.close()


def test_vllms_blocks_may_be_split_for_the_kernel() -> None:
    """A cache of 16-token kernel blocks whose ids count 64-token blocks: block b is kernel blocks 4b .. 4b+3."""
    made = worker(MemoryFabric())
    made.register(Cache(Geometry(blocks=8), 0).sources(), 64)
    assert made._block_ratio == 4
    made.close()


def test_close_ends_the_side_channel() -> None:
    made = worker(MemoryFabric())
    made.register(Cache(GEOMETRY, 0).sources(), GEOMETRY.block_size)
    port = Address.parse(made.handshake.address).port
    made.close()
    made.close()
    found: list[SideChannelServer] = []

    def free() -> bool:
        try:
            found.append(SideChannelServer("127.0.0.1", port))
        except Exception:
            return False
        return True

    eventually(free, "the port is free again")
    found[0].close()
