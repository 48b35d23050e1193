"""The simulation's own models: what they are to see they see."""

from __future__ import annotations

import random

import pytest

from hawk_connector.plan.pairing import Pairing, pair
from hawk_connector.protocol.decode_actions import Read
from hawk_connector.transport.memory_channel import NetworkFaults
from tests.protocol.simulated_blocks import BlockPool
from tests.protocol.simulated_memory import DecodeMemory, Wish
from tests.protocol.simulated_network import Network
from tests.protocol.simulated_process import Process
from tests.protocol.world import Text, Violation, World, decode_facts, kv_bytes, prefill_facts

TEXT = Text("5" * 64, 40, ("a:0", "a:1"))


def loaded(world: World) -> tuple[DecodeMemory, Wish, Read, int]:
    """A request with two blocks, its read, and the bytes of a block."""
    memory = DecodeMemory(world, decode_facts(), 1, 4)
    pairing = pair(prefill_facts(), decode_facts())
    assert isinstance(pairing, Pairing)
    wish = Wish("r1", TEXT)
    table = memory.pool.take([], 2)
    assert table is not None
    wish.table = tuple(table)
    memory.own(wish, "r1")
    read = Read(0, "r1", "prefill-0:1", "engine", 0, pairing.plan(2), wish.table, 0)
    return memory, wish, read, pairing.plan(1).nbytes


def test_a_byte_in_anothers_block_is_a_violation() -> None:
    memory, wish, read, each = loaded(World(1))
    memory.write(read, 0, b"x" * each)
    memory.own(wish, "decoding r1")
    with pytest.raises(Violation, match=r"rule 1: block \d of decoding r1 is written by a read for r1"):
        memory.write(read, 0, b"x" * each)
    memory.pool.give(wish.table)
    with pytest.raises(Violation, match="of None is written"):
        memory.write(read, 1, b"x" * each)


def test_other_bytes_than_the_prompts_own_are_a_violation() -> None:
    memory, wish, read, each = loaded(World(1))
    own = [kv_bytes("a:0/32/0", each), kv_bytes("a:1/8/0", each)]  # the second block holds 8 tokens of the 40
    for index, data in enumerate(own):
        memory.write(read, index, data)
    memory.require_own_bytes(wish, 4)
    memory.write(read, 1, own[1][:-1] + b"\xff")
    with pytest.raises(Violation, match=r"rule 4: r1 .*block 1 from rank 0"):
        memory.require_own_bytes(wish, 4)


def test_blocks_are_shared_by_prefix_and_wiped_before_another_has_them() -> None:
    wiped: list[int] = []
    pool = BlockPool(4, random.Random(1), wiped.append)
    first = pool.take([], 3)
    assert first is not None and wiped == first and pool.free == 1
    pool.cache(first[0], "a")
    assert pool.hits(["a", "b"]) == first[:1] and pool.hits(["b", "a"]) == []
    second = pool.take(pool.hits(["a"]), 1)
    assert second is not None and second[0] == first[0] and len({*first, *second}) == 4
    assert pool.take([], 1) is None
    pool.give(first)
    assert pool.free == 2 and pool.hits(["a"]) == first[:1]  # the second request holds it still
    wiped.clear()
    pool.give(second)
    third = pool.take([], 4)
    assert third is not None and set(wiped) == {0, 1, 2, 3} and pool.hits(["a"]) == []


def test_a_message_for_a_dead_life_reaches_the_next_one_only_from_the_queue() -> None:
    world = World(1)
    network = Network(world, 1, NetworkFaults(delay_min_s=1.0, delay_max_s=1.0))
    heard: list[tuple[str, bytes]] = []
    first = network.serve("a:1", lambda identity, payload: heard.append(("first", payload)))
    client = network.client(lambda address, payload: None)
    network.send(client, "a:1", b"under way")
    network.close(first)
    network.send(client, "a:1", b"queued")
    world.run(5.0)
    assert heard == []
    network.serve("a:1", lambda identity, payload: heard.append(("second", payload)))
    world.run(10.0)
    assert heard == [("second", b"queued")]


def test_a_stopped_process_does_late_what_came_due_and_a_dead_one_never() -> None:
    world, done = World(1), list[str]()
    process = Process(world, "p", skew=0.5)
    process.born()
    start = process.clock()
    process.after(1.0, lambda: done.append("a"))
    process.pause()
    world.run(10.0)
    assert done == [] and process.clock() == pytest.approx(start + 15.0)  # its clock is half as fast again
    process.resume()
    assert done == ["a"]
    process.after(1.0, lambda: done.append("b"))
    process.die()
    process.born()
    world.run(20.0)
    assert done == ["a"]
