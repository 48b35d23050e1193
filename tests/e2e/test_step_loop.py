"""vLLM's step loop never waits for a transfer: one that stands still holds up no other request, on either side.

What is asserted is an order of events: the other request has all its tokens, one from each step, while the transfer is
still held.  How long its steps took beside those of a run without a transfer is printed, and bounded loosely.
"""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import waiting_landing
from tests.e2e.conftest import prompt
from tests.e2e.harness import REMOTE_DECODE, Engine, decode_engine, prefill_engine

pytestmark = pytest.mark.e2e

TOKENS = 96
HELD, OTHER = prompt(200, seed=1), prompt(60, seed=2)


def pair(tiny: Path, tmp_path: Path) -> tuple[Engine, Engine, Path]:
    environment, hold = waiting_landing.installed(tmp_path / "site")
    prefill = prefill_engine(tiny, tmp_path / "prefill.log", {"lease_s": 60.0})
    decode = decode_engine(tiny, tmp_path / "decode.log", config={"landing": waiting_landing.NAME})
    decode.environment.update(environment)
    return prefill.start(), decode.start(), hold


def alone(engine: Engine, ids: list[int], max_tokens: int) -> list[int]:
    (answer,) = engine.generate([ids], max_tokens=max_tokens)
    tokens: list[int] = answer["tokens"][0]
    return tokens


def assert_full_rate(found: dict[str, Any], free: dict[str, Any], expected: list[int]) -> None:
    """``found``: decoding beside the held transfer; ``free``: the same request before there was one."""
    assert found["tokens"] == free["tokens"] == expected
    assert found["steps"] == free["steps"] == TOKENS - 1, "each step after the first token brought one more"
    slower = found["median_s"] / free["median_s"]
    print(
        f"a step beside the held transfer: {slower:.2f} of one without; the longest {found['longest_s'] * 1e3:.0f} ms"
    )
    assert slower < 3


def test_a_held_landing_holds_up_no_other_request(tiny: Path, tmp_path: Path) -> None:
    prefill, decode, hold = pair(tiny, tmp_path)
    try:
        prefill.wait_ready()
        decode.wait_ready()
        wanted = {name: alone(prefill, ids, n) for name, ids, n in (("held", HELD, 8), ("other", OTHER, TOKENS))}
        free = decode.call("beside", prompt=OTHER, max_tokens=TOKENS)
        free_on_prefill = prefill.call("beside", prompt=OTHER, max_tokens=TOKENS)
        (sent,) = prefill.generate([HELD], [REMOTE_DECODE], max_tokens=1)
        hold.touch()
        held = decode.call("begin", prompt=HELD, params=sent["params"], max_tokens=8)["request"]
        found = decode.call("beside", prompt=OTHER, max_tokens=TOKENS)
        on_prefill = prefill.call("beside", prompt=OTHER, max_tokens=TOKENS)
        # The transfer stood still all the while: it is read, and neither side has seen its end.
        status = decode.call("status")["held"]
        assert status["loads"] == 1 and status["reads"] >= 1
        assert prefill.call("status")["held"]["leases"] == 1
        hold.unlink()
        assert decode.call("finish", request=held)["tokens"] == wanted["held"]
        assert_full_rate(found, free, wanted["other"])
        assert_full_rate(on_prefill, free_on_prefill, wanted["other"])
        prefill.wait_idle()
        decode.wait_idle()
    finally:
        hold.unlink(missing_ok=True)
        decode.stop()
        prefill.stop()


@pytest.mark.parametrize("stopped", ["prefill", "decode"])
def test_a_stopped_peer_holds_up_no_request(tiny: Path, tmp_path: Path, stopped: str) -> None:
    """The other side's process stands still with the transfer in its hands (SIGSTOP)."""
    prefill, decode, hold = pair(tiny, tmp_path)
    still = prefill if stopped == "prefill" else decode
    try:
        prefill.wait_ready()
        decode.wait_ready()
        wanted = {name: alone(prefill, ids, n) for name, ids, n in (("held", HELD, 8), ("other", OTHER, TOKENS))}
        (first,) = prefill.generate([OTHER], [REMOTE_DECODE], max_tokens=1)  # pairs the two
        decode.generate([OTHER], [first["params"]], max_tokens=1)
        running = decode if stopped == "prefill" else prefill
        free = running.call("beside", prompt=OTHER, max_tokens=TOKENS)
        (sent,) = prefill.generate([HELD], [REMOTE_DECODE], max_tokens=1)
        if stopped == "decode":
            hold.touch()
            decode.call("begin", prompt=HELD, params=sent["params"], max_tokens=8)
        still.process.send_signal(signal.SIGSTOP)
        if stopped == "prefill":
            held = running.call("begin", prompt=HELD, params=sent["params"], max_tokens=8, until_loading=False)
        found = running.call("beside", prompt=OTHER, max_tokens=TOKENS)
        assert running.call("status")["held"][("admissions" if stopped == "prefill" else "leases")] == 1
        still.process.send_signal(signal.SIGCONT)
        if stopped == "prefill":
            # Its own KV or the peer's, whichever is there first: the tokens are the same.
            assert running.call("finish", request=held["request"])["tokens"] == wanted["held"]
        assert_full_rate(found, free, wanted["other"])
    finally:
        hold.unlink(missing_ok=True)
        still.process.send_signal(signal.SIGCONT)
        threads = [threading.Thread(target=engine.stop) for engine in (decode, prefill)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
