"""`hawk up`: a deployment in one terminal."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from hawk_connector.cli.commands import process_stages, shell_text
from hawk_connector.cli.deployment import DeploymentConfig
from hawk_connector.cli.drain_deployment import drain_deployment
from hawk_connector.cli.interrupt import StopSignal
from hawk_connector.cli.models import model_reference
from hawk_connector.cli.pairing import pairing_report
from hawk_connector.cli.processes import (
    Deployment,
    DeploymentError,
    ProcessSpec,
    StopRequested,
    refuse_ports_in_use,
)
from hawk_connector.cli.progress import Progress


def print_commands(stages: tuple[tuple[ProcessSpec, ...], ...], console: Console) -> None:
    """Every process's command, as it can be pasted into a shell (no colours, no wrapping)."""
    for spec in (spec for stage in stages for spec in stage):
        console.print(f"# {spec.name}", style="bold", highlight=False)
        console.print(shell_text(spec), markup=False, highlight=False, soft_wrap=True)
        console.print()


def print_only(config: DeploymentConfig, console: Console) -> None:
    """Prints the commands of ``config`` (the model is made, since its path is in them)."""
    errors = Console(stderr=True)
    print_commands(process_stages(config, model_reference(config.model, errors.print)), console)


def run(config: DeploymentConfig, logs: Path, console: Console) -> None:
    """Brings the deployment up and keeps it until Ctrl-C (returns) or a death (raises DeploymentError)."""
    refuse_ports_in_use(config.ports())
    with Progress(console) as progress:
        stages = process_stages(config, model_reference(config.model, progress.line))
    print_commands(stages, console)
    with StopSignal() as stop, Progress(console) as progress:
        deployment = Deployment(
            stages,
            logs,
            ready_timeout_s=config.ready_timeout_s,
            stop_timeout_s=config.stop_timeout_s,
            pause=stop.pause,
            announce=progress.line,
            live=progress.live,
        )
        with deployment:
            try:
                deployment.start()
                deployment.wait_ready()
            except StopRequested:
                return
            for line in pairing_report(config, stop.pause):
                progress.line(line)
            progress.line(f"serving {config.public_model_name} at {config.url}, logs in {logs}, Ctrl-C stops it")
            death = deployment.watch()
            if death is not None:
                raise DeploymentError(str(death))
            if config.drain_timeout_s:
                progress.line("draining both sides; Ctrl-C again stops them at once")
                for line in drain_deployment(config, stop.pause, progress.live):
                    progress.line(line)
            progress.line("stopping router, decode and prefill")
