"""Whether two answers are the same, token for token, and what may differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# Two tokens whose logprobs lie this close are a tie: sums in another order may choose either.
TIE = 1e-4


@dataclass(frozen=True, slots=True)
class Agreement:
    """An answer beside the reference.

    ``total``: the longer one's tokens. ``same``: places at which both have the same token.
    ``first_difference``: the first place, from 0, at which they have not; None where they are equal.
    ``tie``: the difference begins where the reference's best and the answer's token are a tie.
    """

    total: int
    same: int
    first_difference: int | None
    tie: bool

    @property
    def holds(self) -> bool:
        """Equal, or different from a tie on."""
        return self.first_difference is None or self.tie

    @property
    def before_difference(self) -> int:
        """Tokens before the first difference."""
        return self.total if self.first_difference is None else self.first_difference


def compare(reference: Sequence[int], best: Sequence[Mapping[int, float]], answer: Sequence[int]) -> Agreement:
    """``answer`` against ``reference``, both token ids.

    ``best``: the reference's best tokens with their logprobs, for each of its places. A difference is a tie
    where the answer's token is among them and no further than TIE below the best.
    """
    pairs = list(zip(reference, answer, strict=False))
    differing = [place for place, (ours, theirs) in enumerate(pairs) if ours != theirs]
    total = max(len(reference), len(answer))
    first = differing[0] if differing else len(pairs) if total > len(pairs) else None
    tie = first is not None and first < len(pairs) and first < len(best) and _is_tie(best[first], answer[first])
    return Agreement(total=total, same=len(pairs) - len(differing), first_difference=first, tie=tie)


def _is_tie(best: Mapping[int, float], token: int) -> bool:
    return token in best and max(best.values()) - best[token] <= TIE
