"""`hawk status` against real side channels: what it prints, the JSON, the codes that it ends with."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from hawk_connector.address import Address
from hawk_connector.cli.key_options import given_keys
from hawk_connector.cli.main import app
from hawk_connector.cli.status import StatusBoard
from hawk_connector.cli.status_text import duration, size, status_view
from hawk_connector.errors import ConfigError
from hawk_connector.metrics import TransferReport
from hawk_connector.protocol.messages import PairingStatus, Status, StatusQuery, decode_message, encode
from hawk_connector.protocol.snapshot import TransferSnapshot
from hawk_connector.transport.curve import load_curve_keys, write_key_pair
from hawk_connector.transport.loop import ChannelLoop
from hawk_connector.transport.side_channel import SideChannelClient, SideChannelServer
from tests.transport.waiting import eventually

LIVE = TransferSnapshot(
    transfer="ab" * 16,
    request="cmpl-[red]evil[/red]\x1b[2J\n",
    phase="delivering",
    age_s=125.0,
    still_s=7.5,
    parcels=4,
    parcels_done=1,
    nbytes=4 << 20,
    nbytes_done=1 << 20,
    waits_for="Done from the claimant",
    deadline="lease_s",
    deadline_in_s=22.0,
)
STATUS = Status(
    epoch="e" * 32,
    role="prefill",
    held={"leases": 2, "packs": 0},
    pairings=(PairingStatus("d" * 32, "paired", "cross_layer bfp8"),),
    reports=(
        TransferReport(
            transfer_id="cd" * 16, request_id="cmpl-2", outcome="expired", reason="expired", tokens=77, pack_s=0.0125
        ),
    ),
    transfers=(LIVE,),
    dropped={"rate": 3, "unsent": 0},
    left_out={"transfers": 41},
    uptime_s=7260.0,
)


@contextmanager
def serving(
    *statuses: Status, server: SideChannelServer | None = None, asked: list[str] | None = None
) -> Iterator[Address]:
    """A side that answers with ``statuses`` one after another, the last again and again.  ``asked``: by whom so far."""
    channel = server if server is not None else SideChannelServer("127.0.0.1", 0)
    left = list(statuses)

    def answer(_: SideChannelServer | SideChannelClient, peer: str, payload: bytes) -> None:
        decode_message(payload, (StatusQuery,))
        if asked is not None:
            asked.append(peer)
        channel.send(peer, encode(left.pop(0) if len(left) > 1 else left[0]))

    loop = ChannelLoop("test-side", [channel], answer, lambda: 10.0)
    loop.start()
    try:
        yield channel.address
    finally:
        loop.close()


def run(*words: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["status", *map(str, words)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def nobody() -> Address:
    """An address at which nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return Address("127.0.0.1", probe.getsockname()[1])


def shown(status: Status) -> str:
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(status_view(Address("10.0.0.7", 18550), status))
    return console.export_text()


def test_what_is_shown_of_a_side() -> None:
    text = shown(STATUS)
    lines = [re.sub(r"\s+", " ", line).strip() for line in text.splitlines()]
    assert lines[0] == "prefill 10.0.0.7:18550 up 2 h 1 min ready"
    assert lines[1] == "holds 2 leases; messages dropped: 3 rate"
    assert lines[2] == "peer state circuit detail"
    assert lines[3] == f"{'d' * 32} paired closed cross_layer bfp8"
    assert "ab" * 16 in text.replace("\n", "")
    assert "1/4" in text and "1.0 MiB / 4.0 MiB" in text and "22 s (lease_s)" in text
    assert "2 min 5 s" in text and "7.5 s" in text
    assert "expired" in text and "12.5 ms" in text
    assert lines[-1] == "not shown, for the size of a message: 41 transfers"
    # A client's text is neither markup nor a control sequence nor a line.
    assert r"cmpl-[red]evil[/red]\x1b[2J\n" in text
    assert "\x1b[2J" not in text


def test_an_idle_side_is_two_lines() -> None:
    idle = Status(epoch="e" * 32, role="decode", held={"loads": 0}, pairings=(), reports=(), unready=("a is down",))
    assert shown(idle).splitlines() == ["decode 10.0.0.7:18550  up 0.0 s  not ready: a is down", "holds nothing"]


@pytest.mark.slow
def test_every_side_is_asked_and_a_silent_one_is_named() -> None:
    other = Status(epoch="f" * 32, role="decode", held={}, pairings=(), reports=())
    silent = nobody()
    with serving(STATUS) as one, serving(other) as two:
        code, output = run(two, one, silent, "--timeout", 1)
        assert code == 1
        assert output.index(f"decode {two}") < output.index(f"prefill {one}") < output.index(f"{silent}: no answer")
        assert run(two, one)[0] == 0


def test_json_is_the_whole_status() -> None:
    with serving(STATUS) as address:
        code, output = run(address, "--json")
    assert code == 0
    (found,) = json.loads(output)
    assert (found["address"], found["ready"]) == (str(address), True)
    assert found["status"]["transfers"][0]["transfer"] == "ab" * 16
    assert found["status"]["transfers"][0]["deadline_in_s"] == 22.0
    assert found["status"]["left_out"] == {"transfers": 41}
    assert set(found["status"]) >= set(Status.__struct_fields__)


