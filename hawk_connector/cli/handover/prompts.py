"""Prompts of one length, no two of which begin alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hawk_connector.cli.demo_prompts import read_text
from hawk_connector.errors import ConfigError

__all__ = ["bench_prompts"]

_STRIDE = 89


def bench_prompts(tokenise: Callable[[str], Sequence[int]], count: int, tokens: int) -> list[tuple[int, ...]]:
    """``count`` prompts of ``tokens`` token ids, cut from the demo's text as from a ring, _STRIDE ids after each other.

    ConfigError where the text is not long enough for one prompt, or for so many.
    """
    ids = [token for paragraph in read_text() for token in tokenise(paragraph + "\n\n")]
    most = len(ids) // _STRIDE
    if tokens > len(ids) or count > most:
        raise ConfigError(
            "the prompts are cut from a text of this package",
            expected=f"at most {most} prompts of at most {len(ids)} tokens",
            got=f"{count} of {tokens}",
            fix="Choose fewer --requests or fewer --prompt-tokens.",
        )
    ring = ids + ids[:tokens]
    return [tuple(ring[start : start + tokens]) for start in range(0, count * _STRIDE, _STRIDE)]
