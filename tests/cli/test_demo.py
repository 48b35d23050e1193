"""The demo's pure parts. The demo as a whole is its own end-to-end test (`make demo`)."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from hawk_connector.cli import deployment
from hawk_connector.cli.demo import KV_DTYPES, DemoError, Supervisor, bundled_config, with_pools
from hawk_connector.cli.demo_client import Answer, AnswerError, _Reply, assemble, events
from hawk_connector.cli.demo_compare import compare
from hawk_connector.cli.demo_prompts import Prompt, demo_prompts, read_text
from hawk_connector.cli.demo_report import Phase, Row, as_json, bank_fill, phase_table, summary, tie_lines
from hawk_connector.cli.demo_sides import Movement, report_of
from hawk_connector.cli.processes import Deployment, DeploymentError, ProcessSpec, StopRequested
from hawk_connector.errors import LocalError, PeerError
from hawk_connector.metrics import TransferReport
from tests.cli.test_main import SIMULATED

# --- the rule


def test_equal_answers() -> None:
    found = compare([5, 6, 7], [{5: -0.1}, {6: -0.1}, {7: -0.1}], [5, 6, 7])
    assert (found.total, found.same, found.first_difference, found.tie, found.holds) == (3, 3, None, False, True)
    assert found.before_difference == 3


def test_a_difference_at_a_tie_holds_whatever_follows() -> None:
    best = [{5: -0.1, 9: -3.0}, {6: -0.70000, 8: -0.70009}, {7: -0.1, 1: -5.0}, {4: -0.1, 3: -0.2}]
    found = compare([5, 6, 7, 4], best, [5, 8, 1, 4])
    assert (found.same, found.first_difference, found.tie, found.holds) == (2, 1, True, True)


@pytest.mark.parametrize(
    "best",
    [
        {6: -0.7, 8: -0.70011},  # too far
        {6: -0.7, 9: -0.7},  # a tie, but of other tokens than the one that came
        {},
    ],
)
def test_a_difference_that_is_no_tie_does_not_hold(best: dict[int, float]) -> None:
    found = compare([5, 6, 7], [{5: -0.1}, best, {7: -0.1}], [5, 8, 7])
    assert (found.same, found.first_difference, found.tie, found.holds) == (2, 1, False, False)


@pytest.mark.parametrize("answer", [[5, 6], [5, 6, 7, 8], []])
def test_another_length_does_not_hold(answer: list[int]) -> None:
    found = compare([5, 6, 7], [{5: 0.0, 8: 0.0}, {6: 0.0}, {7: 0.0, 8: 0.0}], answer)
    assert not found.holds
    assert found.first_difference == min(3, len(answer))


@given(st.lists(st.integers(0, 3), max_size=8), st.lists(st.integers(0, 3), max_size=8))
def test_only_equal_answers_hold_where_nothing_ties(ours: list[int], theirs: list[int]) -> None:
    best = [{token: 0.0} for token in ours]
    assert compare(ours, best, theirs).holds == (ours == theirs)


# --- prompts


def by_two_letters(text: str) -> Sequence[int]:
    """A tokenizer: each two letters of a word are a token."""
    pairs = (word[i : i + 2] for word in text.split() for i in range(0, len(word), 2))
    return [int.from_bytes(pair.encode(), "big") for pair in pairs]


def test_twenty_prompts_among_them_the_lengths_of_the_issue() -> None:
    prompts = demo_prompts(by_two_letters)
    assert len(prompts) == 20
    exact = {prompt.tokens: prompt for prompt in prompts if prompt.tokens is not None}
    assert sorted(exact) == [1, 63, 64, 65, 127, 128, 129, 1000, 3000]
    assert all(len(prompt.content["prompt"]) == tokens for tokens, prompt in exact.items())
    assert {prompt.kind for prompt in prompts} == {"text", "text stream", "chat", "chat stream"}
    assert {prompt.kind for prompt in prompts if prompt.in_all_pools} >= {"text stream", "chat", "chat stream"}
    assert sum(prompt.in_all_pools for prompt in prompts) == 5


def test_no_two_exact_prompts_share_a_first_block() -> None:
    long = [prompt for prompt in demo_prompts(by_two_letters) if (prompt.tokens or 0) >= 63]
    assert len({tuple(prompt.content["prompt"][:32]) for prompt in long}) == len(long) == 8


def test_the_text_is_refused_where_a_tokenizer_makes_too_few_tokens_of_it() -> None:
    with pytest.raises(LocalError, match=r"too short for this model's tokenizer: .* a prompt of 63 "):
        demo_prompts(lambda text: [1])


def test_the_text_is_paragraphs() -> None:
    paragraphs = read_text()
    assert len(paragraphs) > 20
    assert all("\n" not in paragraph for paragraph in paragraphs)


# --- answers


def reply(**data: object) -> _Reply:
    return msgspec.convert({"id": "cmpl-1", "choices": [], **data}, _Reply)


def test_a_streamed_completion() -> None:
    lines = [
        'data: {"id":"cmpl-1","choices":[{"text":" a","prompt_token_ids":[3,4],"token_ids":[7]}]}',
        "",
        ": a comment",
        'data: {"id":"cmpl-1","choices":[{"text":"b c","prompt_token_ids":null,"token_ids":[8,9]}]}',
        'data: {"id":"cmpl-1","choices":[]}',
        "data: [DONE]",
    ]
    replies = [msgspec.json.decode(event, type=_Reply) for event in events(lines)]
    assert assemble(replies) == Answer("cmpl-1", 2, (7, 8, 9), " ab c")


def test_a_stream_that_breaks_off_is_an_error() -> None:
    with pytest.raises(AnswerError, match=r"before its \[DONE\]"):
        list(events(['data: {"id":"x","choices":[]}']))


def test_a_whole_chat_with_logprobs() -> None:
    places = [
        {"token": "token_id:7", "top_logprobs": [{"token": "token_id:7", "logprob": -0.5}]},
        {"token": "token_id:8", "top_logprobs": [{"token": "token_id:9", "logprob": -0.25}]},
    ]
    choice = {"message": {"content": "ab"}, "token_ids": [7, 8], "logprobs": {"content": places}}
    answer = assemble([reply(prompt_token_ids=[1, 2, 3], choices=[choice])])
    assert answer == Answer("cmpl-1", 3, (7, 8), "ab", ({7: -0.5}, {9: -0.25}))


def test_a_completion_with_logprobs() -> None:
    logprobs = {"top_logprobs": [{"token_id:7": -0.5, "token_id:1": -2.0}]}
    choice = {"text": "a", "token_ids": [7], "prompt_token_ids": [1], "logprobs": logprobs}
    assert assemble([reply(choices=[choice])]).best == ({7: -0.5, 1: -2.0},)


def test_an_answer_without_token_ids_is_an_error() -> None:
    with pytest.raises(AnswerError, match="no token ids"):
        assemble([reply(choices=[{"text": "a"}])])


# --- both sides' reports


def report(**changes: object) -> TransferReport:
    fields = {"transfer_id": "t", "request_id": "cmpl-1-0-abc", "outcome": "completed", **changes}
    return msgspec.convert(fields, TransferReport)


PREFILL = report(pack_s=0.0401, wire_bytes=4_000_000, prefilled_at=100.0)
DECODE = report(
    pull_s=0.0052,
    wire_bytes=4_000_000,
    segments=32,
    landed_at=100.25,
    bank_fill=[(0, bank, 500_000) for bank in range(8)],
)


def test_a_report_is_found_by_the_answers_id_and_no_other() -> None:
    ten, one = report(request_id="cmpl-10-0-abc"), report(request_id="cmpl-1-0-abc")
    assert report_of([ten, one], "cmpl-1") is one
    assert report_of([ten], "cmpl-1") is None


def test_a_movement_that_both_sides_completed_has_no_problem() -> None:
    movement = Movement(PREFILL, DECODE)
    assert movement.problem == ""
    assert movement.handover_s == 0.25


@pytest.mark.parametrize(
    ("movement", "problem"),
    [
        (Movement(PREFILL, None), "the decode side reports no transfer"),
        (Movement(None, DECODE), "the prefill side reports no transfer"),
        (Movement(PREFILL, report(outcome="failed", reason="cut")), "the decode side reports its transfer failed: cut"),
        (Movement(report(outcome="expired"), DECODE), "the prefill side reports its transfer expired"),
        (Movement(report(transfer_id="u"), DECODE), "different transfers"),
        (Movement(PREFILL, report(segments=0)), "read no bytes"),
    ],
)
def test_anything_else_is_a_problem(movement: Movement, problem: str) -> None:
    assert problem in movement.problem


# --- table and summary


def row(answer: Sequence[int] = (5, 6), movement: Movement = Movement(PREFILL, DECODE), equal: bool = True) -> Row:
    best = [{5: -0.1, 9: -0.10001}, {6: -0.1}]
    text = Answer("cmpl-1", 64, tuple(answer), " one\ntwo")
    prompt = Prompt(content={"prompt": [1]}, streamed=True)
    return Row(prompt, text, compare([5, 6], best, answer), movement, must_equal=equal)


def shown(phase: Phase, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(phase_table(phase))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_rows_figures() -> None:
    line = next(line for line in shown(Phase("float32", (row(),), ())).splitlines() if "text stream" in line)
    # tokens, sent as, answer begins, equal, MB, segments, kB each, pack, pull, hand-over, per bank
    assert " ".join(line.split()) == "64 text stream one⏎two yes 4.0 32 125 40 5 250 ████████ 0.50"


@pytest.mark.parametrize("equal", [True, False])
def test_the_table_fits_a_hundred_columns_with_the_longest_cells(equal: bool) -> None:
    big = msgspec.structs.replace(
        DECODE,
        wire_bytes=138_600_000,
        segments=99_999,
        pull_s=12.345,
        landed_at=112.345,
        bank_fill=tuple((0, bank, 17_000_000 + bank) for bank in range(8)),
    )
    long = row([9, 1], movement=Movement(PREFILL, big), equal=equal)
    long = replace(long, answer=replace(long.answer, text="word " * 40, prompt_tokens=3000))
    lines = shown(Phase("float32", (long,), ())).splitlines()
    cells = ["3000", "138.6", "99999", "12345", "████████ 17.00", "tie at 0" if equal else "0/2"]
    assert any(all(cell in line for cell in cells) for line in lines)


def test_what_is_a_tie_and_what_is_not() -> None:
    phase = Phase("float32", (row(), row([9, 1]), row([5, 7])), ())
    text = shown(phase)
    assert "tie at 0" in text and "NO at 1" in text
    assert tie_lines(phase) == [
        "prompt 2: tie at token 0: the one instance's two best tokens there lie within 0.0001, "
        "so what follows may differ"
    ]
    assert phase.problems == [
        "float32, prompt 3 (64 tokens, text stream): differs from one instance at token 1 and it is no tie"
    ]


def test_pools_of_fewer_bits_may_differ_but_not_be_left_out() -> None:
    phase = Phase("bfp8", (row([5, 7], equal=False), row(movement=Movement(PREFILL, None), equal=False)), ())
    assert phase.problems == ["bfp8, prompt 2 (64 tokens, text stream): the decode side reports no transfer for it"]


def test_what_is_still_held_is_a_problem() -> None:
    phase = Phase("float32", (row(),), ("prefill: 2 leases",))
    assert phase.problems == ["float32: still held when idle: prefill: 2 leases"]
    assert "NOT everything was released" in summary([phase], 1.0)


def test_the_summary() -> None:
    phases = [Phase("float32", (row(), row([9, 1])), ()), Phase("bfp8", (row([5, 7], equal=False),), ())]
    assert summary(phases, 231.4) == (
        "2/2 equal to one instance (1 from a tie on not compared); bfp8: 1 of 2 tokens the same; "
        "12.0 MB moved in 96 segments of 125.0 kB; nothing held at the end; 231 s"
    )


def test_the_figures_as_json() -> None:
    data = json.loads(as_json([Phase("float32", (row([5, 7]),), ())], 12.34))
    assert data["seconds"] == 12.3
    assert len(data["problems"]) == 1
    (prompt,) = data["phases"][0]["prompts"]
    assert prompt["decode"]["wire_bytes"] == 4_000_000
    assert prompt["agreement"] == {"total": 2, "same": 1, "first_difference": 1, "tie": False}


def test_banks_that_differ_show_it() -> None:
    assert bank_fill(report(bank_fill=[(0, 0, 8_000_000), (0, 1, 4_000_000), (0, 3, 1)])) == "█▄ ▁ 0.00-8.00"


# --- the deployment


def test_the_bundled_deployment_is_the_one_in_configs() -> None:
    assert bundled_config() == deployment.load(SIMULATED)


def test_only_the_pools_element_type_changes() -> None:
    config = bundled_config()
    for kv_dtype in KV_DTYPES:
        changed = with_pools(config, kv_dtype)
        assert changed.decode.npu is not None and config.decode.npu is not None
        assert changed.decode.npu.config == {**config.decode.npu.config, "kv_dtype": kv_dtype}
        assert msgspec.structs.replace(changed, decode=config.decode) == config


# --- the supervisor


def waits(seconds: float) -> bool:
    return False


def test_an_error_names_its_step_and_the_logs(tmp_path: Path) -> None:
    def work() -> None:
        raise PeerError("no answer from http://127.0.0.1:1/x")

    with Supervisor(waits, tmp_path) as supervisor, pytest.raises(DemoError) as caught:
        supervisor.call("prompt 3 of 20", work)
    assert str(caught.value) == f"prompt 3 of 20: no answer from http://127.0.0.1:1/x. The logs are in {tmp_path}."


def test_a_request_to_stop_ends_the_call_at_hand(tmp_path: Path) -> None:
    with Supervisor(lambda seconds: True, tmp_path) as supervisor, pytest.raises(StopRequested):
        supervisor.call("a wait", lambda: supervisor.pause_call(60.0))


def test_a_death_ends_the_call_at_hand(tmp_path: Path) -> None:
    spec = ProcessSpec("decode", ("sh", "-c", "echo no memory left; exit 3"))
    with Supervisor(waits, tmp_path) as supervisor, Deployment([[spec]], tmp_path) as servers:
        servers.start()
        supervisor.watch([servers])
        with pytest.raises(DeploymentError, match=r"(?s)prompt 3: decode ended with code 3.*no memory left"):
            supervisor.call("prompt 3", lambda: supervisor.pause_call(60.0))
            supervisor.call("prompt 3", lambda: supervisor.pause_call(60.0))