def test_ready_is_a_word_and_a_code() -> None:
    down = Status(
        epoch="f" * 32, role="decode", held={}, pairings=(), reports=(), unready=("p:1 is\x1bdown", "draining")
    )
    silent = nobody()
    with serving(STATUS) as good, serving(down) as bad:
        assert run(good, "--ready") == (0, f"{good}: ready\n")
        assert run(good, bad, "--ready") == (1, f"{good}: ready\n{bad}: not ready: p:1 is\\x1bdown; draining\n")
        assert run(silent, "--ready", "--timeout", 0.5) == (1, f"{silent}: no answer\n")
        # Without --ready the question is whether they answer.
        assert run(bad)[0] == 0


def test_a_late_answer_is_not_the_next_questions() -> None:
    first, second = (Status(epoch=c * 32, role="decode", held={}, pairings=(), reports=()) for c in "ab")
    with SideChannelServerOnHold() as held, StatusBoard([held.address]) as board:
        assert board.ask(0.2) == [None]
        held.answer(first)
        asked = threading.Thread(target=lambda: held.answer_next(second))
        asked.start()
        assert [s.epoch for s in board.ask(20.0) if s is not None] == ["b" * 32]
        asked.join()


class SideChannelServerOnHold:
    """A side that answers when it is told to."""

    def __init__(self) -> None:
        self._server = SideChannelServer("127.0.0.1", 0)
        self.address = self._server.address

    def __enter__(self) -> SideChannelServerOnHold:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.close()

    def answer(self, status: Status) -> None:
        """Answers the question that waits, and gives the answer time to come before the next question is put."""
        self.answer_next(status)
        time.sleep(0.2)

    def answer_next(self, status: Status) -> None:
        question = None
        while question is None:
            question = self._server.receive()
            time.sleep(0.005)
        self._server.send(question.peer, encode(status))


@pytest.mark.slow
def test_keys(tmp_path: Path) -> None:
    for name in ("side", "reader", "stranger"):
        write_key_pair(tmp_path / f"{name}.key")
    public = {name: (tmp_path / f"{name}.key").read_text().split()[1] for name in ("side", "reader")}
    (tmp_path / "side.known").write_text(f"reader {public['reader']}\n")
    keys = load_curve_keys(str(tmp_path / "side.key"), str(tmp_path / "side.known"))
    with serving(STATUS, server=SideChannelServer("127.0.0.1", 0, keys=keys)) as address:
        (tmp_path / "known").write_text(f"{address} {public['side']}\n")
        known = ("--known-keys-file", tmp_path / "known")
        assert run(address, "--ready", "--key-file", tmp_path / "reader.key", *known)[0] == 0
        # The side's own pair needs no list.
        assert run(address, "--ready", "--key-file", tmp_path / "side.key")[0] == 0
        with pytest.raises(ConfigError, match="--known-keys-file is given without --key-file"):
            given_keys(None, tmp_path / "known")
        for stranger in (("--key-file", tmp_path / "stranger.key", *known), ()):
            code, output = run(address, "--ready", "--timeout", 0.7, *stranger)
            assert (code, output) == (1, f"{address}: no answer\n")


@pytest.mark.slow
def test_watch_asks_again_until_it_is_stopped() -> None:
    changed = Status(epoch="e" * 32, role="prefill", held={"leases": 7}, pairings=(), reports=())
    asked: list[str] = []
    with serving(STATUS, STATUS, changed, asked=asked) as address:
        command = [sys.executable, "-m", "hawk_connector.cli.main", "status", str(address), "--watch", "--every", "0.1"]
        with subprocess.Popen([*command, "--json"], stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            held = [json.loads(process.stdout.readline())[0]["status"]["held"]]
            # On a slow machine a question is repeated, and takes two of the answers that are laid ready.
            while held[-1] != changed.held:
                held.append(json.loads(process.stdout.readline())[0]["status"]["held"])
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 130
        assert held[0] == STATUS.held and len(held) <= 3
        asked.clear()
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            eventually(lambda: len(asked) >= 12, "it asks again, and has shown earlier answers")
            process.send_signal(signal.SIGINT)
            output, _ = process.communicate(timeout=30)
        assert process.returncode == 130
        assert "holds 7 leases" in output


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-1.0, "0.0 s"),
        (9.94, "9.9 s"),
        (10.4, "10 s"),
        (59.4, "59 s"),
        (60, "1 min 0 s"),
        (3599, "59 min 59 s"),
        (3600, "1 h 0 min"),
        (86399, "23 h 59 min"),
        (90000, "1 d 1 h"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_sizes() -> None:
    cases: list[tuple[int, str]] = [(0, "0 B"), (174_080, "174,080 B"), (1 << 20, "1.0 MiB"), (3 << 29, "1.5 GiB")]
    check: Callable[[int], str] = size
    assert [check(number) for number, _ in cases] == [text for _, text in cases]
