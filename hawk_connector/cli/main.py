"""The `hawk` command."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from hawk_connector import __version__
from hawk_connector.cli.bench_command import bench
from hawk_connector.cli.doctor.command import doctor
from hawk_connector.cli.drain_command import drain
from hawk_connector.cli.layouts_command import layouts
from hawk_connector.cli.output import console as plain_console
from hawk_connector.cli.plan_command import plan
from hawk_connector.cli.status_command import status
from hawk_connector.errors import HawkError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="HAWK: prefill an LLM on GPUs, decode it on NPUs.",
)


def app_main() -> None:
    """Entry point of the console script: an error of ours is one message and exit code 1, not a traceback."""
    try:
        app()
    except HawkError as error:
        typer.secho(f"hawk: {error}", fg="red", err=True)
        sys.exit(1)


@app.callback(invoke_without_command=True)
def _version(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        typer.echo(f"hawk {__version__}")
        raise typer.Exit


@app.command()
def up(
    config: Annotated[Path, typer.Argument(help="The deployment file, such as configs/cpu-simulated.yaml.")],
    print_only: Annotated[bool, typer.Option("--print-only", help="Print the commands and start nothing.")] = False,
    logs: Annotated[
        Path | None, typer.Option(help="Directory for one log per process. Default: logs/NAME-OF-CONFIG.")
    ] = None,
) -> None:
    """Start prefill, decode and router; print their commands; stop all on Ctrl-C, or when one dies."""
    from hawk_connector.cli import deployment, up

    parsed = deployment.load(config)
    console = Console()
    if print_only:
        up.print_only(parsed, console)
        return
    up.run(parsed, logs if logs is not None else Path("logs") / config.stem, console)


@app.command()
def demo(
    logs: Annotated[Path, typer.Option(help="Directory for the servers' logs.")] = Path("logs/demo"),
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures to this file.")] = None,
) -> None:
    """Run the whole chain on this machine, and compare its answers with one vLLM instance's.

    Exit code: 0 if everything held, 1 if not, 130 on Ctrl-C.
    """
    from hawk_connector.cli import demo
    from hawk_connector.cli.processes import StopRequested

    try:
        held = demo.run(logs, json_file, plain_console())
    except StopRequested:
        typer.echo("stopped", err=True)
        raise typer.Exit(130) from None
    raise typer.Exit(0 if held else 1)


@app.command()
def keys(
    file: Annotated[Path, typer.Argument(help="The key file: written, or read with --show.", show_default=False)],
    show: Annotated[bool, typer.Option("--show", help="Print the public key of the pair that is in FILE.")] = False,
) -> None:
    """Write a CURVE key pair for one side's side channel, and print its public key.

    The key goes to standard output, what to do with it to standard error.  A file that exists is never overwritten.
    """
    from hawk_connector.cli import keys

    if show:
        typer.echo(keys.public_key(file))
        return
    typer.echo(keys.make_pair(file))
    typer.echo(keys.advice(file), err=True)


@app.command()
def model(
    name: Annotated[str, typer.Argument(help="A model known by name, or a model directory.")] = "",
) -> None:
    """Make the model that the demo serves, if it is not there yet, and print its directory."""
    from hawk_connector.cli.models import DEFAULT_MODEL, model_reference

    errors = Console(stderr=True)
    path = model_reference(
        name or DEFAULT_MODEL, lambda text: errors.print(text, markup=False, highlight=False, soft_wrap=True)
    )
    typer.echo(path)


app.add_typer(bench, name="bench")
app.command()(doctor)
app.command()(drain)
app.command()(plan)
app.command()(layouts)
app.command()(status)


if __name__ == "__main__":
    app_main()
