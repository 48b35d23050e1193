"""`hawk keys`, as a user runs it: what it writes and prints, and that a side can be started with it."""

from __future__ import annotations

import stat
import subprocess
import sys
from pathlib import Path

import pytest
import zmq

from hawk_connector.address import Address
from hawk_connector.transport.curve import load_curve_keys

pytestmark = pytest.mark.slow


def hawk(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hawk_connector.cli.main", "keys", *words]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=60)


def test_a_pair_is_written_and_its_public_key_printed(tmp_path: Path) -> None:
    done = hawk("own.key", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    key = done.stdout.strip()
    path = tmp_path / "own.key"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    secret = dict(line.split() for line in path.read_text().splitlines())["secret-key"]
    assert zmq.curve_public(secret.encode()) == key.encode()
    assert secret not in done.stdout + done.stderr
    # The advice names both configuration keys, and the file by a path that holds wherever vLLM is started.
    assert f'"curve_key_file": "{path}"' in done.stderr
    assert '"curve_known_keys_file"' in done.stderr


def test_two_sides_that_follow_the_advice_know_each_other(tmp_path: Path) -> None:
    prefill, decode = (hawk(f"{side}.key", cwd=tmp_path).stdout.strip() for side in ("prefill", "decode"))
    (tmp_path / "of-decode").write_text(f"prefill-1:18550 {prefill}\n")
    (tmp_path / "of-prefill").write_text(f"decode {decode}\n")
    at_decode = load_curve_keys(str(tmp_path / "decode.key"), str(tmp_path / "of-decode"))
    at_prefill = load_curve_keys(str(tmp_path / "prefill.key"), str(tmp_path / "of-prefill"))
    assert at_decode is not None and at_prefill is not None
    assert at_decode.known.key_of(Address("prefill-1", 18550)) == at_prefill.public
    assert at_prefill.known.knows(at_decode.public)
    assert prefill != decode


def test_the_key_of_a_pair_that_is_there(tmp_path: Path) -> None:
    made = hawk("own.key", cwd=tmp_path)
    shown = hawk("--show", "own.key", cwd=tmp_path)
    assert (shown.returncode, shown.stdout, shown.stderr) == (0, made.stdout, "")


def test_a_pair_is_never_overwritten(tmp_path: Path) -> None:
    hawk("own.key", cwd=tmp_path)
    before = (tmp_path / "own.key").read_bytes()
    done = hawk("own.key", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr == "hawk: own.key exists. Key pairs are not overwritten: remove it first.\n"
    assert (tmp_path / "own.key").read_bytes() == before


def test_what_cannot_be_read_or_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "empty").touch(0o600)
    for words, said in (
        (("no/such/directory.key",), "cannot write a key pair to no/such/directory.key: No such file or directory"),
        (("--show", "none.key"), "curve_key_file none.key: "),
        (("--show", "empty"), "curve_key_file empty holds no key pair"),
    ):
        done = hawk(*words, cwd=tmp_path)
        assert done.returncode == 1
        assert done.stderr.startswith(f"hawk: {said}")
        assert done.stderr.count("\n") == 1
    assert "`hawk keys FILE` writes a pair" in done.stderr
