"""Key files: what is read, and what each refusal names."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
import zmq

from hawk_connector.address import Address
from hawk_connector.errors import ConfigError
from hawk_connector.transport.curve import KnownKeys, load_curve_keys, write_key_pair

KEY = zmq.curve_keypair()[0].decode()
OTHER = zmq.curve_keypair()[0].decode()


def test_a_written_pair_is_read_back_and_is_a_pair(tmp_path: Path) -> None:
    path, known = tmp_path / "own.key", tmp_path / "known"
    known.write_text("")
    public = write_key_pair(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    keys = load_curve_keys(str(path), str(known))
    assert keys is not None
    assert keys.public == public == zmq.curve_public(keys.secret)
    assert keys.secret.decode() not in repr(keys)
    with pytest.raises(ConfigError, match="exists"):
        write_key_pair(path)
    assert load_curve_keys(None, None) is None


@pytest.mark.parametrize(
    ("text", "mode", "words"),
    [
        ("public-key x\nsecret-key y\n", 0o600, "holds no key pair"),
        (f"public-key {KEY}\n", 0o600, "holds no key pair"),
        ("", 0o600, "hawk keys"),
        (f"public-key {KEY}\nsecret-key {OTHER}\n", 0o600, "do not belong together"),
        (f"public-key {KEY}\nsecret-key {OTHER}\n", 0o640, "mode 600, got mode 640"),
    ],
    ids=["short", "no-secret", "empty", "not-a-pair", "readable-by-others"],
)
def test_bad_key_files(tmp_path: Path, text: str, mode: int, words: str) -> None:
    path = tmp_path / "own.key"
    path.write_text(text)
    path.chmod(mode)
    (tmp_path / "known").write_text("")
    with pytest.raises(ConfigError, match=words):
        load_curve_keys(str(path), str(tmp_path / "known"))


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"curve_key_file .*none"):
        load_curve_keys(str(tmp_path / "none"), str(tmp_path / "known"))
    write_key_pair(tmp_path / "own.key")
    with pytest.raises(ConfigError, match=r"curve_known_keys_file .*known"):
        load_curve_keys(str(tmp_path / "own.key"), str(tmp_path / "known"))


def test_known_keys_by_address_then_by_host(tmp_path: Path) -> None:
    path = tmp_path / "known"
    path.write_text(f"# a comment\n\n  a:1   {KEY}\na {OTHER}\n[::1]:2 {KEY}\n")
    known = KnownKeys(path)
    assert known.key_of(Address("a", 1)) == KEY.encode()
    assert known.key_of(Address("a", 2)) == OTHER.encode()
    assert known.key_of(Address("::1", 2)) == KEY.encode()
    with pytest.raises(ConfigError, match="'b:1 KEY'"):
        known.key_of(Address("b", 1))
    assert known.knows(KEY.encode())
    assert not known.knows(b"x" * 40)


@pytest.mark.parametrize(
    "bad",
    ["a", f"a {KEY} more", f"a {KEY[:-1]}", "a " + "\x7f" * 40, f"a {KEY[:-1]}é"],
    ids=["no-key", "three-words", "short", "not-z85", "not-ascii"],
)
def test_bad_lines_are_numbered(tmp_path: Path, bad: str) -> None:
    path = tmp_path / "known"
    path.write_text(f"ok {KEY}\n{bad}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="line 2"):
        KnownKeys(path)


def test_changes_count_at_once_and_a_broken_file_lets_nobody_in(tmp_path: Path) -> None:
    path = tmp_path / "known"
    path.write_text(f"a {KEY}\n")
    known = KnownKeys(path)
    path.write_text(f"a {KEY}\nb {OTHER}\n")
    assert known.knows(OTHER.encode())
    path.write_text("broken\n")
    assert not known.knows(KEY.encode())
    path.unlink()
    assert not known.knows(KEY.encode())
    path.write_text(f"a {KEY}\n")
    assert known.knows(KEY.encode())
