"""CURVE keys of the side channel: files, and who is let in.

Two files a side. The *key file* is this side's own pair, readable by its owner alone. The *known keys file*
has one peer a line, ``name key``: the key in Z85 (40 characters), the name being ``host:port`` or ``host``
for sides that are connected to, and anything for the rest. Lines that begin with ``#`` are comments (Z85
itself uses ``#``, so nothing else is). A deployment may use one pair for all its sides.
"""

from __future__ import annotations

import logging
import os
import threading
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from zmq.utils import z85

from ..address import Address
from ..errors import ConfigError

__all__ = ["CurveKeys", "KnownKeys", "load_curve_keys", "load_own_keys", "read_public_key", "write_key_pair"]

_log = logging.getLogger(__name__)

_KEY_LENGTH = 40


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """This side's pair (Z85 bytes; the secret is kept out of repr) and the keys of its peers.

    Whoever has this very pair is this side's owner, listed or not.  ``known`` None: this is an owner's client, which
    speaks with sides of this pair alone.
    """

    public: bytes
    secret: bytes = field(repr=False)
    known: KnownKeys | None

    def admits(self, key: bytes) -> bool:
        """Whether ``key`` (Z85) is listed, or this side's own."""
        return key == self.public or (self.known is not None and self.known.knows(key))

    def key_of(self, address: Address) -> bytes:
        """The public key of the side at ``address``; raises ConfigError when none is listed."""
        return self.public if self.known is None else self.known.key_of(address)


class KnownKeys:
    """The known keys file, read again when it has changed.

    A file that has become unreadable or malformed lets nobody in until it is mended, and is reported once: a half of
    it, read while it is written, is read again when the rest is there.
    """

    def __init__(self, path: Path) -> None:
        """Raises ConfigError when the file cannot be read or a line is malformed."""
        self._path = path
        self._lock = threading.Lock()
        self._version = self._current_version()
        self._keys = _read_known_keys(path)

    def knows(self, key: bytes) -> bool:
        """Whether ``key`` (Z85) is listed."""
        return key in self._fresh().values()

    def key_of(self, address: Address) -> bytes:
        """The public key of the side at ``address``; raises ConfigError when none is listed."""
        keys = self._fresh()
        for name in (str(address), address.host):
            if name in keys:
                return keys[name]
        raise ConfigError(
            f"no public key is known for {address}",
            fix=f"Add a line '{address} KEY' to the known keys file {self._path}; `hawk keys --show FILE`, where that "
            "side's key file is, prints its KEY.",
        )

    def _fresh(self) -> dict[str, bytes]:
        with self._lock:
            version = self._current_version()
            if version != self._version:
                self._version = version
                try:
                    self._keys = _read_known_keys(self._path)
                except ConfigError as error:
                    self._keys = {}
                    _log.error("no key is known until this is mended: %s", error)
            return self._keys

    def _current_version(self) -> tuple[int, int, int] | None:
        try:
            status = self._path.stat()
        except OSError:
            return None
        # Inode and size too: an atomic replacement may come within one tick of the file system's clock.
        return (status.st_mtime_ns, status.st_ino, status.st_size)


def load_curve_keys(key_file: str | None, known_keys_file: str | None) -> CurveKeys | None:
    """The keys that the configuration names, or None when it names none. Raises ConfigError."""
    if key_file is None or known_keys_file is None:
        return None
    public, secret = _read_pair(key_file)
    return CurveKeys(public, secret, KnownKeys(Path(known_keys_file)))


def load_own_keys(key_file: str) -> CurveKeys:
    """The pair in ``key_file``, to speak with the side whose own it is.  Raises ConfigError."""
    public, secret = _read_pair(key_file)
    return CurveKeys(public, secret, None)


def read_public_key(path: Path) -> bytes:
    """The public key (Z85) of the pair in ``path``.  Raises ConfigError as a side that is started with it would."""
    return _read_pair(str(path))[0]


def _read_pair(key_file: str) -> tuple[bytes, bytes]:
    path = Path(key_file)
    try:
        mode = path.stat().st_mode
        lines = path.read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"curve_key_file {key_file}: {error}", fix=_MAKE_PAIR) from None
    if mode & 0o077:
        raise ConfigError(
            f"curve_key_file {key_file} can be read by others than its owner",
            expected="mode 600",
            got=f"mode {mode & 0o777:o}",
            fix=f"chmod 600 {key_file}",
        )
    words = dict(line.split(maxsplit=1) for line in lines if len(line.split(maxsplit=1)) == 2)
    try:
        public, secret = (_key(words[name].strip()) for name in ("public-key", "secret-key"))
    except (KeyError, ValueError):
        raise ConfigError(
            f"curve_key_file {key_file} holds no key pair",
            expected="a line 'public-key KEY' and a line 'secret-key KEY' (Z85)",
            fix=_MAKE_PAIR,
        ) from None
    if zmq.curve_public(secret) != public:
        raise ConfigError(f"curve_key_file {key_file}: the two keys do not belong together", fix=_MAKE_PAIR)
    return public, secret


def write_key_pair(path: Path) -> bytes:
    """Write a new pair to ``path`` (mode 600) and return the public key.

    Raises ConfigError where ``path`` exists or cannot be written.
    """
    public, secret = zmq.curve_keypair()
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise ConfigError(f"{path} exists", fix="Key pairs are not overwritten: remove it first.") from None
    except OSError as error:
        raise ConfigError(f"cannot write a key pair to {path}: {error.strerror}") from None
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(f"public-key {public.decode()}\nsecret-key {secret.decode()}\n")
    return public


_MAKE_PAIR = "`hawk keys FILE` writes a pair."


def _key(text: str) -> bytes:
    if len(text) != _KEY_LENGTH:
        raise ValueError(f"a key has {_KEY_LENGTH} characters")
    key = text.encode("ascii")
    z85.decode(key)
    return key


def _read_known_keys(path: Path) -> dict[str, bytes]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"curve_known_keys_file {path}: {error}") from None
    keys: dict[str, bytes] = {}
    for number, line in enumerate(lines, start=1):
        words = line.split()
        if not words or line.lstrip().startswith("#"):
            continue
        try:
            name, text = words
            keys[name] = _key(text)
        except (ValueError, KeyError):
            raise ConfigError(
                f"curve_known_keys_file {path}, line {number}",
                expected="a name and a public key of 40 characters (Z85)",
                got=f"{len(words)} words",  # not the line: somebody may have put a secret key there
            ) from None
    return keys
