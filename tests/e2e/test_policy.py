"""vLLM's failure policies when loads fail for real: shared blocks, peers that fail again and again, drains."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from hawk_connector.address import Address
from hawk_connector.cli.drain import Drainer
from tests.e2e import failing_landing
from tests.e2e.conftest import prompt
from tests.e2e.harness import REMOTE_DECODE, Engine, decode_engine, prefill_engine

pytestmark = pytest.mark.e2e

BLOCK = 64


class Pair:
    """Two engines whose decode side fails as many landings as ``fail`` says."""

    def __init__(self, prefill: Engine, decode: Engine, failures: Path) -> None:
        self.prefill = prefill
        self.decode = decode
        self._failures = failures

    def fail(self, parcels: int) -> None:
        self._failures.write_text(str(parcels))

    @property
    def failures_left(self) -> int:
        return int(self._failures.read_text())

    def send(self, prompts: list[list[int]]) -> list[dict[str, Any]]:
        """The prompts' prefill legs; their parameters."""
        return [s["params"] for s in self.prefill.generate(prompts, [REMOTE_DECODE] * len(prompts), max_tokens=1)]

    def answer(self, prompts: list[list[int]], params: list[dict[str, Any] | None]) -> list[dict[str, Any]]:
        return self.decode.generate(prompts, params)

    def failures(self) -> list[str]:
        return [r["failure"] for r in self.decode.call("reports")["reports"] if r["outcome"] == "failed"]

    def idle(self) -> None:
        self.prefill.wait_idle()
        self.decode.wait_idle()


