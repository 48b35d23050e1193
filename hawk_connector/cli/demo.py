"""`hawk demo`: a deployment brought up, asked real prompts, and compared with one vLLM instance."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from importlib import resources
from pathlib import Path
from threading import Event
from types import TracebackType
from typing import TypeVar

import httpx
import msgspec
from rich.console import Console

from hawk_connector.cli import deployment
from hawk_connector.cli.commands import decode_process, prefill_process, router_process
from hawk_connector.cli.demo_client import TIMEOUT_S, Answer, DemoClient
from hawk_connector.cli.demo_compare import compare
from hawk_connector.cli.demo_prompts import Prompt, demo_prompts
from hawk_connector.cli.demo_report import CAPTION, Phase, Row, as_json, phase_table, summary, tie_lines
from hawk_connector.cli.demo_sides import Sides
from hawk_connector.cli.deployment import DeploymentConfig
from hawk_connector.cli.interrupt import StopSignal
from hawk_connector.cli.models import model_reference
from hawk_connector.cli.pairing import pairing_report
from hawk_connector.cli.processes import (
    Deployment,
    DeploymentError,
    Pause,
    ProcessSpec,
    StopRequested,
    refuse_ports_in_use,
)
from hawk_connector.cli.progress import Progress
from hawk_connector.errors import ConfigError, HawkError, LocalError

CONFIG_FILE = "cpu-simulated.yaml"
# The pools in the order in which they are shown; the first is the one whose answers must be equal.
KV_DTYPES = ("float32", "bfloat16", "bfp8")

_REPORT_TIMEOUT_S = 10.0
_IDLE_TIMEOUT_S = 15.0
_POLL_S = 0.05
_DEATH_SHOWS_S = 1.0

T = TypeVar("T")


class DemoError(LocalError):
    """A step of the demo failed: which one, why, and where the logs are."""


def bundled_config() -> DeploymentConfig:
    """The deployment that the demo brings up: configs/cpu-simulated.yaml, as this package carries it."""
    text = (resources.files("hawk_connector.cli") / CONFIG_FILE).read_text(encoding="utf-8")
    return deployment.parse(text, source=CONFIG_FILE)


def with_pools(config: DeploymentConfig, kv_dtype: str) -> DeploymentConfig:
    """``config`` with the NPU's KV pools in ``kv_dtype``."""
    npu = config.decode.npu
    if npu is None:
        raise ConfigError("the demo's deployment has no decode.npu")
    pools = msgspec.structs.replace(npu, config={**npu.config, "kv_dtype": kv_dtype})
    return msgspec.structs.replace(config, decode=msgspec.structs.replace(config.decode, npu=pools))


class Supervisor:
    """Runs the demo's blocking calls in a thread, while this one looks for Ctrl-C and for deaths.

    Leave it after the deployments have been stopped: a call that still runs ends when its server is gone.
    """

    def __init__(self, pause: Pause, logs: Path) -> None:
        self._pause = pause
        self._logs = logs
        self._deployments: list[Deployment] = []
        self._over = Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="hawk-demo")

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.shutdown(wait=True, cancel_futures=True)

    def watch(self, deployments: Sequence[Deployment]) -> None:
        """From now on a death in one of ``deployments`` ends the call at hand."""
        self._deployments = list(deployments)

    def pause_call(self, seconds: float) -> bool:
        """For the calls' own waits: True when the demo is over."""
        return self._over.wait(seconds)

    def call(self, step: str, work: Callable[[], T]) -> T:
        """The result of ``work``. Raises DemoError that names ``step``, DeploymentError and StopRequested."""
        future = self._thread.submit(work)
        while not future.done():
            self._raise_on_death(step)
            if self._pause(_POLL_S):
                raise StopRequested
        try:
            return future.result()
        except HawkError as error:
            # A server that dies takes its connections with it a moment before it is seen to be dead.
            if self._pause(_DEATH_SHOWS_S):
                raise StopRequested from error
            self._raise_on_death(step)
            raise DemoError(f"{step}: {error}", fix=f"The logs are in {self._logs}.") from error

    def _raise_on_death(self, step: str) -> None:
        for each in self._deployments:
            death = each.death()
            if death is not None:
                raise DeploymentError(f"{step}: {death}")


