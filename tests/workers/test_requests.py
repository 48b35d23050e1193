"""Whole requests: both schedulers and both workers, with kv_transfer_params handed from one side to the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from hawk_connector.config import DecodeConfig, HawkConfig
from hawk_connector.decode.scheduler import DecodeScheduler
from hawk_connector.prefill.scheduler import PrefillScheduler
from hawk_connector.transport.memory import Fail, MemoryFabric
from hawk_connector.transport.mooncake import mooncake_factory
from hawk_connector.transport.side_channel import SideChannelClient
from tests.transport.waiting import eventually
from tests.workers.sides import DECODE, DecodeSide, PrefillSide, Sides, digest_of, wait_idle
from tests.workers.source import Geometry, Prompt

pytestmark = pytest.mark.slow

WANTED = {"do_remote_decode": True, "do_remote_prefill": False}
GEOMETRY = Geometry(block_size=16, ranks=2)


class PrefillEngine:
    """vLLM on the prefill side in small: its scheduler calls, steps, and the blocks that it keeps for HAWK."""

    def __init__(self, side: PrefillSide) -> None:
        self.side = side
        self.scheduler = PrefillScheduler("an engine")
        self.scheduler.set_ranks({rank: worker.handshake for rank, worker in enumerate(side.workers)})
        self.sending: dict[str, set[int]] = {}
        self.tables: dict[str, list[int]] = {}

    def run(self, name: str, prompt: Prompt, chunk: int, params: Any = WANTED, aborted_at: int | None = None) -> Any:
        """The request from allocation to request_finished, ``chunk`` tokens a step; what the client gets."""
        size = self.side.geometry.block_size
        table = self.side.blocks.take(-(-prompt.tokens // size))
        self.tables[name] = table
        self.scheduler.allocated(name, params, digest_of(prompt), prompt.tokens, table[: -(-chunk // size)])
        for first in range(0, prompt.tokens, chunk):
            last = min(first + chunk, prompt.tokens)
            have, want = -(-first // size), -(-last // size)
            for cache in self.side.caches:
                cache.write(prompt, table, first, last)
            if first == 0:
                step = self.scheduler.build_step([(name, table[:want], last)], [], [])
            else:
                step = self.scheduler.build_step([], [(name, table[have:want], False, last)], [])
            self.side.step(step)
            if aborted_at is not None and last >= aborted_at:
                break
        held, answer = self.scheduler.finished(name, aborted_at is None)
        if held:
            self.sending[name] = set()
        else:
            self.side.blocks.give_back(self.tables.pop(name))
        return answer

    def idle_step(self, finished: Sequence[str] = ()) -> None:
        """A step with nothing scheduled: the workers hear what ended, and say whose blocks may go."""
        self.side.step(self.scheduler.build_step([], [], []))
        for rank, worker in enumerate(self.side.workers):
            for name in worker.take_finished(set(finished)) or ():
                self.sending[name].add(rank)
        done = {name for name, ranks in self.sending.items() if len(ranks) == len(self.side.workers)}
        for name in done:
            del self.sending[name]
            table = self.tables.pop(name)
            for cache in self.side.caches:
                cache.poison(table)
            self.side.blocks.give_back(table)
        self.scheduler.released(done)

    def drain(self, *finished: str) -> None:
        """Steps while HAWK holds blocks, as vLLM does for ``has_pending_push_work``."""
        self.idle_step(finished)

        def stepped() -> bool:
            self.idle_step()
            return not self.scheduler.holds_blocks

        eventually(stepped, "all blocks come back")
        assert not self.sending


class DecodeEngine:
    """vLLM on the decode side in small."""

    def __init__(self, side: DecodeSide, recompute: bool = True, **config: Any) -> None:
        self.side = side
        parsed = HawkConfig.parse({**DECODE, **config}, "kv_consumer")
        assert isinstance(parsed, DecodeConfig)
        self.scheduler = DecodeScheduler(parsed, side.layout.block_size, SideChannelClient(), recompute=recompute)
        self.scheduler.set_worker(side.worker.handshake)

    def matched(self, name: str, prompt: Prompt, params: Any, cached: int = 0, digest: str | None = None) -> int:
        """Offers the request to the scheduler until it has an answer; tokens that it wants to load."""
        self.scheduler.new_request(name, params, digest or digest_of(prompt), prompt.tokens)
        answers: list[int] = []

        def answered() -> bool:
            tokens, later = self.scheduler.matched_tokens(name, prompt.tokens, cached)
            if tokens is None:
                return False
            assert later == (tokens > 0)
            answers.append(tokens)
            return True

        eventually(answered, f"{name} gets a verdict")
        return answers[0]

    def load(self, name: str, prompt: Prompt, blocks: list[int], external: int) -> None:
        self.scheduler.allocated(name, prompt.tokens, external, blocks)
        self.side.worker.step(self.scheduler.build_step())

    def wait(self, name: str) -> bool:
        end = self.side.wait(name)
        self.scheduler.loaded({name})
        return end.ok

    def finish(self, name: str) -> None:
        self.scheduler.finished(name)
        self.side.worker.step(self.scheduler.build_step())

    def wait_idle(self) -> None:
        """The scheduler's own claims and farewells are what the worker shows as ``admissions``."""

        def none() -> bool:
            self.side.worker.step(self.scheduler.build_step())
            return not any(self.side.status().held.values())

        eventually(none, "decode holds nothing")

    def close(self) -> None:
        self.scheduler.close()


