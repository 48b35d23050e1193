"""A client that sends both legs of a request itself, as a router would, and notes when what comes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import msgspec

from hawk_connector.cli.demo_client import TIMEOUT_S, AnswerError, events

from .servers import MODEL_NAME

__all__ = ["Client", "Sample", "http_client"]

_QUOTED = 600
_BEST = 5
# What routers for NIXL send with the first leg; HAWK speaks the same.
_FIRST_LEG = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


@dataclass(frozen=True, slots=True)
class Sample:
    """One request.  Times in seconds by ``clock``: when it was sent, when the prefill side had answered (of one
    instance: when the first token came), and when each token of the decode side came (of one instance: from the second
    token on).  ``answered_at``, ``first_at``: Unix times of the hand-over's two ends.
    """

    id: str
    sent: float
    answered: float
    arrived: tuple[float, ...]
    tokens: tuple[int, ...]
    answered_at: float
    first_at: float

    @property
    def handover_s(self) -> float:
        """From the prefill side's answer to the first token of decode."""
        return self.arrived[0] - self.answered

    @property
    def prefill_s(self) -> float:
        return self.answered - self.sent

    @property
    def steps_s(self) -> list[float]:
        """Between neighbouring tokens, after the first of decode."""
        return [after - before for before, after in zip(self.arrived, self.arrived[1:], strict=False)]


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None


class _Answer(msgspec.Struct):
    id: str
    choices: list[_Choice]
    kv_transfer_params: dict[str, Any] | None = None


class _BestLogprobs(msgspec.Struct):
    top_logprobs: list[dict[str, float]]


class _BestChoice(msgspec.Struct):
    token_ids: list[int]
    logprobs: _BestLogprobs


class _BestAnswer(msgspec.Struct):
    choices: list[_BestChoice]


class Client:
    """Speaks to the servers of one system; any thread's.  Every method raises AnswerError."""

    def __init__(
        self, http: httpx.Client, urls: Sequence[str], new_tokens: int, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._http = http
        self._urls = tuple(urls)
        self._new_tokens = new_tokens
        self._clock = clock

    def request(self, prompt: Sequence[int], name: str) -> Sample:
        """One greedy answer to ``prompt``; both legs carry ``name``, so both sides report it alike."""
        sent = self._clock()
        if len(self._urls) == 1:
            return self._whole(prompt, name, sent)
        first = self._answer(
            self._urls[0], self._body(prompt, 1) | {"kv_transfer_params": dict(_FIRST_LEG)}, {"X-Request-Id": name}
        )
        answered, answered_at = self._clock(), time.time()
        if not first.kv_transfer_params:
            raise AnswerError(f"{self._urls[0]} answered without kv_transfer_params: nothing to hand over")
        body = self._body(prompt, self._new_tokens) | {"kv_transfer_params": first.kv_transfer_params}
        arrived, tokens, first_at = self._stream(self._urls[1], body, name)
        return Sample(name, sent, answered, tuple(arrived), tuple(tokens), answered_at, first_at[0])

    def best(self, prompt: Sequence[int]) -> tuple[tuple[int, ...], list[dict[int, float]]]:
        """The last server's answer, and the best tokens with their logprobs of each of its places."""
        body = self._body(prompt, self._new_tokens) | {"logprobs": _BEST, "return_tokens_as_token_ids": True}
        content = self._post(self._urls[-1], body, {})
        choice = _decoded(content, _BestAnswer).choices[0]
        best = [
            {int(token.removeprefix("token_id:")): logprob for token, logprob in place.items()}
            for place in choice.logprobs.top_logprobs
        ]
        return tuple(choice.token_ids), best

    def _whole(self, prompt: Sequence[int], name: str, sent: float) -> Sample:
        arrived, tokens, at = self._stream(self._urls[0], self._body(prompt, self._new_tokens), name)
        if len(arrived) < 2:
            raise AnswerError(f"{self._urls[0]} sent {len(arrived)} events, at least 2 are needed")
        return Sample(name, sent, arrived[0], tuple(arrived[1:]), tuple(tokens), at[0], at[1])

    def _body(self, prompt: Sequence[int], tokens: int) -> dict[str, Any]:
        return {
            "model": MODEL_NAME,
            "prompt": list(prompt),
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }

    def _stream(self, url: str, body: Mapping[str, Any], name: str) -> tuple[list[float], list[int], list[float]]:
        """(times, token ids, Unix times) of the streamed events that hold tokens."""
        arrived: list[float] = []
        at: list[float] = []
        raw: list[str] = []
        try:
            with self._http.stream(
                "POST", f"{url}/v1/completions", json={**body, "stream": True}, headers={"X-Request-Id": name}
            ) as response:
                if response.status_code != 200:
                    raise _refused(url, response.status_code, response.read().decode(errors="replace"))
                for event in events(response.iter_lines()):
                    arrived.append(self._clock())
                    at.append(time.time())
                    raw.append(event)
        except httpx.HTTPError as error:
            raise _silent(url, error) from error
        tokens: list[int] = []
        kept = []
        for place, event in enumerate(raw):
            found = [token for choice in _decoded(event.encode(), _Answer).choices for token in choice.token_ids or ()]
            tokens += found
            if found:
                kept.append(place)
        if len(tokens) != self._new_tokens:
            raise AnswerError(f"{url}: expected {self._new_tokens} tokens, got {len(tokens)}")
        return [arrived[place] for place in kept], tokens, [at[place] for place in kept]

    def _answer(self, url: str, body: Mapping[str, Any], headers: Mapping[str, str]) -> _Answer:
        return _decoded(self._post(url, body, headers), _Answer)

    def _post(self, url: str, body: Mapping[str, Any], headers: Mapping[str, str]) -> bytes:
        try:
            response = self._http.post(f"{url}/v1/completions", json=dict(body), headers=dict(headers))
        except httpx.HTTPError as error:
            raise _silent(url, error) from error
        if response.status_code != 200:
            raise _refused(url, response.status_code, response.text)
        return response.content


def http_client() -> httpx.Client:
    """One that keeps its connections between rounds."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=600)
    return httpx.Client(timeout=TIMEOUT_S, trust_env=False, limits=limits)


def _decoded(content: bytes, kind: type[Any]) -> Any:
    try:
        return msgspec.json.decode(content, type=kind)
    except msgspec.MsgspecError as error:
        text = content[:_QUOTED].decode(errors="replace")
        raise AnswerError(f"expected an OpenAI-shaped answer ({error}), got: {text}") from error


def _refused(url: str, status: int, text: str) -> AnswerError:
    return AnswerError(f"{url} answered {status}: {text[:_QUOTED]}")


def _silent(url: str, error: httpx.HTTPError) -> AnswerError:
    return AnswerError(f"no answer from {url}: {error or type(error).__name__}")
