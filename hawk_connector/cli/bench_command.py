"""The `hawk bench` commands: their options, and which room does what."""

from __future__ import annotations

import datetime
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from hawk_connector.errors import HawkError, PeerError

from .bench_options import Carrier, Device, numbers, words
from .models import DEFAULT_MODEL
from .output import console, refuse
from .plan_options import Pool

__all__ = ["bench"]

bench = typer.Typer(no_args_is_help=True, help="Measure packing, transfers and hand-overs on this machine.")

_SOURCES = ("gpu-nhd", "gpu-hnd", "cpu")
_SOURCE_DTYPES = ("fp32", "bf16", "fp16")
# Pairs of `hawk bench handover`; tests compare them with those that there are.
_PAIRS = ("direct", "nixl-slowed", "direct-tcp", "hawk", "hawk-tcp", "nixl")
_SIZES = "10,20,40,80,160,320,640,1280"
_ALL = len(os.sched_getaffinity(0))

JsonFile = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Write rows, ratios, machine and versions to this file.")
]
PlotFile = Annotated[Path | None, typer.Option("--plot", metavar="FILE", help="Draw the figures (.png, .svg).")]
Runs = Annotated[int, typer.Option(min=1, max=1000, help="Rounds; each contestant runs once in every round.")]
Quick = Annotated[bool, typer.Option("--quick", help="A short look: little data, 3 rounds.")]
Seed = Annotated[int, typer.Option(min=0, help="Draws the values, the blocks and the order in each round.")]
Source = Annotated[
    str, typer.Option(metavar="LAYOUT", help="How the prefill side keeps its cache: " + ", ".join(_SOURCES) + ".")
]


@bench.command()
def transform(
    device: Annotated[Device, typer.Option(help="Where to pack.")] = Device.cpu,
    source: Annotated[
        str, typer.Option(metavar="LIST", help=f"Layouts of the prefill side's cache: {', '.join(_SOURCES)}.")
    ] = "gpu-nhd,cpu",
    source_dtype: Annotated[
        str, typer.Option(metavar="LIST", help=f"Dtypes of that cache: {', '.join(_SOURCE_DTYPES)}.")
    ] = "bf16,fp32",
    dtype: Annotated[
        str, typer.Option(metavar="LIST", help="Dtypes of the decode side's pools: fp32, bf16, bfp8, bfp4.")
    ] = "fp32,bf16,bfp8,bfp4",
    threads: Annotated[str, typer.Option(metavar="LIST", help="Numbers of threads (on the host).")] = f"1,{_ALL}",
    layers: Annotated[int, typer.Option(min=1, max=1024, help="Layers of the model.")] = 80,
    kv_heads: Annotated[int, typer.Option(min=1, max=1024, help="KV heads.")] = 8,
    head_dim: Annotated[int, typer.Option(min=1, max=4096, help="Dims of a head.")] = 128,
    tokens: Annotated[int, typer.Option(min=1, max=1 << 20, help="Tokens of the parcel.")] = 512,
    source_block: Annotated[int, typer.Option(min=1, max=4096, help="Tokens of a block of the cache, shuffled.")] = 16,
    block_size: Annotated[int, typer.Option(min=16, max=4096, help="Tokens of a block of the pools.")] = 64,
    runs: Runs = 9,
    seed: Seed = 1,
    quick: Quick = False,
    json_file: JsonFile = None,
    plot: PlotFile = None,
) -> None:
    """How fast a parcel is packed: GB of source a second, beside a plain copy of the same bytes in the same rounds.

    Each packer's bytes are first compared with the reference's.  On a GPU times are of CUDA events and the copy is one
    inside its memory.  A ratio is shown only where its spread allows it.

    Exit code: 0; 2 where something cannot be measured here.
    """
    try:
        from hawk_connector.bench import plot as plots
        from hawk_connector.bench.tables import print_notes, transform_tables
        from hawk_connector.bench.transform import TransformOptions, run_transform

        options = TransformOptions(
            device=device.value,
            sources=words("--source", source, _SOURCES),  # type: ignore[arg-type]
            source_dtypes=words("--source-dtype", source_dtype, _SOURCE_DTYPES),
            dtypes=words("--dtype", dtype, ("fp32", "bf16", "bfp8", "bfp4")),
            threads=numbers("--threads", threads, 1, 1024),
            layers=4 if quick else layers,
            kv_heads=kv_heads,
            head_dim=head_dim,
            tokens=128 if quick else tokens,
            source_block=source_block,
            block_size=block_size,
            runs=3 if quick else runs,
            seed=seed,
        )
        started = _now()
        with _Rounds() as rounds:
            run = run_transform(options, rounds.report)
        transform_tables(run.rows, run.ratios, console())
        print_notes(run.notes, console())
        _written(json_file, "transform", options, run, started)
        if plot is not None:
            plots.plot_transform(run.rows, _about(f"{run.rows[0]['size_bytes'] / 1e6:,.0f} MB a parcel"), plot)
    except HawkError as error:
        refuse(error)


