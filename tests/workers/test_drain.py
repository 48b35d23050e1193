"""Draining real workers, as `hawk drain` and vLLM's shutdown do it."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hawk_connector.address import Address
from hawk_connector.cli.drain import Drainer
from hawk_connector.cli.main import app
from hawk_connector.transport.curve import CurveKeys, load_curve_keys, load_own_keys, write_key_pair
from hawk_connector.transport.memory import Hang, MemoryFabric
from tests.transport.waiting import eventually
from tests.workers.sides import Sides, ask, wait_idle
from tests.workers.source import Geometry, Prompt

pytestmark = pytest.mark.slow

GEOMETRY = Geometry()
BLOCKS = [9, 2, 13, 4]
TOKENS = 200


def test_both_sides_finish_what_they_owe_take_nothing_new_and_then_hold_nothing(
    sides: Sides, fabric: MemoryFabric
) -> None:
    prefill, decode = sides.prefill(GEOMETRY, fabric.factory()), sides.decode(GEOMETRY, fabric.factory(timeout_s=60.0))
    first = prefill.run(Prompt(GEOMETRY, TOKENS, seed=1))
    decode.pull(prefill, first, BLOCKS)
    decode.wipe()
    owed = prefill.run(Prompt(GEOMETRY, TOKENS, seed=2))
    fabric.inject(Hang())
    request = decode.load(prefill.ticket(owed), BLOCKS)
    eventually(lambda: decode.status().held["reads"] == 1, "the read hangs")
    places = [Address.parse(prefill.ranks[0].address), Address.parse(decode.worker.handshake.status_address)]
    with Drainer(places) as drainer:
        assert not drainer.turn()
        assert [side.role for side in drainer.sides] == ["prefill", "decode"]
        assert all(side.owed and not side.refused for side in drainer.sides)
        late = prefill.run(Prompt(GEOMETRY, TOKENS, seed=3))
        late_request = decode.load(prefill.ticket(late), [1, 3, 5, 7])
        assert not decode.wait(late_request).ok
        assert decode.report(late_request).failure == "draining"
        assert prefill.statuses()[0].unready == decode.status().unready == ("this side is draining",)
        fabric.release_hung()
        assert decode.wait(request).ok
        decode.check(owed.prompt, BLOCKS)
        eventually(drainer.turn, "both sides hold nothing")
        assert [str(side).partition(": ")[2] for side in drainer.sides] == ["drained, it holds nothing"] * 2
    prefill.wait_released(first, owed, late)
    wait_idle(prefill, decode)
    # The scheduler hears of it with the next step, and once.
    feedback = decode.worker.take_feedback()
    assert feedback is not None and feedback.draining and decode.worker.take_feedback() is None


def run(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["drain", *words])
    return result.exit_code, result.output


def test_the_command_waits_for_empty_sides_and_says_what_they_hold(sides: Sides, fabric: MemoryFabric) -> None:
    prefill = sides.prefill(GEOMETRY, fabric.factory())
    decode = sides.decode(GEOMETRY, fabric.factory())
    address = prefill.ranks[0].address
    running = prefill.run(Prompt(GEOMETRY, 150, seed=1))
    code, output = run("--timeout", "0.1", address)
    assert code == 1 and f"{address} (prefill): still holds 1 transfers" in output
    decode.pull(prefill, running, [3, 4, 5])
    prefill.wait_released(running)
    code, output = run(address, decode.worker.handshake.status_address)
    assert code == 0 and output.count("drained, it holds nothing") == 2


def test_nobody_there_is_no_drained_side() -> None:
    code, output = run("--timeout", "0.2", "127.0.0.1:1")
    assert code == 1 and "127.0.0.1:1: no answer" in output


@pytest.fixture
def pairs(tmp_path: Path) -> dict[str, CurveKeys]:
    """Two pairs that know each other: the side's own, and a peer's."""
    for name in ("own", "peer"):
        key = write_key_pair(tmp_path / name).decode()
        (tmp_path / "known").open("a").write(f"{'127.0.0.1' if name == 'own' else name} {key}\n")
    known = str(tmp_path / "known")
    found = {name: load_curve_keys(str(tmp_path / name), known) for name in ("own", "peer")}
    return {name: keys for name, keys in found.items() if keys is not None}


def test_with_keys_only_the_sides_own_pair_is_obeyed(
    sides: Sides, fabric: MemoryFabric, pairs: dict[str, CurveKeys], tmp_path: Path
) -> None:
    prefill = sides.prefill(GEOMETRY, fabric.factory(), keys=pairs["own"])
    address = prefill.ranks[0].address
    place = Address.parse(address)
    with Drainer([place], keys=pairs["peer"]) as drainer:
        eventually(drainer.turn, "the side answers")
        (side,) = drainer.sides
        assert not side.done and "only the owner of this side's own key pair may drain it" in side.refused
    held = {"transfers", "regions"}
    running = prefill.run(Prompt(GEOMETRY, 150, seed=1))  # it still takes new work
    with Drainer([place], keys=load_own_keys(str(tmp_path / "own"))) as drainer:
        assert not drainer.turn()
        assert held & set(drainer.sides[0].owed)
    code, output = run("--timeout", "0.3", "--key-file", str(tmp_path / "peer"), address)
    assert code == 1 and "no answer" in output  # a peer's client looks for the side under its own key
    code, output = run("--timeout", "0.3", "--key-file", str(tmp_path / "own"), address)
    assert code == 1 and "still holds" in output
    prefill.abandon(running)


def test_vllms_shutdown_waits_for_what_is_owed_and_no_longer(sides: Sides, fabric: MemoryFabric) -> None:
    prefill = sides.prefill(GEOMETRY, fabric.factory(), shutdown_drain_s=60.0)
    decode = sides.decode(GEOMETRY, fabric.factory())
    running = prefill.run(Prompt(GEOMETRY, TOKENS, seed=1))
    ended = threading.Event()

    def close() -> None:
        prefill.close()
        ended.set()

    closer = threading.Thread(target=close)
    closer.start()
    try:
        eventually(lambda: ask(prefill.ranks[0].address).unready != (), "it drains")
        assert not ended.is_set()
        decode.pull(prefill, running, BLOCKS)
        assert ended.wait(30)
    finally:
        closer.join(60)


def test_a_shutdown_with_nothing_owed_does_not_wait(sides: Sides, fabric: MemoryFabric) -> None:
    prefill = sides.prefill(GEOMETRY, fabric.factory(), shutdown_drain_s=3600.0)
    aborted = prefill.begin(Prompt(GEOMETRY, TOKENS, seed=1))  # vLLM's shutdown aborts it and tells nobody
    prefill.compute(aborted, 100)
    prefill.close()
