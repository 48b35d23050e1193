"""The `hawk doctor` command."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["DoctorSide", "doctor"]


class DoctorSide(str, Enum):
    """The halves of a deployment."""

    prefill = "prefill"
    decode = "decode"


def doctor(
    side: Annotated[DoctorSide | None, typer.Option(help="The side that runs on this machine. Default: both.")] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="The deployment file, such as configs/cpu-simulated.yaml. Default: TCP, no hardware."),
    ] = None,
    self_test: Annotated[
        bool, typer.Option("--self-test/--no-self-test", help="Move a parcel over Mooncake, on this machine.")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Check this machine against what a deployment needs, say what to mend, and move a parcel.

    Exit code: 0 if all that the configuration needs is there, 1 if not.  What it does not need cannot fail.
    """
    from hawk_connector.cli import deployment
    from hawk_connector.cli.output import console

    from . import report
    from .examination import examination
    from .loopback import run_self_test
    from .machine import this_machine
    from .needs import Side, default_needs, deployment_needs

    sides: tuple[Side, ...] = ("prefill", "decode") if side is None else (side.value,)
    if config is None:
        needs = [default_needs(one) for one in sides]
    else:
        parsed = deployment.load(config)
        needs = [deployment_needs(parsed, one) for one in sides]
    machine = this_machine()
    findings = examination(machine, needs, run_self_test if self_test else None)
    if as_json:
        typer.echo(report.as_json(findings))
    else:
        report.show(findings, console())
    raise typer.Exit(1 if any(finding.sick for finding in findings) else 0)
