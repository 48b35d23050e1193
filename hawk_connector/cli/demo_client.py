"""The demo as a client: OpenAI-shaped requests, whole and streamed, with the token ids of the answers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx
import msgspec

from hawk_connector.cli.demo_prompts import NEW_TOKENS, Prompt
from hawk_connector.errors import PeerError

# How long a server may be silent. The longest prompt is some ten seconds of work, on a busy machine more.
TIMEOUT_S = 180.0
_BEST = 5  # how many of the best tokens a reference names at each place
_QUOTED = 600

T = TypeVar("T")


class AnswerError(PeerError):
    """A server answered with an error, with something else than an answer, or not at all."""


@dataclass(frozen=True, slots=True)
class Answer:
    """``id``: the server's name for the request. ``best``: the best tokens of each place, where asked for."""

    id: str
    prompt_tokens: int
    tokens: tuple[int, ...]
    text: str
    best: tuple[Mapping[int, float], ...] = ()


class _Top(msgspec.Struct):
    token: str
    logprob: float


class _Place(msgspec.Struct):
    top_logprobs: list[_Top]


class _Logprobs(msgspec.Struct):
    top_logprobs: list[dict[str, float] | None] | None = None  # of completions
    content: list[_Place] | None = None  # of chats


class _Message(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    text: str = ""
    message: _Message | None = None
    delta: _Message | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None


class _Reply(msgspec.Struct):
    id: str
    choices: list[_Choice]
    prompt_token_ids: list[int] | None = None


class _Tokens(msgspec.Struct):
    tokens: list[int]


class DemoClient:
    """Asks one server (or router) at ``base_url`` for the model called ``model``."""

    def __init__(self, client: httpx.Client, base_url: str, model: str) -> None:
        self._client = client
        self._base_url = base_url
        self._model = model

    def tokenise(self, text: str) -> list[int]:
        """The model's token ids of ``text``, without special tokens. Raises AnswerError."""
        body = {"model": self._model, "prompt": text, "add_special_tokens": False}
        return _parse(self._post("/tokenize", body), _Tokens).tokens

    def ask(self, prompt: Prompt, *, salt: str, streamed: bool | None = None, with_best: bool = False) -> Answer:
        """A greedy answer of NEW_TOKENS tokens. Raises AnswerError.

        ``salt`` keeps prefix caches apart: an answer computes its own KV, whatever was asked before under
        another. ``streamed`` overrides the prompt's own way; ``with_best`` asks for logprobs too.
        """
        body: dict[str, Any] = {
            "model": self._model,
            **prompt.content,
            "max_tokens": NEW_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "cache_salt": salt,
        }
        if with_best:
            body |= {"logprobs": True, "top_logprobs": _BEST} if prompt.is_chat else {"logprobs": _BEST}
            body["return_tokens_as_token_ids"] = True  # texts of tokens are not unique
        path = "/v1/chat/completions" if prompt.is_chat else "/v1/completions"
        if prompt.streamed if streamed is None else streamed:
            replies = list(self._stream(path, {**body, "stream": True}))
        else:
            replies = [_parse(self._post(path, body), _Reply)]
        answer = assemble(replies)
        if prompt.tokens is not None and answer.prompt_tokens != prompt.tokens:
            text = f"a prompt of {prompt.tokens} tokens was sent, the server answered one of {answer.prompt_tokens}"
            raise AnswerError(text)
        return answer

    def _post(self, path: str, body: Mapping[str, Any]) -> bytes:
        try:
            response = self._client.post(self._base_url + path, json=body)
        except httpx.HTTPError as error:
            raise self._unanswered(path, error) from error
        self._check(path, response)
        return response.content

    def _stream(self, path: str, body: Mapping[str, Any]) -> Iterator[_Reply]:
        try:
            with self._client.stream("POST", self._base_url + path, json=body) as response:
                if response.status_code != 200:
                    response.read()
                self._check(path, response)
                for event in events(response.iter_lines()):
                    yield _parse(event.encode(), _Reply)
        except httpx.HTTPError as error:
            raise self._unanswered(path, error) from error

    def _check(self, path: str, response: httpx.Response) -> None:
        if response.status_code != 200:
            text = f"{self._base_url}{path} answered {response.status_code}: {response.text[:_QUOTED]}"
            raise AnswerError(text)

    def _unanswered(self, path: str, error: httpx.HTTPError) -> AnswerError:
        return AnswerError(f"no answer from {self._base_url}{path}: {error or type(error).__name__}")


def events(lines: Iterable[str]) -> Iterator[str]:
    """The data of server-sent events, without the closing [DONE]; AnswerError where that does not come."""
    for line in lines:
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        yield data
    raise AnswerError("the stream ended before its [DONE]")


def assemble(replies: Iterable[_Reply]) -> Answer:
    """The answer that a reply, or the replies of a stream in their order, hold. Raises AnswerError."""
    name, prompt_tokens = "", 0
    tokens: list[int] = []
    text: list[str] = []
    best: list[Mapping[int, float]] = []
    for reply in replies:
        name = reply.id
        prompt_tokens = max(prompt_tokens, len(reply.prompt_token_ids or ()))
        for choice in reply.choices:
            prompt_tokens = max(prompt_tokens, len(choice.prompt_token_ids or ()))
            tokens += choice.token_ids or ()
            message = choice.message or choice.delta
            text.append((message.content or "") if message is not None else choice.text)
            if choice.logprobs is not None:
                best += _best(choice.logprobs)
    if not tokens or not prompt_tokens:
        raise AnswerError("the answer holds no token ids, though return_token_ids was asked for")
    return Answer(name, prompt_tokens, tuple(tokens), "".join(text), tuple(best))


def _best(logprobs: _Logprobs) -> list[dict[int, float]]:
    if logprobs.content is not None:
        places = [{top.token: top.logprob for top in place.top_logprobs} for place in logprobs.content]
    else:
        places = [place or {} for place in logprobs.top_logprobs or ()]
    return [{_token_id(token): logprob for token, logprob in place.items()} for place in places]


def _token_id(token: str) -> int:
    """5 for "token_id:5", which is what return_tokens_as_token_ids makes of a token."""
    try:
        return int(token.removeprefix("token_id:"))
    except ValueError:
        raise AnswerError(f"expected logprobs by token_id:NUMBER, got {token!r}") from None


def _parse(data: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.MsgspecError as error:
        text = data[:_QUOTED].decode(errors="replace")
        raise AnswerError(f"expected an OpenAI-shaped answer ({error}), got: {text}") from error
