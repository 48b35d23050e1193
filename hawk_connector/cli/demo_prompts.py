"""What the demo asks: prompts of exact lengths cut from a text, questions to a chat, and sentences to go on with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

from hawk_connector.errors import LocalError

TEXT_FILE = "demo_text.txt"
NEW_TOKENS = 64

# (tokens, paragraph of the text at which the prompt begins, streamed). Around the block sizes of both sides,
# and two long ones that come in several parcels. No two begin alike, so no prefix cache helps any.
_EXACT = (
    (1, 12, False),
    (63, 1, True),
    (64, 2, False),
    (65, 3, True),
    (127, 5, False),
    (128, 6, True),
    (129, 9, False),
    (1000, 13, True),
    (3000, 0, False),
)

_Tokenise = Callable[[str], Sequence[int]]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt of the demo.

    ``content``: the part of the request's body that holds it, `prompt` or `messages`. ``tokens``: its length
    where it is meant to be exact. ``in_all_pools``: asked again with pools of fewer bits.
    """

    content: dict[str, Any] = field(hash=False)
    streamed: bool
    tokens: int | None = None
    in_all_pools: bool = False

    @property
    def is_chat(self) -> bool:
        return "messages" in self.content

    @property
    def kind(self) -> str:
        """How it is sent, in the table's words."""
        return ("chat" if self.is_chat else "text") + (" stream" if self.streamed else "")

    @property
    def label(self) -> str:
        """What it is, for a line of progress."""
        return self.kind if self.tokens is None else f"{self.kind}, {self.tokens} tokens"


def demo_prompts(tokenise: _Tokenise) -> tuple[Prompt, ...]:
    """The 20 prompts. ``tokenise`` gives the model's token ids of a text, without special tokens."""
    paragraphs = read_text()
    ids = [list(tokenise(paragraph + "\n\n")) for paragraph in paragraphs]
    return (
        *(_exact(ids, tokens, first, streamed) for tokens, first, streamed in _EXACT),
        _text("The three things that every sailor must carry with him are", streamed=False),
        _text("Dear Ingrid,\n\nThank you for your letter. The winter here has been", streamed=True),
        _chat("Why is the sky blue?", streamed=False),
        _chat("Write a short poem about a harbour in the fog.", streamed=True),
        _chat("What is the difference between a list and a tuple in Python?", streamed=False),
        _chat("Give me a recipe for a simple vegetable soup.", streamed=True, in_all_pools=True),
        _chat("How many days are there in a leap year, and why?", streamed=False),
        _chat(f"Give this paragraph a title:\n\n{paragraphs[4]}", streamed=True),
        _chat(
            "Summarise this story in two sentences:\n\n" + "\n\n".join(paragraphs[14:18]),
            streamed=False,
            in_all_pools=True,
        ),
        Prompt(
            content={
                "messages": [
                    {"role": "system", "content": "You are the guide of a small museum. You answer politely."},
                    {"role": "user", "content": "What is the oldest thing in the museum?"},
                    {"role": "assistant", "content": "It is the great ledger of the customs house, from 1871."},
                    {"role": "user", "content": "What is written in it?"},
                ]
            },
            streamed=True,
        ),
        _chat("Explain to a child how a lighthouse works.", streamed=False),
    )


def read_text() -> list[str]:
    """The paragraphs of the demo's text."""
    text = (resources.files("hawk_connector.cli") / TEXT_FILE).read_text(encoding="utf-8")
    return [paragraph for paragraph in text.strip().split("\n\n") if paragraph]


def _exact(ids: Sequence[Sequence[int]], tokens: int, first_paragraph: int, streamed: bool) -> Prompt:
    left = [token for paragraph in ids[first_paragraph:] for token in paragraph]
    if len(left) < tokens:
        raise LocalError(
            f"the demo's text is too short for this model's tokenizer: from paragraph {first_paragraph} it has "
            f"{len(left)} tokens, a prompt of {tokens} is to be cut from it"
        )
    return Prompt(
        content={"prompt": left[:tokens]},
        streamed=streamed,
        tokens=tokens,
        in_all_pools=tokens in (65, 129, 1000),
    )


def _text(text: str, *, streamed: bool) -> Prompt:
    return Prompt(content={"prompt": text}, streamed=streamed)


def _chat(text: str, *, streamed: bool, in_all_pools: bool = False) -> Prompt:
    content = {"messages": [{"role": "user", "content": text}]}
    return Prompt(content=content, streamed=streamed, in_all_pools=in_all_pools)
