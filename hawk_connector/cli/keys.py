"""`hawk keys`: key pairs of the side channel."""

from __future__ import annotations

from pathlib import Path

from hawk_connector.transport.curve import read_public_key, write_key_pair

__all__ = ["advice", "make_pair", "public_key"]


def make_pair(file: Path) -> str:
    """Writes a new pair to ``file`` (mode 600) and gives its public key (Z85, 40 characters).

    Raises ConfigError where the file exists or cannot be written.
    """
    return write_key_pair(file).decode("ascii")


def public_key(file: Path) -> str:
    """The public key (Z85) of the pair in ``file``; raises ConfigError where no side could use it."""
    return read_public_key(file).decode("ascii")


def advice(file: Path) -> str:
    """What to do with the pair in ``file``: one instruction a line."""
    return (
        f"The pair is in {file}; only its owner may read it. Above is its public key, KEY below.\n"
        f'1. On this side set "curve_key_file": "{file.absolute()}", and "curve_known_keys_file" to a file with a\n'
        "   line 'NAME KEY' for each side that it talks to.\n"
        "2. On each of those sides add the line 'NAME KEY' with this KEY to the known keys file. If this is a prefill\n"
        "   side, NAME is its side channel as decode names it, host:port or host; otherwise any word.\n"
        "3. The keys guard the side channel, not the KV: let a firewall keep Mooncake's ports (15000-17000) to the\n"
        "   two machines."
    )
