"""The client against servers that are functions: what it sends, when it looks at the clock, what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from hawk_connector.cli.demo_client import AnswerError
from hawk_connector.cli.handover.client import Client

PREFILL, DECODE = "http://prefill", "http://decode"
PARAMS = {"remote_engine_id": "e", "hawk": {"transfer": "t"}}
Handler = Callable[[httpx.Request], httpx.Response]


class Server:
    """Answers as a pair of vLLM servers does, and moves the clock: 2 s for a prompt, 3 s to the first token of decode,
    then 0.5 s a token.  Keeps what it was sent."""

    def __init__(self, params: Any = PARAMS, tokens: tuple[int, ...] = (5, 6, 7), empty_events: bool = False) -> None:
        self.now = 100.0
        self.requests: list[tuple[str, dict[str, Any], str]] = []
        self._params = params
        self._tokens = tokens
        self._empty = empty_events

    def clock(self) -> float:
        return self.now

    def __call__(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        self.requests.append((request.url.host, body, request.headers.get("X-Request-Id", "")))
        if body.get("stream"):
            return httpx.Response(200, stream=Stream(self))
        self.now += 2.0
        answer = {"id": "cmpl-1", "choices": [{"token_ids": [5]}], "kv_transfer_params": self._params}
        return httpx.Response(200, json=answer)

    def events(self) -> Iterator[bytes]:
        if self._empty:
            self.now += 1.0
            yield self._event([])
        self.now += 3.0
        for token in self._tokens:
            yield self._event([token])
            self.now += 0.5
        yield b"data: [DONE]\n\n"

    def _event(self, tokens: list[int]) -> bytes:
        return f"data: {json.dumps({'id': 'cmpl-1', 'choices': [{'token_ids': tokens}]})}\n\n".encode()


class Stream(httpx.SyncByteStream):
    def __init__(self, server: Server) -> None:
        self._server = server

    def __iter__(self) -> Iterator[bytes]:
        return self._server.events()


def client(server: Server | Handler, urls: tuple[str, ...], clock: Callable[[], float], new_tokens: int = 3) -> Client:
    return Client(httpx.Client(transport=httpx.MockTransport(server)), urls, new_tokens, clock)


def test_a_hand_over_is_from_the_answer_to_the_first_token() -> None:
    server = Server()
    sample = client(server, (PREFILL, DECODE), server.clock).request([1, 2, 3], "name")
    assert (sample.sent, sample.answered, sample.arrived) == (100.0, 102.0, (105.0, 105.5, 106.0))
    assert (sample.handover_s, sample.prefill_s, sample.steps_s) == (3.0, 2.0, [0.5, 0.5])
    assert sample.tokens == (5, 6, 7)


def test_both_legs_are_a_routers() -> None:
    server = Server()
    client(server, (PREFILL, DECODE), server.clock).request([1, 2, 3], "name")
    (first, first_body, first_id), (second, second_body, second_id) = server.requests
    assert (first, second, first_id, second_id) == ("prefill", "decode", "name", "name")
    assert (first_body["max_tokens"], second_body["max_tokens"]) == (1, 3)
    assert first_body["kv_transfer_params"]["do_remote_decode"] is True
    assert "stream" not in first_body and second_body["stream"] is True
    # What prefill answered goes on as it is, and nothing else differs.
    assert second_body["kv_transfer_params"] == PARAMS
    differ = {"max_tokens", "kv_transfer_params", "stream"}
    assert {k: v for k, v in first_body.items() if k not in differ} == {
        k: v for k, v in second_body.items() if k not in differ
    }
    assert first_body["prompt"] == [1, 2, 3] and first_body["temperature"] == 0


def test_of_one_instance_it_is_from_the_first_token_to_the_second() -> None:
    server = Server()
    sample = client(server, (PREFILL,), server.clock).request([1, 2, 3], "name")
    assert (sample.answered, sample.arrived) == (103.0, (103.5, 104.0))
    assert (sample.handover_s, sample.prefill_s, sample.steps_s) == (0.5, 3.0, [0.5])
    assert sample.tokens == (5, 6, 7)
    assert len(server.requests) == 1


def test_an_event_without_a_token_is_no_token() -> None:
    server = Server(empty_events=True)
    sample = client(server, (PREFILL, DECODE), server.clock).request([1], "name")
    assert sample.arrived == (106.0, 106.5, 107.0)


def test_an_answer_without_parameters_is_no_hand_over() -> None:
    server = Server(params=None)
    with pytest.raises(AnswerError, match="without kv_transfer_params"):
        client(server, (PREFILL, DECODE), server.clock).request([1], "name")
    assert len(server.requests) == 1


def test_too_few_tokens_are_refused() -> None:
    server = Server(tokens=(5, 6))
    with pytest.raises(AnswerError, match="http://decode: expected 3 tokens, got 2"):
        client(server, (PREFILL, DECODE), server.clock).request([1], "name")


@pytest.mark.parametrize("streamed", [False, True])
def test_an_error_of_a_server_names_it(streamed: bool) -> None:
    def refuses(request: httpx.Request) -> httpx.Response:
        wanted = bool(json.loads(request.content).get("stream"))
        return httpx.Response(500, text="no room") if wanted == streamed else server(request)

    server = Server()
    who = DECODE if streamed else PREFILL
    with pytest.raises(AnswerError, match=f"{who} answered 500: no room"):
        client(refuses, (PREFILL, DECODE), server.clock).request([1], "name")


@pytest.mark.parametrize("text", ["{", '{"id": 1}', '{"id": "x", "choices": [{"token_ids": ["a"]}]}'])
def test_what_is_no_answer_is_quoted(text: str) -> None:
    with pytest.raises(AnswerError, match="expected an OpenAI-shaped answer") as raised:
        client(lambda _: httpx.Response(200, text=text), (PREFILL, DECODE), lambda: 0.0).request([1], "name")
    assert text in str(raised.value)


def test_a_server_that_is_gone_is_named() -> None:
    def gone(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    with pytest.raises(AnswerError, match="no answer from http://prefill: refused"):
        client(gone, (PREFILL, DECODE), lambda: 0.0).request([1], "name")


def test_the_right_answer_comes_with_the_best_of_each_place() -> None:
    def best(request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        assert body["logprobs"] and body["return_tokens_as_token_ids"]
        places = [{"token_id:5": -0.1, "token_id:9": -2.5}, {"token_id:6": -0.2}]
        choice = {"token_ids": [5, 6], "logprobs": {"top_logprobs": places}}
        return httpx.Response(200, json={"id": "x", "choices": [choice]})

    assert client(best, (PREFILL,), lambda: 0.0, 2).best([1]) == ((5, 6), [{5: -0.1, 9: -2.5}, {6: -0.2}])
