"""How commands that only compute print, and how they end on what they cannot do."""

from __future__ import annotations

from typing import NoReturn

import typer
from rich.console import Console

from hawk_connector.errors import HawkError, PairingRefused

__all__ = ["FILE_WIDTH", "REFUSED", "console", "refuse"]

# Tables that go into a file or a log are not cut to 80 columns.
FILE_WIDTH = 110
# The code with which click ends on an option that it does not know.
REFUSED = 2


def console() -> Console:
    """Standard output, as wide as the terminal, or FILE_WIDTH columns where there is none."""
    plain = Console()
    return plain if plain.is_terminal else Console(width=FILE_WIDTH)


def refuse(error: HawkError) -> NoReturn:
    """Ends the command with code 2: what was asked for cannot be. A refused pairing has a line for each field."""
    if isinstance(error, PairingRefused):
        lines = ["hawk: these two sides cannot be paired:", *(f"  {mismatch}" for mismatch in error.fields)]
    else:
        lines = [f"hawk: {error}"]
    typer.secho("\n".join(lines), fg="red", err=True)
    raise typer.Exit(REFUSED)
