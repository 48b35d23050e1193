"""The run: which requests are sent and compared, against servers that are functions; and once with real ones."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from hawk_connector.cli.handover.options import SYSTEMS, HandoverOptions
from hawk_connector.cli.handover.run import WrongAnswer, _Book, _Group
from hawk_connector.cli.handover.servers import pair
from hawk_connector.cli.processes import Death, DeploymentError, StopRequested
from tests.models.tiny import TinyLlama

OPTIONS = HandoverOptions(("nixl",), (1, 2), 3, 8, 4, "model", idle_s=0.1)
MEMBERS = ("aggregated", "nixl")


class Servers:
    """One instance and a pair behind one transport.  The right answer to a prompt is its last tokens, backwards.

    ``answer`` changes what the pair's decode server says to a prompt.
    """

    def __init__(self, answer: Callable[[list[int]], list[int]] | None = None) -> None:
        self.members = [pair(SYSTEMS[name], OPTIONS, "/model") for name in MEMBERS]
        self.asked: list[tuple[str, tuple[int, ...], bool]] = []
        self._names = {member.urls[-1]: member.system.name for member in self.members}
        self._names[self.members[1].urls[0]] = "prefill"
        self._answer = answer
        self._lock = threading.Lock()

    def __call__(self, request: httpx.Request) -> httpx.Response:
        who = self._names[f"http://{request.url.host}:{request.url.port}"]
        body = json.loads(request.content)
        if request.url.path == "/tokenize":
            return httpx.Response(200, json={"tokens": [1 + len(word) for word in body["prompt"].split()]})
        prompt = body["prompt"]
        with self._lock:
            self.asked.append((who, tuple(prompt), "logprobs" in body))
        tokens = prompt[: -OPTIONS.new_tokens - 1 : -1]
        if who == "nixl" and self._answer is not None:
            tokens = self._answer(tokens)
        if body.get("stream"):
            lines = [json.dumps({"id": "x", "choices": [{"token_ids": [token]}]}) for token in tokens] + ["[DONE]"]
            return httpx.Response(200, text="".join(f"data: {line}\n\n" for line in lines))
        # 77 is as likely as the right token, 78 is not.
        places = [{f"token_id:{token}": -0.5, "token_id:77": -0.50001, "token_id:78": -0.6} for token in tokens]
        choice = {"token_ids": tokens, "logprobs": {"top_logprobs": places}}
        return httpx.Response(200, json={"id": "x", "choices": [choice], "kv_transfer_params": {"at": who}})


class Alive:
    """What a run asks of its deployment."""

    def __init__(self, death: Death | None = None) -> None:
        self._death = death

    def death(self) -> Death | None:
        return self._death

    def pids(self) -> dict[str, int]:
        return {}


def measured(servers: Servers, pause: Callable[[float], bool] = lambda s: False, death: Death | None = None) -> Any:
    with (
        ThreadPoolExecutor(2) as threads,
        httpx.Client(transport=httpx.MockTransport(servers)) as http,
    ):
        group = _Group(OPTIONS, servers.members, http, threads, Alive(death), pause)  # type: ignore[arg-type]
        book = _Book()
        group.prepare(book, lambda _: None, lambda _: None)
        servers.asked.clear()
        return group.measure(book, lambda _: None, lambda _: None), book


def test_every_system_gets_the_same_prompts_as_often() -> None:
    servers = Servers()
    found, book = measured(servers)
    asked = {who: Counter(prompt for name, prompt, _ in servers.asked if name == who) for who in (*MEMBERS, "prefill")}
    # Three waves of one with prompts 0 to 2, then two of two with 0 to 3; not the fifth, which is not counted.
    expected = Counter({book.prompts[0]: 2, book.prompts[1]: 2, book.prompts[2]: 2, book.prompts[3]: 1})
    assert len(book.prompts) == 5
    assert asked == {"aggregated": expected, "nixl": expected, "prefill": expected}
    assert [(each.system.name, each.concurrency, len(each.samples), each.equal, each.ties) for each in found] == [
        ("aggregated", 1, 3, 3, 0),
        ("nixl", 1, 3, 3, 0),
        ("aggregated", 2, 4, 4, 0),
        ("nixl", 2, 4, 4, 0),
    ]
    assert all(each.beside == MEMBERS for each in found)


def test_logprobs_are_asked_for_only_before_anything_is_measured() -> None:
    servers = Servers()
    measured(servers)
    assert not any(with_best for _, _, with_best in servers.asked)


def test_a_wrong_answer_ends_the_run() -> None:
    with pytest.raises(WrongAnswer, match=r"nixl answered prompt 4 wrongly: .* differ from token 1 on"):
        measured(Servers(lambda tokens: [tokens[0], 78, *tokens[2:]]))


def test_an_answer_that_leaves_at_a_tie_is_counted_apart() -> None:
    found, _ = measured(Servers(lambda tokens: [tokens[0], 77, *tokens[2:]]))
    assert {(each.system.name, each.equal, each.ties) for each in found} == {
        ("aggregated", 3, 0),
        ("aggregated", 4, 0),
        ("nixl", 0, 3),
        ("nixl", 0, 4),
    }


def test_a_user_who_stops_is_heard() -> None:
    with pytest.raises(StopRequested):
        measured(Servers(), pause=lambda seconds: True)


def test_a_server_that_died_is_named_rather_than_its_connection(tmp_path: Path) -> None:
    def gone(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/tokenize" or "logprobs" in json.loads(request.content):
            return servers(request)
        raise httpx.ReadError("connection reset")

    servers = Servers()
    with ThreadPoolExecutor(2) as threads, httpx.Client(transport=httpx.MockTransport(gone)) as http:
        death = Death("nixl-decode", -9, tmp_path / "nixl-decode.log")
        group = _Group(OPTIONS, servers.members, http, threads, Alive(death), lambda s: False)  # type: ignore[arg-type]
        with pytest.raises(DeploymentError, match="nixl-decode was killed by SIGKILL"):
            group.prepare(_Book(), lambda _: None, lambda _: None)


# --- real servers


@pytest.fixture(scope="module")
def run(model_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    directory = tmp_path_factory.mktemp("handover")
    hawk = str(Path(sys.executable).with_name("hawk"))
    options = ["--quick", "--systems", "direct,hawk", "--concurrency", "1,2"]
    files = ["--json", str(directory / "run.json"), "--plot", str(directory / "run.png"), "--logs", str(directory)]
    model = str(TinyLlama().directory(model_cache))
    done = subprocess.run(
        [hawk, "bench", "handover", *options, *files, "--model", model], capture_output=True, text=True, timeout=540
    )
    assert done.returncode == 0, done.stderr
    yield {**msgspec.json.decode((directory / "run.json").read_bytes()), "printed": done.stdout}
    assert (directory / "run.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.e2e
def test_real_servers_answer_as_one_instance_and_have_their_row(run: dict[str, Any]) -> None:
    rows = {(row["system"], row["concurrency"]): row for row in run["rows"]}
    assert set(rows) == {(name, count) for name in ("aggregated", "direct", "hawk") for count in (1, 2)}
    for (name, _), row in rows.items():
        assert row["n"] == len(row["handover_ms"]) == row["equal"] + row["ties"] == 4
        assert 0 < row["min_ms"] <= row["p50_ms"] <= row["p90_ms"] <= row["max_ms"]
        assert set(row["idle_cpu"]) == ({"aggregated"} if name == "aggregated" else {"prefill", "decode"})
        assert name in run["printed"]


@pytest.mark.e2e
def test_real_pairs_report_what_they_moved(run: dict[str, Any]) -> None:
    parts = {row["system"]: row["parts"] for row in run["rows"] if row["concurrency"] == 1}
    assert parts["aggregated"] == {}
    for name in ("direct", "hawk"):
        assert {"pull", "land", "until_landed", "from_landed"} <= set(parts[name])
        assert parts[name]["pull"] > 0 and parts[name]["from_landed"] > 0
    assert parts["hawk"]["pack"] > 0  # direct packs nothing