@bench.command()
def transfer(
    protocol: Annotated[
        Carrier, typer.Option(help="What carries the KV: Mooncake over TCP or RDMA, or this machine's own memory.")
    ] = Carrier.tcp,
    mode: Annotated[
        str, typer.Option(metavar="LIST", help="Contestants: direct, hawk, host, face-rows (10 MB only).")
    ] = "direct,hawk,host,face-rows",
    dtype: Annotated[str, typer.Option(metavar="LIST", help="Dtypes of the pools: fp32, bf16, bfp8, bfp4.")] = (
        "fp32,bf16,bfp8"
    ),
    packing: Annotated[
        str, typer.Option(metavar="LIST", help="cold: packed when asked for. eager: packed before that.")
    ] = "cold,eager",
    sizes: Annotated[
        str, typer.Option(metavar="LIST", help="Sizes in MB (2^20 bytes), counted in bf16 whatever the dtype.")
    ] = _SIZES,
    parcel_tokens: Annotated[str, typer.Option(metavar="LIST", help="parcel_tokens of the prefill side.")] = "512",
    pack_threads: Annotated[int, typer.Option(min=1, max=64, help="pack_threads of the prefill side.")] = 1,
    layers: Annotated[int, typer.Option(min=1, max=1024, help="Layers; with the next two Llama-3.1-70B's.")] = 80,
    kv_heads: Annotated[int, typer.Option(min=1, max=1024, help="KV heads.")] = 8,
    head_dim: Annotated[int, typer.Option(min=1, max=4096, help="Dims of a head.")] = 128,
    source: Source = "gpu-nhd",
    source_dtype: Annotated[str, typer.Option(metavar="DTYPE", help="Dtype of the prefill side's cache.")] = "bf16",
    source_block: Annotated[int, typer.Option(min=1, max=4096, help="Tokens of a block of the cache, shuffled.")] = 16,
    block_size: Annotated[int, typer.Option(min=16, max=4096, help="Tokens of a block of the pools, shuffled.")] = 32,
    chips: Annotated[int, typer.Option(min=1, max=64, help="Chips of the decode side.")] = 4,
    device: Annotated[str, typer.Option(help="Chips of the decode side, simulated: a name of `hawk layouts`.")] = (
        "blackhole-p150"
    ),
    pool: Annotated[Pool, typer.Option(help="Kind of the decode side's pools.")] = Pool.cross_layer,
    runs: Runs = 7,
    seed: Seed = 1,
    quick: Annotated[bool, typer.Option("--quick", help="A short look: 10 MB, 3 rounds.")] = False,
    json_file: JsonFile = None,
    plot: PlotFile = None,
) -> None:
    """How long KV takes from the request to its pool, in every mode, between two processes on this machine.

    The product's own workers, protocol and landings; only vLLM and the device's silicon are left out.  What landed is
    compared with what must after each transfer, outside the clock.  Sizes for which memory does not suffice are left
    out with a word.  A ratio is shown only where its spread allows it.

    Exit code: 0; 2 where something cannot be measured here.
    """
    try:
        from hawk_connector.bench import plot as plots
        from hawk_connector.bench.contestants import CODECS, MODES, TransferOptions
        from hawk_connector.bench.tables import print_notes, transfer_tables
        from hawk_connector.bench.transfer import run_transfer

        options = TransferOptions(
            protocol=protocol.value,
            modes=words("--mode", mode, MODES),  # type: ignore[arg-type]
            dtypes=words("--dtype", dtype, CODECS),
            packings=words("--packing", packing, ("cold", "eager")),  # type: ignore[arg-type]
            sizes_mb=(10,) if quick else numbers("--sizes", sizes, 1, 1 << 20),
            parcel_tokens=numbers("--parcel-tokens", parcel_tokens, 1, 1 << 20),
            runs=3 if quick else runs,
            layers=layers,
            kv_heads=kv_heads,
            head_dim=head_dim,
            source=words("--source", source, _SOURCES)[0],  # type: ignore[arg-type]
            source_dtype=words("--source-dtype", source_dtype, _SOURCE_DTYPES)[0],
            source_block=source_block,
            block_size=block_size,
            chips=chips,
            device=device,
            pool=pool.value,
            pack_threads=pack_threads,
            seed=seed,
        )
        started = _now()
        with _Rounds() as rounds:
            run = run_transfer(options, rounds.report)
        transfer_tables(run.rows, run.ratios, console())
        print_notes(run.notes, console())
        _written(json_file, "transfer", options, run, started)
        if plot is not None:
            plots.plot_transfer(run.rows, run.ratios, _about(f"two processes over {protocol.value}"), plot)
    except HawkError as error:
        refuse(error)


