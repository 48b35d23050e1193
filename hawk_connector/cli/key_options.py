"""The options with which a command speaks to a side channel that has CURVE keys."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hawk_connector.errors import ConfigError
from hawk_connector.transport.curve import CurveKeys, load_curve_keys, load_own_keys

__all__ = ["KeyFile", "KnownKeysFile", "given_keys"]

KeyFile = Annotated[
    Path | None,
    typer.Option("--key-file", help="Key pair with which to connect: a side's own, or one that it lists."),
]
KnownKeysFile = Annotated[
    Path | None,
    typer.Option(
        "--known-keys-file",
        help="The sides' public keys, one `host:port KEY` a line. Default: they have the pair in --key-file too.",
    ),
]


def given_keys(key_file: Path | None, known_keys_file: Path | None) -> CurveKeys | None:
    """The keys of the two options, None where neither is given; ConfigError where they cannot be used."""
    if key_file is None:
        if known_keys_file is not None:
            raise ConfigError("--known-keys-file is given without --key-file", fix="Give both, or --key-file alone.")
        return None
    if known_keys_file is None:
        return load_own_keys(str(key_file))
    return load_curve_keys(str(key_file), str(known_keys_file))