@pytest.fixture
def engines(sides: Sides, fabric: MemoryFabric) -> Iterator[tuple[PrefillEngine, DecodeEngine]]:
    prefill = PrefillEngine(sides.prefill(GEOMETRY, fabric.factory(), parcel_tokens=64))
    decode = DecodeEngine(sides.decode(GEOMETRY, fabric.factory(), codec="bfp8", chips=2))
    yield prefill, decode
    decode.close()


def test_a_request_from_one_side_to_the_other(engines: tuple[PrefillEngine, DecodeEngine]) -> None:
    prefill, decode = engines
    for number, (tokens, chunk) in enumerate(((150, 40), (150, 150), (1, 8), (64, 64), (65, 50))):
        name, prompt = f"r{number}", Prompt(GEOMETRY, tokens, seed=number)
        params = prefill.run(name, prompt, chunk)
        host, port = params["remote_host"], params["remote_port"]
        assert params["do_remote_prefill"] is True and params["do_remote_decode"] is False
        assert (f"{host}:{port}", params["tp_size"]) == (prefill.side.ranks[0].address, 2)
        blocks = [11, 3, 7][: -(-tokens // 64)]
        assert decode.matched(name, prompt, params) == tokens
        decode.load(name, prompt, blocks, tokens)
        prefill.drain(name)
        assert decode.wait(name)
        decode.side.check(prompt, blocks)
        decode.finish(name)
        wait_idle(prefill.side)
        decode.wait_idle()


def test_a_request_over_mooncake(sides: Sides) -> None:
    geometry = Geometry("cpu", block_size=128, blocks=6)
    factory = mooncake_factory("127.0.0.1", protocol="tcp", timeout_s=30, max_segments_per_batch=1024)
    side = sides.prefill(geometry, factory, parcel_tokens=64)
    prefill, decode = PrefillEngine(side), DecodeEngine(sides.decode(geometry, factory, codec="bfp8", chips=2))
    try:
        prompt = Prompt(geometry, 200, seed=1)
        params = prefill.run("r", prompt, 60)
        assert decode.matched("r", prompt, params) == 200
        decode.load("r", prompt, [11, 3, 7, 8], 200)
        assert decode.wait("r"), decode.side.report("r").reason
        assert decode.side.check(prompt, [11, 3, 7, 8]) == decode.side.report("r").wire_bytes == decode.side.touched()
        prefill.drain("r")
        wait_idle(side)
        decode.wait_idle()
    finally:
        decode.close()


def test_prefix_that_decode_has_is_not_loaded(engines: tuple[PrefillEngine, DecodeEngine]) -> None:
    prefill, decode = engines
    prompt = Prompt(GEOMETRY, 200, seed=1)
    params = prefill.run("r", prompt, 200)
    assert decode.matched("r", prompt, params, cached=128) == 72
    decode.load("r", prompt, [11, 3, 7, 8], 72)
    assert decode.wait("r")
    everything = decode.side.expected(prompt, [11, 3, 7, 8])
    total = sum(len(page) for pages in everything.values() for page in pages.values())
    assert decode.side.touched() == decode.side.report("r").wire_bytes == total // 2
    prefill.drain("r")
    wait_idle(prefill.side)


def test_where_everything_is_cached_the_transfer_is_given_up(engines: tuple[PrefillEngine, DecodeEngine]) -> None:
    prefill, decode = engines
    prompt = Prompt(GEOMETRY, 129, seed=1)
    params = prefill.run("r", prompt, 129)
    assert decode.matched("r", prompt, params, cached=128) == 0
    decode.scheduler.allocated("r", prompt.tokens, 0, [1, 2, 3])
    prefill.drain("r")
    # Prefill need not wait for its lease.
    eventually(lambda: [r.outcome for r in prefill.side.reports()] == ["aborted"], "the transfer ends")
    wait_idle(prefill.side)
    decode.wait_idle()


def test_every_element_of_a_list_prompt_but_its_own_computes(engines: tuple[PrefillEngine, DecodeEngine]) -> None:
    """Routers hand one dict to every element; a duplicate of the right one comes second and computes too."""
    prefill, decode = engines
    right, wrong = Prompt(GEOMETRY, 100, seed=1), Prompt(GEOMETRY, 100, seed=2)
    params = prefill.run("r", right, 100)
    assert decode.matched("wrong", wrong, params) == 0
    assert decode.matched("right", right, params) == 100
    assert decode.matched("twice", right, params) == 0
    assert decode.matched("shorter", Prompt(GEOMETRY, 99, seed=1), params) == 0
    decode.load("right", right, [3, 4], 100)
    assert decode.wait("right")
    decode.side.check(right, [3, 4])
    prefill.drain("r")
    wait_idle(prefill.side)
    decode.wait_idle()


def test_requests_that_name_no_transfer_compute(engines: tuple[PrefillEngine, DecodeEngine]) -> None:
    prefill, decode = engines
    prompt = Prompt(GEOMETRY, 100, seed=1)
    good = prefill.run("r", prompt, 100)
    ranks = good["hawk"]["ranks"]
    elsewhere = [{**ranks[0], "address": "192.0.2.1:5"}]
    named = [{**ranks[0], "address": "127.0.0.1:07"}]
    nowhere = [{**ranks[0], "address": "127.0.0.1"}]
    bad: list[Any] = [
        None,
        "text",
        {},
        {"do_remote_prefill": True},
        {"do_remote_prefill": "yes", "hawk": good["hawk"]},
        {**good, "hawk": None},
        {**good, "hawk": {**good["hawk"], "v": 99}},
        {**good, "hawk": {**good["hawk"], "transfer": "../../etc"}},
        {**good, "hawk": {**good["hawk"], "tokens": "100"}},
        {**good, "hawk": {**good["hawk"], "tokens": 101}},
        {**good, "hawk": {**good["hawk"], "ranks": []}},
        {**good, "hawk": {**good["hawk"], "ranks": ranks * 40}},
        {**good, "hawk": {**good["hawk"], "extra": 1}},
        *({**good, "hawk": {**good["hawk"], "ranks": r}} for r in (elsewhere, named, nowhere)),
    ]
    for number, params in enumerate(bad):
        assert decode.matched(f"bad-{number}", prompt, params) == 0, params
    # Nobody was asked, nothing was claimed: the right dict still loads.
    assert decode.matched("right", prompt, good) == 100
    decode.load("right", prompt, [3, 4], 100)
    assert decode.wait("right")
    decode.side.check(prompt, [3, 4])
    prefill.drain("r")
    wait_idle(prefill.side)
    decode.wait_idle()


@pytest.mark.parametrize("when", ["asked", "claimed", "loading"])
def test_decode_aborts_a_request(engines: tuple[PrefillEngine, DecodeEngine], when: str) -> None:
    prefill, decode = engines
    first = Prompt(GEOMETRY, 1, seed=0)
    assert decode.matched("first", first, prefill.run("first", first, 1)) == 1
    decode.load("first", first, [1], 1)
    assert decode.wait("first")
    prompt = Prompt(GEOMETRY, 150, seed=1)
    params = prefill.run("r", prompt, 150)
    if when == "asked":
        decode.scheduler.new_request("r", params, digest_of(prompt), prompt.tokens)
    else:
        assert decode.matched("r", prompt, params) == 150
    if when == "loading":
        decode.load("r", prompt, [3, 4, 5], 150)
    decode.finish("r")
    if when == "loading":
        decode.wait("r")
    prefill.drain("first", "r")
    wait_idle(prefill.side)
    decode.wait_idle()
    assert prefill.side.reports()[-1].outcome in (("aborted", "completed") if when == "loading" else ("aborted",))


def test_prefill_aborts_a_request(engines: tuple[PrefillEngine, DecodeEngine]) -> None:
    prefill, _ = engines
    prompt = Prompt(GEOMETRY, 150, seed=1)
    assert prefill.run("r", prompt, 40, aborted_at=80) is None
    prefill.drain("r")
    wait_idle(prefill.side)
    assert [r.outcome for r in prefill.side.reports()] == ["aborted"]


def test_requests_that_stay_here_are_none_of_hawks_business(engines: tuple[PrefillEngine, DecodeEngine]) -> None:
    prefill, _ = engines
    prompt = Prompt(GEOMETRY, 150, seed=1)
    for params in (None, {}, {"do_remote_decode": False}, "text"):
        assert prefill.run("r", prompt, 40, params=params) is None
        assert not prefill.scheduler.holds_blocks
    assert prefill.side.held("transfers") == [0, 0]


@pytest.mark.parametrize("recompute", [True, False])
def test_a_prefill_side_that_is_down_is_vllms_policy_to_answer(
    sides: Sides, fabric: MemoryFabric, recompute: bool
) -> None:
    prefill = PrefillEngine(sides.prefill(GEOMETRY, fabric.factory()))
    side = sides.decode(GEOMETRY, fabric.factory())
    decode = DecodeEngine(side, recompute=recompute, hello_deadline_s=1.0, admission_deadline_s=2.0)
    try:
        prompt = Prompt(GEOMETRY, 100, seed=1)
        params = prefill.run("r", prompt, 100)
        prefill.side.close()
        wanted = decode.matched("r", prompt, params)
        assert wanted == (0 if recompute else 100)
        if not recompute:
            # vLLM fails a request through the blocks of a load that failed.
            decode.load("r", prompt, [5, 6], 100)
            assert not decode.wait("r")
            assert side.poll()["r"].block_ids == (5, 6)
            decode.finish("r")
        decode.wait_idle()
    finally:
        decode.close()


def test_a_failed_load_leaves_nothing_behind(engines: tuple[PrefillEngine, DecodeEngine], fabric: MemoryFabric) -> None:
    prefill, decode = engines
    prompt = Prompt(GEOMETRY, 150, seed=1)
    params = prefill.run("r", prompt, 150)
    assert decode.matched("r", prompt, params) == 150
    fabric.inject(Fail(late=True))
    decode.load("r", prompt, [3, 4, 5], 150)
    assert not decode.wait("r")
    decode.side.wipe()
    assert (fabric.release_late(), decode.side.touched()) == (0, 0)
    prefill.drain("r")
    # vLLM may offer the request again (policy recompute): it must not be loaded a second time.
    assert decode.scheduler.matched_tokens("r", 150, 0) == (0, False)
    decode.scheduler.allocated("r", 150, 0, [3, 4, 5])
    decode.finish("r")
    wait_idle(prefill.side)
    decode.wait_idle()


def test_thirty_two_requests_leave_nothing_held(engines: tuple[PrefillEngine, DecodeEngine]) -> None:
    prefill, decode = engines
    ready: list[tuple[str, Prompt, Any]] = []
    for number in range(32):
        prompt = Prompt(GEOMETRY, 1 + 37 * number % 130, seed=number)
        name = f"r{number}"
        ready.append((name, prompt, prefill.run(name, prompt, 64)))
        prefill.idle_step([name])
        if len(ready) == 4:
            blocks = [list(range(1 + 3 * i, 1 + 3 * i + -(-p.tokens // 64))) for i, (_, p, _) in enumerate(ready)]
            for (name, prompt, params), ids in zip(ready, blocks, strict=True):
                assert decode.matched(name, prompt, params) == prompt.tokens
                decode.load(name, prompt, ids, prompt.tokens)
            for (name, prompt, _), ids in zip(ready, blocks, strict=True):
                assert decode.wait(name), decode.side.report(name).reason
                decode.side.check(prompt, ids)
                decode.finish(name)
            ready.clear()
    prefill.drain()
    wait_idle(prefill.side)
    decode.wait_idle()
    assert [r.outcome for r in prefill.side.reports()] == ["completed"] * 32
