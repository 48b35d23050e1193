"""What a client can send: every answer is the one that a single instance gives, and nothing is left behind."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import prompt
from tests.e2e.harness import REMOTE_DECODE, Engine, decode_engine, prefill_engine

pytestmark = pytest.mark.e2e

LENGTHS = (1, 2, 31, 63, 64, 65, 127, 128, 129, 300, 513)


@pytest.fixture(scope="module")
def sides(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Engine, Engine]]:
    """Prefix caching on both sides, prefill in chunks of 192 tokens, parcels of 128, a buffer of some parcels."""
    logs = tmp_path_factory.mktemp("requests")
    with ExitStack() as stack:
        prefill = prefill_engine(
            tiny,
            logs / "prefill.log",
            {"parcel_tokens": 128, "send_buffer_bytes": 6 << 20, "lease_s": 12.0, "buffer_wait_s": 20.0},
            enable_prefix_caching=True,
            max_num_batched_tokens=192,
        )
        decode = decode_engine(tiny, logs / "decode.log", enable_prefix_caching=True)
        for engine in (prefill, decode):
            stack.callback(engine.stop)
            engine.start()
        yield prefill.wait_ready(), decode.wait_ready()


def tokens(outputs: list[dict[str, Any]]) -> list[list[list[int]]]:
    return [output["tokens"] for output in outputs]


def through_hawk(sides: tuple[Engine, Engine], prompts: list[list[int]], **more: Any) -> list[dict[str, Any]]:
    prefill, decode = sides
    sent = prefill.generate(prompts, [REMOTE_DECODE] * len(prompts), max_tokens=1)
    return decode.generate(prompts, [s["params"] for s in sent], **more)


def completed(decode: Engine) -> list[dict[str, Any]]:
    return [r for r in decode.call("reports")["reports"] if r["outcome"] == "completed"]


def test_every_length_equals_one_instance(sides: tuple[Engine, Engine]) -> None:
    prefill, decode = sides
    prompts = [prompt(n, seed=1) for n in LENGTHS]
    reference = prefill.generate(prompts)
    before = len(completed(decode))
    assert tokens(through_hawk(sides, prompts)) == tokens(reference)
    # All of them came over HAWK, the prompt of one token too.
    assert sorted(r["tokens"] for r in completed(decode)[before:]) == sorted(LENGTHS)


def test_a_prefix_that_decode_has_is_not_read_again(sides: tuple[Engine, Engine]) -> None:
    prefill, decode = sides
    start = prompt(200, seed=2)
    prompts = [start, start + prompt(100, seed=3)]
    reference = prefill.generate(prompts)
    answers = [through_hawk(sides, [p])[0] for p in prompts]
    assert tokens(answers) == tokens(reference)
    first, second = completed(decode)[-2:]
    layout = decode.call("geometry")["layout"]
    block = layout["layers"] * 2 * 4 * 2 * 2 * 4096  # K and V, 4 heads, 2 x 2 tiles of 4096 bytes
    assert first["wire_bytes"] == 4 * block
    # 300 tokens are 5 blocks, of which decode's prefix cache holds the first 3.
    assert (second["blocks"], second["wire_bytes"]) == (2, 2 * block)


def test_one_dict_for_a_list_of_prompts(sides: tuple[Engine, Engine]) -> None:
    """Routers hand the first answer's dict to every element of a list prompt: rule 9."""
    prefill, decode = sides
    one, two, three = prompt(90, seed=4), prompt(90, seed=5), prompt(140, seed=6)
    prompts = [one, two, one, three, two]
    reference = prefill.generate(prompts)
    sent = prefill.generate(prompts, [REMOTE_DECODE] * 5, max_tokens=1)
    for position in (0, 1, 4):
        decode.call("reset_prefix_cache")
        assert tokens(decode.generate(prompts, [sent[position]["params"]] * 5)) == tokens(reference)


def test_several_answers_to_one_prompt(sides: tuple[Engine, Engine]) -> None:
    prefill, decode = sides
    ids = prompt(150, seed=7)
    sent = prefill.generate([ids], [REMOTE_DECODE], max_tokens=1)[0]
    answer = decode.generate([ids], [sent["params"]], n=2)[0]
    reference = prefill.generate([ids], n=2)[0]
    assert len(answer["tokens"]) == 2
    assert answer["tokens"] == reference["tokens"]


def damaged(params: dict[str, Any]) -> list[dict[str, Any]]:
    """Dicts that a broken router or a hostile client could send in place of ``params``."""

    def edit(change: Any) -> dict[str, Any]:
        edited = copy.deepcopy(params)
        change(edited)
        return edited

    return [
        {},
        {"do_remote_prefill": True},
        edit(lambda p: p.update(hawk=None)),
        edit(lambda p: p["hawk"].update(tokens="many")),
        edit(lambda p: p["hawk"].update(transfer="../../etc")),
        edit(lambda p: p["hawk"].update(transfer="0" * 32)),
        edit(lambda p: p["hawk"].update(ranks=[])),
        edit(lambda p: p["hawk"].update(ranks=[{"address": "192.0.2.1:80", "epoch": "0" * 32}])),
        edit(lambda p: p["hawk"]["ranks"][0].update(epoch="0" * 32)),
        edit(lambda p: p["hawk"].update(v=99)),
        edit(lambda p: p["hawk"].update(extra=1)),
        edit(lambda p: p["hawk"].update(tokens=1 << 23)),
    ]


def test_damaged_parameters_cost_nothing_but_time(sides: tuple[Engine, Engine]) -> None:
    prefill, decode = sides
    ids = prompt(77, seed=8)
    reference = tokens(prefill.generate([ids]))
    sent = prefill.generate([ids], [REMOTE_DECODE], max_tokens=1)[0]
    for params in damaged(sent["params"]):
        decode.call("reset_prefix_cache")
        assert tokens(decode.generate([ids], [params])) == reference, params


def test_another_prompts_parameters(sides: tuple[Engine, Engine]) -> None:
    prefill, decode = sides
    mine, other = prompt(120, seed=9), prompt(120, seed=10)
    sent = prefill.generate([other], [REMOTE_DECODE], max_tokens=1)[0]
    assert tokens(decode.generate([mine], [sent["params"]])) == tokens(prefill.generate([mine]))
    # Its right owner can still have it.
    before = len(completed(decode))
    assert tokens(decode.generate([other], [sent["params"]])) == tokens(prefill.generate([other]))
    assert len(completed(decode)) == before + 1


def test_a_crowd_leaves_nothing_behind(sides: tuple[Engine, Engine]) -> None:
    """32 requests, 8 at a time on either side, through a buffer that holds some parcels only."""
    prefill, decode = sides
    prompts = [prompt(20 + 13 * i % 400, seed=20 + i) for i in range(32)]
    reference = prefill.generate(prompts)
    answers = []
    for first in range(0, 32, 8):
        answers += through_hawk(sides, prompts[first : first + 8])
    assert tokens(answers) == tokens(reference)
    assert not any(prefill.wait_idle().values())
    assert not any(decode.wait_idle().values())