@pytest.fixture(scope="module", params=["recompute", "fail"])
def pair(request: pytest.FixtureRequest, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    directory = tmp_path_factory.mktemp("policy")
    environment = failing_landing.installed(directory / "site")
    prefill = prefill_engine(tiny, directory / "prefill.log", {"lease_s": 120.0})
    config = {"landing": failing_landing.NAME, "circuit_failures": 1000, "renew_s": 1.0}
    decode = decode_engine(
        tiny,
        directory / "decode.log",
        config=config,
        policy=request.param,
        enable_prefix_caching=True,
    )
    decode.environment.update(environment)
    with ExitStack() as stack:
        for engine in (prefill, decode):
            stack.callback(engine.stop)
            engine.start()
        for engine in (prefill, decode):
            engine.wait_ready()
        yield Pair(prefill, decode, directory / "site" / "failures")


def check(pair: Pair, answers: list[dict[str, Any]], reference: list[Any], failed: set[int]) -> None:
    """Right everywhere, but for an error where ``failed`` failed under policy fail."""
    policy = pair.decode.options["kv_transfer_config"]["kv_load_failure_policy"]
    for index, (answer, tokens) in enumerate(zip(answers, reference, strict=True)):
        if index in failed and policy == "fail":
            assert answer["finish"] == ["error"], index
        else:
            assert answer["tokens"] == tokens, index


def test_requests_that_share_a_prefix_with_one_that_fails_are_right(pair: Pair) -> None:
    """The first two blocks are in decode's prefix cache, used by a request that decodes; the load beside it fails."""
    shared = prompt(2 * BLOCK, seed=10)
    first, second, third = (shared + prompt(150, seed=s) for s in (11, 12, 13))
    reference = [r["tokens"] for r in pair.prefill.generate([first, second, third])]
    sent = pair.send([first, second, third])
    check(pair, pair.answer([first], [sent[0]]), reference[:1], set())  # healthy; its blocks are cached now
    before = len(pair.failures())
    pair.fail(1)
    answers = pair.answer([first, second, third], [None, sent[1], sent[2]])
    assert pair.failures_left == 0 and pair.failures()[before:] == ["read"]
    failed = {i for i, a in enumerate(answers) if a["finish"] == ["error"]}
    assert failed <= {1, 2} and len(failed) <= 1
    policy = pair.decode.options["kv_transfer_config"]["kv_load_failure_policy"]
    assert (len(failed) == 1) == (policy == "fail")
    check(pair, answers, reference, failed)
    # What failed was not kept as anybody's prefix: the same prompts again, from the cache alone.
    check(pair, pair.answer([first, second, third], [None] * 3), reference, set())
    pair.idle()


def test_the_same_prompt_twice_of_which_one_load_fails(pair: Pair) -> None:
    twin = prompt(200, seed=20)
    (tokens,) = [r["tokens"] for r in pair.prefill.generate([twin])]
    sent = pair.send([twin, twin])
    pair.fail(1)
    answers = pair.answer([twin, twin], list(sent))
    failed = {i for i, a in enumerate(answers) if a["finish"] == ["error"]}
    check(pair, answers, [tokens, tokens], failed)
    assert len(failed) <= 1
    check(pair, pair.answer([twin], [None]), [tokens], set())
    pair.idle()


def test_a_failed_load_is_no_prefix_of_a_later_request(pair: Pair) -> None:
    """The failed blocks were full of garbage; whoever shares the prompt's beginning must not find them in the cache."""
    first = prompt(3 * BLOCK, seed=30)
    second = first + prompt(70, seed=31)
    reference = [r["tokens"] for r in pair.prefill.generate([first, second])]
    sent = pair.send([first, second])
    pair.fail(1)
    check(pair, pair.answer([first], [sent[0]]), reference[:1], {0})
    check(pair, pair.answer([second], [sent[1]]), reference[1:], set())
    pair.idle()


def test_after_failures_in_a_row_requests_do_not_wait_and_one_success_closes_the_circuit(
    tiny: Path, tmp_path: Path
) -> None:
    environment = failing_landing.installed(tmp_path / "site")
    prefill = prefill_engine(tiny, tmp_path / "prefill.log", {"lease_s": 120.0})
    config = {
        "landing": failing_landing.NAME,
        "circuit_failures": 2,
        "circuit_open_s": 3600.0,
        "circuit_open_max_s": 3600.0,
        "renew_s": 1.0,
    }
    decode = decode_engine(tiny, tmp_path / "decode.log", config=config)
    decode.environment.update(environment)
    with prefill, decode:
        pair = Pair(prefill, decode, tmp_path / "site" / "failures")
        prompts = [prompt(100, seed=s) for s in range(40, 44)]
        reference = [r["tokens"] for r in prefill.generate(prompts)]
        sent = pair.send(prompts)
        pair.fail(2)
        for index in range(4):
            check(pair, pair.answer([prompts[index]], [sent[index]]), [reference[index]], set())
        # Two loads failed; the other two requests computed their own KV, an hour before the next try.
        assert pair.failures() == ["read", "read"]
        assert len(decode.call("reports")["reports"]) == 2
        assert "circuit" in decode.log.read_text()
        # The prefill side was told, and does not keep their KV until the lease ends.
        pair.idle()


def test_a_drained_pair_serves_on_without_transfers(tiny: Path, start_pair: Any) -> None:
    prefill, decode = start_pair(tiny, decode={"config": {"hello_deadline_s": 2.0}})
    prompts = [prompt(n, seed=50) for n in (100, 130, 70)]
    reference = [r["tokens"] for r in prefill.generate(prompts)]
    first = prefill.generate(prompts[:1], [REMOTE_DECODE], max_tokens=1)[0]["params"]
    places = [Address.parse(engine.call("status")["address"]) for engine in (prefill, decode)]
    with Drainer(places) as drainer:
        drainer.turn()
        assert drainer.sides[0].owed and not drainer.sides[0].refused
        # What was promised before the drain is fetched.
        assert decode.generate(prompts[:1], [first])[0]["tokens"] == reference[0]
        assert [r["outcome"] for r in decode.call("reports")["reports"]] == ["completed"]
        later = prefill.generate(prompts[1:], [REMOTE_DECODE] * 2, max_tokens=1)
        answers = decode.generate(prompts[1:], [s["params"] for s in later])
        assert [a["tokens"] for a in answers] == reference[1:]
        assert len(decode.call("reports")["reports"]) == 1
        assert drainer.wait(20.0, lambda seconds: bool(decode.call("status")) is False, lambda sides: None)


def test_two_answers_to_one_request_share_one_transfer(pair: Pair) -> None:
    """The client gets the parameters of one of them; the other's KV would wait for nobody until its lease ends."""
    ids = prompt(150, seed=60)
    (tokens,) = [r["tokens"] for r in pair.prefill.generate([ids])]
    sent = pair.prefill.generate([ids], [REMOTE_DECODE], max_tokens=1, n=2)[0]["params"]
    assert pair.prefill.call("status")["held"]["transfers"] == 1
    completed = len(pair.decode.call("reports")["reports"])
    check(pair, pair.answer([ids], [sent]), [tokens], set())
    assert len(pair.decode.call("reports")["reports"]) == completed + 1
    pair.idle()