class Demo:
    """One run. ``pause``: a wait that the user can cut short; ``clock``: seconds."""

    def __init__(
        self,
        config: DeploymentConfig,
        logs: Path,
        console: Console,
        progress: Progress,
        pause: Pause,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._logs = logs
        self._console = console
        self._progress = progress
        self._pause = pause
        self._clock = clock
        # Where there is no live line, a line that stays shows that something goes on.
        self._live = progress.live if console.is_terminal else progress.line

    def run(self, model: str) -> list[Phase]:
        """All phases, each shown when it is over. Raises HawkError and StopRequested; stops what it started."""
        phases: list[Phase] = []
        with (
            Supervisor(self._pause, self._logs) as supervisor,
            httpx.Client(timeout=TIMEOUT_S, trust_env=False) as http,
            self._deployment([[prefill_process(self._config, model)]], self._logs) as prefill,
        ):
            name = self._config.public_model_name
            prefill_url = deployment.url(self._config.prefill.host, self._config.prefill.port)
            one_instance = DemoClient(http, prefill_url, name)
            router = DemoClient(http, self._config.url, name)
            self._progress.line(f"starting prefill, decode ({KV_DTYPES[0]} pools) and router, logs in {self._logs}")
            prefill.start()
            prompts: tuple[Prompt, ...] = ()
            references: dict[Prompt, Answer] = {}
            for kv_dtype in KV_DTYPES:
                config = with_pools(self._config, kv_dtype)
                if phases:
                    self._progress.line(f"starting decode again, with {kv_dtype} pools; prefill stays up")
                stages = [[decode_process(config, model)], [router_process(config)]]
                with self._deployment(stages, self._logs / kv_dtype) as others:
                    others.start()
                    supervisor.watch([prefill, others])
                    if not phases:
                        prefill.wait_ready()
                    others.wait_ready()
                    self._show_pairing(config)
                    if not phases:
                        prompts = supervisor.call("tokenising", partial(demo_prompts, one_instance.tokenise))
                        references = self._references(supervisor, one_instance, prompts)
                    asked = [prompt for prompt in prompts if not phases or prompt.in_all_pools]
                    phases.append(self._phase(supervisor, config, kv_dtype, router, asked, references))
                    supervisor.watch([prefill])
                    self._live("stopping decode and router")
        return phases

    def _deployment(self, stages: Sequence[Sequence[ProcessSpec]], logs: Path) -> Deployment:
        return Deployment(
            stages,
            logs,
            ready_timeout_s=self._config.ready_timeout_s,
            stop_timeout_s=self._config.stop_timeout_s,
            pause=self._pause,
            announce=self._progress.line,
            live=self._progress.live,
        )

    def _show_pairing(self, config: DeploymentConfig) -> None:
        for line in pairing_report(config, self._pause):
            self._progress.line(line)

    def _references(
        self, supervisor: Supervisor, client: DemoClient, prompts: Sequence[Prompt]
    ) -> dict[Prompt, Answer]:
        """What one stock instance, the prefill server asked directly, answers to each prompt."""
        began = self._clock()
        answers = {}
        for number, prompt in enumerate(prompts, 1):
            step = f"reference: one instance, prompt {number} of {len(prompts)} ({prompt.label})"
            self._live(step)
            answers[prompt] = supervisor.call(step, partial(_reference, client, prompt))
        self._progress.line(f"one instance answered {len(prompts)} prompts in {self._clock() - began:.0f} s")
        return answers

    def _phase(
        self,
        supervisor: Supervisor,
        config: DeploymentConfig,
        kv_dtype: str,
        router: DemoClient,
        prompts: Sequence[Prompt],
        references: dict[Prompt, Answer],
    ) -> Phase:
        """Every prompt through the router, one at a time, and its table."""
        began = self._clock()
        rows = []
        with Sides(config, supervisor.pause_call) as sides:
            for number, prompt in enumerate(prompts, 1):
                step = f"{kv_dtype} pools: prompt {number} of {len(prompts)} ({prompt.label}) through the router"
                self._live(step)
                answer = supervisor.call(step, partial(router.ask, prompt, salt=kv_dtype))
                movement = supervisor.call(
                    f"{step}: both sides' reports", partial(sides.movement, answer.id, _REPORT_TIMEOUT_S)
                )
                reference = references[prompt]
                rows.append(
                    Row(
                        prompt=prompt,
                        answer=answer,
                        agreement=compare(reference.tokens, reference.best, answer.tokens),
                        movement=movement,
                        must_equal=kv_dtype == KV_DTYPES[0],
                    )
                )
            held = supervisor.call(f"{kv_dtype} pools: both sides idle", partial(sides.held, _IDLE_TIMEOUT_S))
        phase = Phase(kv_dtype, tuple(rows), tuple(held))
        self._progress.line(f"{len(rows)} prompts through the router in {self._clock() - began:.0f} s\n")
        self._console.print(phase_table(phase))
        for line in tie_lines(phase):
            self._progress.line(line)
        return phase


def _reference(client: DemoClient, prompt: Prompt) -> Answer:
    answer = client.ask(prompt, salt="reference", streamed=False, with_best=True)
    if len(answer.best) != len(answer.tokens):
        raise LocalError(f"one instance gave {len(answer.tokens)} tokens and the best of {len(answer.best)} places")
    return answer


def run(logs: Path, json_file: Path | None, console: Console) -> bool:
    """The whole demo; whether everything held. Raises HawkError, and StopRequested when the user stops it."""
    began = time.monotonic()
    config = bundled_config()
    try:
        refuse_ports_in_use(config.ports())
    except DeploymentError as error:
        fix = "The demo's ports are fixed: end what holds them (`ss -ltnp` names it)."
        raise DeploymentError(error.what, fix=fix) from None
    with ExitStack() as stack:
        progress = stack.enter_context(Progress(console))
        model = model_reference(config.model, progress.line)
        stop = stack.enter_context(StopSignal())
        phases = Demo(config, logs, console, progress, stop.pause).run(model)
    seconds = time.monotonic() - began
    console.print(CAPTION, style="dim", highlight=False)
    console.print()
    problems = [problem for phase in phases for problem in phase.problems]
    for problem in problems:
        console.print(problem, style="red", markup=False, highlight=False, soft_wrap=True)
    if json_file is not None:
        try:
            json_file.write_bytes(as_json(phases, seconds))
        except OSError as error:
            raise LocalError(f"cannot write the figures to {json_file}: {error.strerror}") from error
    line = summary(phases, seconds)
    style = "bold red" if problems else "bold green"
    console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)
    return not problems
