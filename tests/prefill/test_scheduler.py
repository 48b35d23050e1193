"""Which steps the prefill scheduler writes, and what it answers to vLLM's ``request_finished``."""

from __future__ import annotations

from typing import Any

import pytest

from hawk_connector.prefill.metadata import BeginTransfer, PrefillStep, RankHandshake, RequestProgress
from hawk_connector.prefill.scheduler import PrefillScheduler
from hawk_connector.protocol.ticket import parse_params

WANTED = {"do_remote_decode": True}
EPOCHS = ["a" * 32, "b" * 32]
DIGEST = "d" * 64


def scheduler(ranks: int = 1) -> PrefillScheduler:
    ids = iter(f"{n:032x}" for n in range(100))
    made = PrefillScheduler("engine", new_id=lambda: next(ids))
    # As vLLM hands them over: by rank, in any order.
    found = {rank: RankHandshake(f"127.0.0.1:{7000 + rank}", EPOCHS[rank]) for rank in reversed(range(ranks))}
    made.set_ranks(found)
    return made


def test_a_chunked_prompt_is_told_chunk_by_chunk_and_no_generated_token() -> None:
    made = scheduler()
    made.allocated("r", WANTED, DIGEST, 100, [7, 3])
    step = made.build_step([("r", [7, 3], 32)], [], [])
    assert step.begun == [BeginTransfer("r", f"{0:032x}", DIGEST, 100)]
    assert step.progress == [RequestProgress("r", 32, (7, 3))]
    step = made.build_step([], [("r", [9], False, 64)], [])
    assert step.progress == [RequestProgress("r", 64, (7, 3, 9))]
    step = made.build_step([], [("r", None, False, 90)], [])
    assert step.progress == [RequestProgress("r", 90, (7, 3, 9))]
    # The last prompt token and a first generated one, then another of those.
    assert made.build_step([], [("r", [1], False, 101)], []).progress == [RequestProgress("r", 100, (7, 3, 9, 1))]
    assert made.build_step([], [("r", None, False, 102)], []) == PrefillStep()


def test_a_preempted_prompt_begins_again_in_its_new_blocks() -> None:
    made = scheduler()
    made.allocated("r", WANTED, DIGEST, 100, [7])
    made.build_step([("r", [7], 64)], [], [])
    assert made.build_step([], [], ["r"]).preempted == ["r"]
    made.allocated("r", WANTED, DIGEST, 100, [4, 5])
    step = made.build_step([], [("r", [4, 5], True, 32)], [])
    # One transfer for one request, whatever vLLM does with it.
    assert step == PrefillStep(progress=[RequestProgress("r", 32, (4, 5))])


def test_preempted_and_rescheduled_in_one_step() -> None:
    made = scheduler()
    made.allocated("r", WANTED, DIGEST, 100, [7])
    made.build_step([("r", [7], 64)], [], [])
    step = made.build_step([], [("r", [4], True, 16)], ["r", "somebody else's"])
    assert step == PrefillStep(preempted=["r"], progress=[RequestProgress("r", 16, (4,))])


def test_a_finished_request_gives_params_that_decode_reads() -> None:
    made = scheduler(ranks=2)
    made.allocated("r", WANTED, DIGEST, 64, [7])
    made.build_step([("r", [7], 64)], [], [])
    keep, params = made.finished("r", ended_well=True)
    assert keep and made.holds_blocks
    assert params is not None
    assert (params["do_remote_prefill"], params["do_remote_decode"]) == (True, False)
    assert (params["remote_engine_id"], params["remote_host"], params["remote_port"]) == ("engine", "127.0.0.1", 7000)
    parsed = parse_params(params)
    assert parsed is not None
    assert (parsed.transfer, parsed.tokens, parsed.first_token) == (f"{0:032x}", 64, None)
    assert [(r.address, r.epoch) for r in parsed.ranks] == [
        ("127.0.0.1:7000", EPOCHS[0]),
        ("127.0.0.1:7001", EPOCHS[1]),
    ]
    assert made.build_step([], [], []).finished == ["r"]
    made.released(["r"])
    assert not made.holds_blocks
    # vLLM never asks twice, but a second answer must not keep blocks for ever.
    assert made.finished("r", ended_well=True) == (False, None)


