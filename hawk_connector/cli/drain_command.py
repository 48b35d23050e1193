"""`hawk drain`: running sides finish what they owe and take nothing new, so that they can be stopped."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from hawk_connector.address import Address
from hawk_connector.cli.drain import Drainer, SideDrain
from hawk_connector.transport.curve import load_own_keys

__all__ = ["drain"]


def drain(
    addresses: Annotated[
        list[str],
        typer.Argument(
            metavar="ADDRESS...",
            help="Side channels, host:port: side_channel_port of each side; each prefill rank has its own.",
        ),
    ],
    timeout: Annotated[
        float, typer.Option("--timeout", min=0.0, help="Seconds to wait until they hold nothing; 0 only tells them.")
    ] = 60.0,
    key_file: Annotated[
        Path | None,
        typer.Option("--key-file", help="The sides' own key pair (their curve_key_file); for sides that have keys."),
    ] = None,
) -> None:
    """Let running sides finish what they owe and take nothing new, and wait until they hold nothing.

    A prefill side goes on serving what it has offered, until it is fetched or its lease ends; a decode side goes on
    with its loads.  New requests compute their KV on the decode side.  Ends with the process: there is no way back.
    With CURVE keys only the side's own pair is obeyed (--key-file).

    Exit code: 0 if every side holds nothing, 1 if not in time, or one refused, 130 on Ctrl-C.
    """
    places = [Address.parse(address) for address in addresses]
    said: dict[str, str] = {}

    def look(sides: list[SideDrain]) -> None:
        for side in sides:
            if said.get(str(side.address)) != str(side):
                said[str(side.address)] = str(side)
                typer.echo(str(side))

    keys = load_own_keys(str(key_file)) if key_file is not None else None
    try:
        with Drainer(places, keys=keys) as drainer:
            done = drainer.wait(timeout, _sleep, look)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    raise typer.Exit(0 if done else 1)


def _sleep(seconds: float) -> bool:
    time.sleep(seconds)
    return False
