"""`hawk status`: how running sides are, for people, for scripts and for probes."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from hawk_connector.address import Address
from hawk_connector.cli.key_options import KeyFile, KnownKeysFile, given_keys
from hawk_connector.cli.output import console
from hawk_connector.cli.status import StatusBoard
from hawk_connector.cli.status_text import status_view
from hawk_connector.event_log import escaped
from hawk_connector.protocol.messages import Status

__all__ = ["status"]

Answers = Sequence[tuple[Address, Status | None]]


def status(
    addresses: Annotated[
        list[str],
        typer.Argument(metavar="ADDRESS...", help="Side channels, host:port: side_channel_port of each side."),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print all that is known, as JSON.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Ask again and again, until Ctrl-C.")] = False,
    ready: Annotated[
        bool, typer.Option("--ready", help="Print only whether each side is ready; for readiness probes.")
    ] = False,
    every: Annotated[float, typer.Option("--every", min=0.1, help="Seconds between two looks of --watch.")] = 2.0,
    timeout: Annotated[float, typer.Option("--timeout", min=0.1, help="Seconds to wait for answers.")] = 5.0,
    key_file: KeyFile = None,
    known_keys_file: KnownKeysFile = None,
) -> None:
    """Show how running sides are: peers, live transfers, what is held, what ended last.

    Exit code: 0 if every side answered (with --ready: and is ready), 1 if not, 130 on Ctrl-C.  A side is not ready
    while it drains, or while a peer that it is configured for is down, refused, or its circuit is open.
    """
    places = [Address.parse(address) for address in addresses]
    with StatusBoard(places, keys=given_keys(key_file, known_keys_file)) as board:
        try:
            if watch and not as_json and not ready:
                _watch(board, places, timeout, every)
                return
            while True:
                answers = _ask(board, places, timeout)
                _print(answers, as_json, ready)
                if not watch:
                    break
                time.sleep(every)
        except KeyboardInterrupt:
            raise typer.Exit(130) from None
    good = all(answer is not None and not (ready and answer.unready) for _, answer in answers)
    raise typer.Exit(0 if good else 1)


def _ask(board: StatusBoard, places: Sequence[Address], timeout_s: float) -> Answers:
    return list(zip(places, board.ask(timeout_s), strict=True))


def _print(answers: Answers, as_json: bool, ready: bool) -> None:
    if as_json:
        typer.echo(json.dumps([_plain(address, answer) for address, answer in answers]))
    elif ready:
        for address, answer in answers:
            typer.echo(f"{address}: {_readiness(answer)}")
    else:
        console().print(_view(answers))


def _watch(board: StatusBoard, places: Sequence[Address], timeout_s: float, every_s: float) -> None:
    with Live(Text("asking"), console=Console(), auto_refresh=False, vertical_overflow="visible") as live:
        while True:
            live.update(_view(_ask(board, places, timeout_s)), refresh=True)
            time.sleep(every_s)


def _view(answers: Answers) -> RenderableType:
    parts: list[RenderableType] = []
    for address, answer in answers:
        parts += [status_view(address, answer), Text()]
    return Group(*parts[:-1])


def _readiness(answer: Status | None) -> str:
    if answer is None:
        return "no answer"
    return "not ready: " + "; ".join(escaped(why, 1024) for why in answer.unready) if answer.unready else "ready"


def _plain(address: Address, answer: Status | None) -> dict[str, Any]:
    """One element of the JSON list."""
    ready = answer is not None and not answer.unready
    return {"address": str(address), "ready": ready, "status": _everything(answer)}


def _everything(value: Any) -> Any:
    """``value`` in JSON's types, fields with their default included, which messages leave out."""
    if isinstance(value, msgspec.Struct):
        return {name: _everything(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, (tuple, list)):
        return [_everything(each) for each in value]
    return value