@bench.command()
def handover(
    systems: Annotated[
        str | None,
        typer.Option(metavar="LIST", help=f"Of: {', '.join(_PAIRS)}. Default: all. One instance is always there."),
    ] = None,
    concurrency: Annotated[str, typer.Option(metavar="LIST", help="Requests at once.")] = "1,4",
    requests: Annotated[int, typer.Option(min=1, max=200, help="Requests of each system at each concurrency.")] = 12,
    prompt_tokens: Annotated[int, typer.Option(min=2, max=4000, help="Tokens of a prompt.")] = 1000,
    new_tokens: Annotated[int, typer.Option(min=3, max=1000, help="Tokens of an answer.")] = 16,
    model: Annotated[
        str, typer.Option(help="A model's directory, its name on a hub, or one that `hawk model` knows.")
    ] = DEFAULT_MODEL,
    threads: Annotated[int, typer.Option(min=1, max=1024, help="Threads of each server.")] = 1,
    idle: Annotated[float, typer.Option(min=0.1, max=3600, help="Seconds for which idle servers are watched.")] = 10.0,
    logs: Annotated[Path, typer.Option(help="Directory for the servers' logs.")] = Path("logs/bench-handover"),
    seed: Seed = 1,
    quick: Annotated[
        bool, typer.Option("--quick", help="A short look: 4 requests of 200 tokens, idle for 2 s, by default no NIXL.")
    ] = False,
    json_file: JsonFile = None,
    plot: PlotFile = None,
) -> None:
    """How long a request stands between its prefill server and its decode server, for HAWK, NIXL and one instance.

    Real vLLM servers on this machine's CPU, up together as far as memory allows, asked in turns.  The client sends both
    legs itself: a hand-over is from the prefill server's answer to the first token that decode streams.  Every answer
    is compared with one instance's, token by token.

    Exit code: 0; 1 where an answer was wrong or a server failed; 2 where something cannot be measured here.
    """
    from rich.console import Console

    from .handover import report
    from .handover.options import HandoverOptions
    from .handover.run import WrongAnswer, run_handover
    from .interrupt import StopSignal
    from .models import model_reference
    from .processes import DeploymentError, StopRequested
    from .progress import Progress

    try:
        default = [name for name in _PAIRS if not (quick and name.startswith("nixl"))]
        wanted = words("--systems", ",".join(default) if systems is None else systems, _PAIRS)
        options = HandoverOptions(
            systems=wanted,
            concurrency=numbers("--concurrency", concurrency, 1, 64),
            requests=4 if quick else requests,
            prompt_tokens=200 if quick else prompt_tokens,
            new_tokens=new_tokens,
            model=model,
            threads=threads,
            idle_s=2.0 if quick else idle,
            seed=seed,
        )
        started = _now()
        with Progress(Console(stderr=True)) as progress, StopSignal() as stop:
            reference = model_reference(options.model, progress.line)
            run = run_handover(options, reference, logs, stop.pause, progress.line, progress.live)
        report.handover_table(run.rows, run.ratios, run.notes, console())
        _written(json_file, "handover", options, run, started)
        if plot is not None:
            about = _about(f"{options.prompt_tokens:,}-token prompts")
            report.plot_handover(run.rows, about, plot)
    except StopRequested:
        raise typer.Exit(130) from None
    except (WrongAnswer, DeploymentError, PeerError) as error:
        typer.secho(f"hawk: {error}", fg="red", err=True)
        raise typer.Exit(1) from None
    except HawkError as error:
        refuse(error)


class _Rounds:
    """A bar on standard error while contestants run; nothing where that is no terminal."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        errors = Console(stderr=True)
        columns = (BarColumn(20), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
        self._progress = Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal)
        self._task = self._progress.add_task("starting", total=None)

    def report(self, what: str, done: int, total: int) -> None:
        self._progress.update(self._task, description=what, completed=done, total=total)

    def __enter__(self) -> _Rounds:
        self._progress.start()
        return self

    def __exit__(self, *ended: Any) -> None:
        self._progress.stop()


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def _about(what: str) -> str:
    """A line on the machine, for a picture."""
    from hawk_connector.bench.machine import machine

    here = machine()
    return f"{here['processor']}, {here['cores']} cores; {what}"


def _written(file: Path | None, name: str, options: Any, run: Any, started: str) -> None:
    if file is None:
        return
    from dataclasses import asdict

    from hawk_connector.bench.record import write_json

    write_json(file, name, {**asdict(options), "notes": run.notes}, run.rows, run.ratios, started)
    typer.echo(f"written to {file}", err=True)
