"""A whole run: the reference, then each policy's part of the faults on one deployment."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

from tests.chaos.deployment import PAST_EVERY_DEADLINE_S, Deployment, prompt_tokens, reference_answers
from tests.chaos.faults import draw
from tests.chaos.run import Chaos, Verdict

POLICIES = ("recompute", "fail")
_PROMPTS = 48


async def campaign(
    model: Path, logs: Path, faults: int, seed: int, say: Callable[[str], None] = lambda text: None
) -> list[Verdict]:
    """Half of ``faults`` under each policy; what each showed.  Everything is drawn from ``seed``."""
    rng = random.Random(f"campaign/{seed}")
    tokens = prompt_tokens(_PROMPTS, seed)
    prompts = reference_answers(model, logs / "reference.log", tokens, [rng.randrange(4, 49) for _ in tokens])
    say(f"a single instance has answered {len(prompts)} prompts")
    drawn = list(draw(faults, seed, PAST_EVERY_DEADLINE_S))
    parts = dict(zip(POLICIES, (drawn[: faults // 2], drawn[faults // 2 :]), strict=True))
    deployment = Deployment(model, logs)
    try:
        verdicts = []
        for policy, part in parts.items():
            await deployment.start(policy)
            say(f"prefill and decode serve, policy {policy}")
            verdicts.append(await Chaos(deployment, policy, prompts, seed, say).run(part))
            say(f"the load has ended; everything idle after {verdicts[-1].idle_after_s:.1f} s")
        return verdicts
    finally:
        await deployment.close()
