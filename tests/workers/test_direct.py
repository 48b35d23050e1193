"""Mode direct with real workers: what lands in decode's cache, in how many reads, and how long blocks are held."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import pytest
import torch

from hawk_connector.plan.segments import Segments
from hawk_connector.prefill.kv_source import cache_source
from hawk_connector.prefill.metadata import PrefillStep, RequestProgress
from hawk_connector.transport.memory import Hang, MemoryFabric
from tests.transport.waiting import eventually
from tests.workers.direct import DirectSide
from tests.workers.sides import Sides, wait_idle
from tests.workers.source import Geometry, Prompt

pytestmark = pytest.mark.slow

Make = Callable[..., DirectSide]
SMALL = Geometry(layers=2, kv_heads=2, head_dim=32)


@pytest.fixture
def direct(fabric: MemoryFabric) -> Iterator[Make]:
    with ExitStack() as stack:

        def make(geometry: Geometry, **config: object) -> DirectSide:
            side = DirectSide(geometry, fabric.factory(), **config)
            stack.callback(side.close)
            return side

        yield make


def runs(pairs: list[tuple[int, int]]) -> int:
    """Runs of blocks that are neighbours on both sides."""
    return sum(1 for i, (a, b) in enumerate(pairs) if i == 0 or pairs[i - 1] != (a - 1, b - 1))


@pytest.mark.parametrize("family", ["LBHNC", "LBNHC", "cpu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 15, 16, 49])
def test_the_cache_holds_the_prompts_own_elements(
    sides: Sides, fabric: MemoryFabric, direct: Make, family: str, dtype: torch.dtype, tokens: int
) -> None:
    # vLLM's CPU kernels of this processor want blocks of 32.
    geometry = replace(SMALL, family=family, dtype=dtype, block_size=32 if family == "cpu" else 16)
    prefill, decode = sides.prefill(geometry, fabric.factory()), direct(geometry)
    running = prefill.run(Prompt(geometry, tokens, seed=tokens))
    block_ids = [9, 2, 13, 14][: len(running.table)]
    report = decode.pull(prefill, running, block_ids)
    # Whole blocks have moved, nothing else was written, and each read is of a run of neighbours.
    block = 2 * geometry.kv_heads * geometry.block_size * geometry.head_dim * dtype.itemsize
    assert report.wire_bytes == len(block_ids) * geometry.layers * block
    assert decode.touched() == set(block_ids)
    assert report.segments == geometry.layers * runs(list(zip(running.table, block_ids, strict=True)))
    prefill.wait_released(running)
    wait_idle(prefill)
    assert not decode.held()
    assert prefill.reports()[0].wire_bytes == report.wire_bytes and prefill.reports()[0].pack_s == 0


def test_neighbours_on_both_sides_are_one_read(sides: Sides, fabric: MemoryFabric, direct: Make) -> None:
    prefill, decode = sides.prefill(SMALL, fabric.factory()), direct(SMALL)
    prefill.blocks._free = list(range(40))
    running = prefill.run(Prompt(SMALL, 5 * 16, seed=1))
    assert running.table == [0, 1, 2, 3, 4]
    # 7, 8, 9 follow each other as 0, 1, 2 do; 3 and 4 do, and 20 and 21.
    assert decode.pull(prefill, running, [7, 8, 9, 20, 21]).segments == 2 * SMALL.layers


def test_a_block_of_several_of_the_caches(sides: Sides, fabric: MemoryFabric, direct: Make) -> None:
    """vLLM's block of 64 tokens is four blocks of 16 of the attention kernel's."""
    prefill = sides.prefill(SMALL, fabric.factory(), vllm_block_size=64)
    decode = direct(SMALL, block_size=64)
    running = prefill.begin(Prompt(SMALL, 100, seed=2))
    # As vLLM numbers them: block b is 4b .. 4b + 3 of the cache.
    prefill.caches[0].write(running.prompt, [12, 13, 14, 15, 4, 5, 6], 0, 100)
    prefill.step(PrefillStep(progress=[RequestProgress(running.name, 100, (3, 1))]))
    prefill.finish(running)
    report = decode.pull(prefill, running, [0, 5])
    assert report.segments == 2 * SMALL.layers
    assert decode.touched() == {0, 1, 2, 3, 20, 21, 22}


def test_blocks_are_vllms_again_once_they_are_accepted_and_not_before(
    sides: Sides, fabric: MemoryFabric, direct: Make
) -> None:
    prefill, decode = sides.prefill(SMALL, fabric.factory(), parcel_tokens=32), direct(SMALL)
    running = prefill.run(Prompt(SMALL, 80, seed=3))
    worker = prefill.workers[0]
    fabric.inject(Hang())
    request = decode.load(prefill.ticket(running), [1, 2, 3, 4, 5])
    # Of three parcels one hangs, and the others are accepted.
    eventually(lambda: sum(r.ok for r in fabric.records) == 2, "two parcels are read")
    assert worker.take_finished({running.name}) is None
    assert prefill.held("requests_with_blocks") == [1] and prefill.held("regions") == [0]
    fabric.release_hung()
    assert decode.wait(request).ok
    assert decode.elements(running.prompt, [1, 2, 3, 4, 5]) == decode.values(running.prompt)
    prefill.wait_released(running)
    wait_idle(prefill)


@pytest.mark.parametrize("end", ["preempted", "aborted", "reset"])
def test_a_read_of_blocks_that_vllm_takes_back_is_not_believed(
    sides: Sides, fabric: MemoryFabric, direct: Make, end: str
) -> None:
    """The blocks are written by somebody else while they are read: the bytes come, and are disowned."""
    prefill, decode = sides.prefill(SMALL, fabric.factory()), direct(SMALL)
    running = prefill.begin(Prompt(SMALL, 64, seed=4))
    prefill.compute(running, 64)
    fabric.inject(Hang())
    request = decode.load(prefill.ticket(running), [1, 2, 3, 4])
    eventually(lambda: fabric.faults_left == 0, "the read begins")
    if end == "preempted":
        prefill.preempt(running)
    elif end == "aborted":
        prefill.abandon(running)
        prefill.wait_released(running)
    else:
        prefill.workers[0].before_step(PrefillStep(reset=True))
        prefill.caches[0].poison(running.table)
    fabric.release_hung()
    ended = decode.wait(request)
    assert not ended.ok and ended.block_ids == (1, 2, 3, 4)
    assert all(record.ok for record in fabric.records)  # the read itself went well
    if end == "preempted":
        prefill.abandon(running)
    elif end == "reset":
        prefill.finish(running)
    wait_idle(prefill)
    eventually(lambda: not decode.held(), "the decode side is idle")


def test_blocks_that_nobody_reads_are_given_back_in_time(sides: Sides, fabric: MemoryFabric, direct: Make) -> None:
    prefill = sides.prefill(SMALL, fabric.factory(), lease_s=60.0, buffer_wait_s=0.5)
    decode = direct(SMALL, peers=[prefill.workers[0].handshake.address])
    eventually(lambda: [p.state for p in decode.status().pairings] == ["paired"], "they pair")
    running = prefill.run(Prompt(SMALL, 64, seed=5))
    prefill.wait_released(running)  # by buffer_wait_s, which a lease of a minute would outlive
    assert not decode.wait(decode.load(prefill.ticket(running), [1, 2, 3, 4])).ok


def test_blocks_that_decode_has_are_not_read(sides: Sides, fabric: MemoryFabric, direct: Make) -> None:
    prefill, decode = sides.prefill(SMALL, fabric.factory(), parcel_tokens=48), direct(SMALL)
    running = prefill.run(Prompt(SMALL, 6 * 16, seed=6))
    request = decode.load(prefill.ticket(running), [11, 12], first_block=4)
    assert decode.wait(request).ok
    assert decode.touched() == {11, 12}
    assert decode.elements(running.prompt, [11, 12], first=64) == decode.values(running.prompt, first=64)
    prefill.wait_released(running)


def test_a_like_side_and_an_npu_are_fed_at_once(sides: Sides, fabric: MemoryFabric, direct: Make) -> None:
    """With two kinds of decode sides nothing is packed before it is asked for, and each gets its own kind."""
    geometry = replace(SMALL, head_dim=64)
    prefill = sides.prefill(geometry, fabric.factory())
    like, npu = direct(geometry), sides.decode(geometry, fabric.factory(), codec="bfp8")
    host = sides.decode(geometry, fabric.factory(), codec="bfp8", mode="host")
    first = [prefill.run(Prompt(geometry, 70, seed=n)) for n in range(3)]
    like.pull(prefill, first[0], [1, 2, 3, 4, 5])
    npu.pull(prefill, first[1], [3, 4])
    host.pull(prefill, first[2], [9, 2])
    again = [prefill.run(Prompt(geometry, 33, seed=10 + n)) for n in range(3)]
    host.pull(prefill, again[0], [7])
    like.pull(prefill, again[1], [6, 7, 8])
    npu.pull(prefill, again[2], [8])
    prefill.wait_released(*first, *again)
    wait_idle(prefill, npu, host)
    details = sorted(p.detail.split(",")[0] for p in prefill.statuses()[0].pairings)
    assert details == ["cross_layer bfp8", "mode direct", "mode host"]


def test_the_cache_is_nobodys_to_read_before_a_like_side_has_paired(
    sides: Sides, fabric: MemoryFabric, direct: Make
) -> None:
    prefill = sides.prefill(SMALL, fabric.factory())
    npu = sides.decode(replace(SMALL, head_dim=64), fabric.factory())
    engine = next(e for e in fabric._engines.values())
    memory = cache_source(prefill.caches[0].sources(), 16).memory
    whole = Segments(*(np.array([n], dtype=np.int64) for n in (memory.bases[0], 1, memory.layout.block_bytes)))
    assert engine.first_unreadable(whole) == 0
    npu.close()
    decode = direct(SMALL)
    decode.pull(prefill, prefill.run(Prompt(SMALL, 16, seed=7)), [1])
    assert engine.first_unreadable(whole) is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"block_size": 32}, ("block_size: prefill side has 16, decode side has 32", "--block-size")),
        ({"dtype": torch.bfloat16}, ("kv cache dtype: prefill side has float32, decode side has bfloat16", "--dtype")),
        ({"family": "LBNHC"}, ("place of K: prefill side has", "attention backend")),
        ({"ranks": 2}, ("tensor_parallel_size: prefill side has 2, decode side has 1", "--tensor-parallel-size 1")),
    ],
)
def test_caches_that_differ_are_refused_with_the_flag(
    sides: Sides, fabric: MemoryFabric, direct: Make, change: dict[str, object], words: tuple[str, ...]
) -> None:
    ranks = "ranks" in change
    prefill = sides.prefill(replace(SMALL, **change) if ranks else SMALL, fabric.factory())
    decode = direct(SMALL if ranks else replace(SMALL, **change))
    running = prefill.run(Prompt(prefill.geometry, 32, seed=8))
    request = decode.load(prefill.ticket(running), [1, 2])
    assert not decode.wait(request).ok
    reason = decode.report(request).reason
    assert all(word in reason for word in words), reason
    assert decode.touched() == set()


def test_digests_and_mode_direct_are_refused_together(sides: Sides, fabric: MemoryFabric, direct: Make) -> None:
    prefill, decode = sides.prefill(SMALL, fabric.factory(), parcel_digest=True), direct(SMALL)
    running = prefill.run(Prompt(SMALL, 32, seed=9))
    request = decode.load(prefill.ticket(running), [1, 2])
    assert not decode.wait(request).ok
    assert "parcel_digest: prefill side has true, decode side has false" in decode.report(request).reason
