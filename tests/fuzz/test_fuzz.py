"""The fuzz in small: every decoder, the machines behind them, and real sockets."""

from __future__ import annotations

import pytest

from hawk_connector.protocol.messages import Message
from tests.fuzz.endpoint_attack import attack
from tests.fuzz.frames import FrameSource
from tests.fuzz.machines import Machines
from tests.fuzz.run_fuzz import fuzz_decoders

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("seed", [1, 2])
def test_decoders_and_machines_answer_or_refuse_whatever_comes(seed: int) -> None:
    seen = fuzz_decoders(6000, seed)
    unseen = [kind.__name__ for kind in Message.__args__ if not seen[kind.__name__]]
    assert unseen == [], "messages that never came through"
    assert seen["refused"] > 2000 and seen["parameters refused"] > 100 and seen["config refused"] > 10
    assert seen["known keys taken"] and seen["known keys refused"]
    acted = {name for name in ("Pack", "Read", "Fence", "Report", "Ended", "Send") if seen[f"action: {name}"]}
    assert acted == {"Pack", "Read", "Fence", "Report", "Ended", "Send"}, "the machines had nothing to do"


@pytest.mark.vllm
def test_real_sockets_serve_who_behaves_and_answer_nobody_else() -> None:
    seen = attack(8000, 3)
    assert seen["good client served during the attack"] >= 3
    assert seen["sent: oversize"] + seen["sent: huge_count"] > 0
    assert seen["raw connections without a key"] >= 40 and seen["sent without a known key"] == 1000
    assert seen["answer: Stale"] > 0, "no frame of the attack was taken for a message"


def test_a_seed_gives_the_same_frames() -> None:
    def frames(seed: int) -> list[tuple[str, bytes]]:
        source = FrameSource(seed, Machines.epochs(), Machines.transfers())
        return [source.frame() for _ in range(200)]

    assert frames(7) == frames(7) != frames(8)