@pytest.mark.parametrize(("ended_well", "computed"), [(False, 64), (False, 0), (True, 63)])
def test_a_request_that_did_not_complete_is_abandoned(ended_well: bool, computed: int) -> None:
    made = scheduler()
    made.allocated("r", WANTED, DIGEST, 64, [7])
    if computed:
        made.build_step([("r", [7], computed)], [], [])
    assert made.finished("r", ended_well) == (True, None)
    step = made.build_step([], [], [])
    assert (step.abandoned, step.finished) == (["r"], [])
    # Kept until the workers say that no pack reads its blocks.
    assert made.holds_blocks
    made.released(["r"])
    assert not made.holds_blocks


@pytest.mark.parametrize(
    "params", [None, {}, {"do_remote_decode": False}, {"do_remote_decode": "true"}, [True], "text"]
)
def test_other_requests_are_left_alone(params: Any) -> None:
    made = scheduler()
    made.allocated("r", params, DIGEST, 64, [7])
    assert made.build_step([("r", [7], 64)], [("s", None, False, 3)], ["r"]) == PrefillStep()
    assert made.finished("r", ended_well=True) == (False, None)
    assert not made.holds_blocks


def test_before_the_workers_are_known_nothing_is_offered() -> None:
    made = PrefillScheduler("engine")
    made.allocated("r", WANTED, DIGEST, 64, [7])
    assert made.finished("r", ended_well=True) == (False, None)


def test_several_answers_to_one_request_share_one_transfer() -> None:
    """vLLM names the n answers 0_X, 1_X ..; the client gets the parameters of whichever ends last."""
    made = scheduler()
    names = [f"{n}_cmpl-7" for n in range(3)]
    for name in names:
        made.allocated(name, WANTED, DIGEST, 64, [7])
    step = made.build_step([(name, [7], 64) for name in names], [], [])
    assert step.begun == [BeginTransfer("0_cmpl-7", f"{0:032x}", DIGEST, 64)]
    assert step.progress == [RequestProgress("0_cmpl-7", 64, (7,))]
    answers = [made.finished(name, ended_well=True) for name in names]
    assert [keep for keep, _ in answers] == [True, False, False]  # the others' blocks are vLLM's at once
    transfers = [parsed.transfer for _, params in answers if (parsed := parse_params(params)) is not None]
    assert transfers == [f"{0:032x}"] * 3
    step = made.build_step([], [], [])
    assert (step.finished, step.abandoned) == (["0_cmpl-7"], [])
    made.released(["0_cmpl-7"])
    assert not made.holds_blocks
    # They are gone: the same names again are another request.
    made.allocated("1_cmpl-7", WANTED, DIGEST, 64, [7])
    assert made.build_step([], [], []).begun == [BeginTransfer("1_cmpl-7", f"{1:032x}", DIGEST, 64)]


def test_an_answer_that_follows_says_nothing_of_its_own_and_gives_no_parameters_when_aborted() -> None:
    made = scheduler()
    for name in ("0_r", "1_r"):
        made.allocated(name, WANTED, DIGEST, 64, [7])
    made.build_step([("0_r", [7], 64), ("1_r", [8], 32)], [], [])
    assert made.build_step([], [], ["1_r"]) == PrefillStep()
    assert made.finished("1_r", ended_well=False) == (False, None)
    keep, params = made.finished("0_r", ended_well=True)
    assert keep and params is not None


@pytest.mark.parametrize("others", [("0_s", DIGEST), ("1_r", "e" * 64), ("r", DIGEST), ("x_r", DIGEST)])
def test_what_is_no_answer_to_the_same_request_has_its_own_transfer(others: tuple[str, str]) -> None:
    made = scheduler()
    name, digest = others
    made.allocated("0_r", WANTED, DIGEST, 64, [7])
    made.allocated(name, WANTED, digest, 64, [8])
    assert len(made.build_step([], [], []).begun) == 2
