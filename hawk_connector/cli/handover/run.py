"""The run: groups of servers, waves of requests in turns, answers compared, and idle time looked at."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from hawk_connector.bench.machine import available_bytes
from hawk_connector.bench.rounds import Ratio, Spread, rounds
from hawk_connector.cli.demo_client import DemoClient
from hawk_connector.cli.demo_compare import compare
from hawk_connector.cli.demo_sides import Movement, report_of
from hawk_connector.cli.processes import Deployment, DeploymentError, Pause, StopRequested
from hawk_connector.cli.status import StatusBoard
from hawk_connector.errors import LocalError, PeerError, PeerGone

from .client import Client, Sample, http_client
from .idle import idle_shares
from .options import AGGREGATED, HandoverOptions, System
from .prompts import bench_prompts
from .rows import Measured, ratios, row
from .servers import MODEL_NAME, Running, groups, pair, refuse_missing

__all__ = ["HandoverRun", "WrongAnswer", "run_handover"]

_READY_S = 600.0
_STATUS_S = 10.0
_REPORT_S = 10.0
_POLL_S = 0.1
_LOOK_S = 0.1
_DEATH_SHOWS_S = 1.0

Say = Callable[[str], None]


class WrongAnswer(LocalError):
    """A system answered other tokens than one instance: its times are of something else."""


@dataclass(frozen=True)
class HandoverRun:
    """Rows, (what it is of, ratio), and what must be said beside them."""

    rows: list[dict[str, Any]]
    ratios: list[tuple[dict[str, Any], Ratio]]
    notes: tuple[str, ...]


@dataclass
class _Book:
    """Prompts and the right answers, known once one instance has been asked."""

    prompts: list[tuple[int, ...]] = field(default_factory=list)
    tokens: list[tuple[int, ...]] = field(default_factory=list)
    best: list[list[dict[int, float]]] = field(default_factory=list)


def run_handover(
    options: HandoverOptions, model: str, logs: Path, pause: Pause, announce: Say, live: Say
) -> HandoverRun:
    """Measures every system; ``model``: what `vllm serve` is given; ``pause``: a wait that the user can cut short.

    ConfigError where something is not installed, CapacityError where memory does not suffice, DeploymentError where a
    server does not start or dies, AnswerError and PeerGone where one does not answer, WrongAnswer, StopRequested.
    """
    refuse_missing(options.chosen)
    book = _Book()
    found: list[Measured] = []
    idle: dict[str, dict[str, float]] = {}
    for group in groups(options.chosen, available_bytes()):
        members = [pair(system, options, model) for system in group]
        names = ", ".join(system.name for system in group)
        announce(f"starting {names}: {sum(len(member.servers) for member in members)} servers, logs in {logs}")
        stages = [[server for member in members for server in member.servers]]
        deployment = Deployment(stages, logs, ready_timeout_s=_READY_S, pause=pause, announce=announce, live=live)
        # The servers stop first: requests under way then end.
        with ThreadPoolExecutor(max(options.concurrency)) as threads, http_client() as http, deployment:
            deployment.start()
            deployment.wait_ready()
            bench = _Group(options, members, http, threads, deployment, pause)
            bench.prepare(book, announce, live)
            found += bench.measure(book, announce, live)
            idle |= bench.idle(live)
    rows = [row(each, idle[each.system.name]) for each in found]
    return HandoverRun(rows, ratios(found), _notes(options, found))


class _Group:
    """Systems that are up together."""

    def __init__(
        self,
        options: HandoverOptions,
        members: Sequence[Running],
        http: httpx.Client,
        threads: ThreadPoolExecutor,
        deployment: Deployment,
        pause: Pause,
    ) -> None:
        self._options = options
        self._members = {member.system.name: member for member in members}
        self._clients = {name: Client(http, each.urls, options.new_tokens) for name, each in self._members.items()}
        self._http = http
        self._threads = threads
        self._deployment = deployment
        self._pause = pause
        self._count = 0

    def prepare(self, book: _Book, announce: Say, live: Say) -> None:
        """Asks one instance for the right answers, if it is here; then two uncounted waves through each system."""
        options = self._options
        if AGGREGATED.name in self._members:
            demo = DemoClient(self._http, self._members[AGGREGATED.name].urls[0], MODEL_NAME)
            # One prompt more than is measured, for what is not counted.
            book.prompts = bench_prompts(demo.tokenise, options.prompts + 1, options.prompt_tokens)
            for number, prompt in enumerate(book.prompts, 1):
                live(f"one instance: the right answer to prompt {number} of {len(book.prompts)}")
                tokens, best = self._clients[AGGREGATED.name].best(prompt)
                book.tokens.append(tokens)
                book.best.append(best)
                self._go_on()
            announce(f"one instance has answered {len(book.prompts)} prompts")
        for name, member in self._members.items():
            live(f"{name}: the first requests, not counted")
            # As many at once as later, so that every connection and every pairing is made.
            for count in (1, max(options.concurrency)):
                self._check(member.system, len(book.prompts) - 1, book, self._wave(name, [book.prompts[-1]] * count))

    def measure(self, book: _Book, announce: Say, live: Say) -> list[Measured]:
        """Waves of every system in turns, at each concurrency."""
        options = self._options
        beside = tuple(self._members)
        all_found = []
        for concurrency in options.concurrency:
            found = {name: Measured(member.system, concurrency, beside) for name, member in self._members.items()}
            waves = options.waves(concurrency)
            for number, name in rounds(list(found), waves, options.seed + concurrency):
                live(f"{name}: {concurrency} at once, {number + 1} of {waves}")
                places = [number * concurrency + place for place in range(concurrency)]
                samples = self._wave(name, [book.prompts[place] for place in places])
                found[name].waves[number] = samples
                self._read_reports(found[name], samples)
                for place, sample in zip(places, samples, strict=True):
                    tie = self._check(found[name].system, place, book, [sample])
                    found[name].ties += tie
                    found[name].equal += not tie
            medians = (
                f"{name} {Spread.of(list(each.by_wave().values())).median * 1e3:.0f} ms" for name, each in found.items()
            )
            announce(f"{concurrency} at once, medians: {', '.join(medians)}")
            all_found += list(found.values())
        return all_found

    def idle(self, live: Say) -> dict[str, dict[str, float]]:
        """Share of a core of every server of each system, while nobody asks anything."""
        options = self._options
        live(f"all idle for {options.idle_s:g} s")
        pids = self._deployment.pids()
        shares = idle_shares(pids, options.idle_s, self._pause)
        self._go_on()
        return {
            name: {server.name.rpartition("-")[2]: shares[server.name] for server in member.servers}
            for name, member in self._members.items()
        }

    def _wave(self, name: str, prompts: Sequence[Sequence[int]]) -> list[Sample]:
        """All of ``prompts`` at once; returns when every answer is whole."""
        client = self._clients[name]
        futures = []
        for prompt in prompts:
            self._count += 1
            futures.append(self._threads.submit(client.request, prompt, f"{name}-{self._count}"))
        try:
            while wait(futures, _LOOK_S).not_done:
                self._raise_on_death()
                self._go_on()
            return [future.result() for future in futures]
        except PeerError as error:
            # A server that dies takes its connections with it a moment before it is seen to be dead.
            if self._pause(_DEATH_SHOWS_S):
                raise StopRequested from error
            self._raise_on_death()
            raise

    def _raise_on_death(self) -> None:
        death = self._deployment.death()
        if death is not None:
            raise DeploymentError(str(death))

    def _go_on(self) -> None:
        if self._pause(0):
            raise StopRequested

    def _check(self, system: System, place: int, book: _Book, samples: Sequence[Sample]) -> bool:
        """Whether an answer differs, from a tie on, from one instance's.  WrongAnswer where it differs otherwise."""
        tie = False
        for sample in samples:
            agreement = compare(book.tokens[place], book.best[place], sample.tokens)
            if not agreement.holds:
                raise WrongAnswer(
                    f"{system.name} answered prompt {place} wrongly",
                    expected=f"tokens {list(book.tokens[place])}",
                    got=f"{list(sample.tokens)}, which differ from token {agreement.first_difference} on",
                )
            tie = tie or agreement.first_difference is not None
        return tie

    def _read_reports(self, found: Measured, samples: Sequence[Sample]) -> None:
        """What both of HAWK's sides report on ``samples``.  PeerGone where a side has none, or another than success."""
        sides = self._members[found.system.name].sides
        if not sides:
            return
        deadline = time.monotonic() + _REPORT_S
        with StatusBoard(sides) as board:
            while True:
                answers = board.ask(_STATUS_S)
                moved = {}
                for sample in samples:
                    ours, theirs = (
                        report_of(answer.reports, f"cmpl-{sample.id}") if answer is not None else None
                        for answer in answers
                    )
                    moved[sample.id] = Movement(ours, theirs)
                problems = [each.problem for each in moved.values() if each.problem]
                if not problems:
                    break
                if time.monotonic() >= deadline:
                    raise PeerGone(f"{found.system.name}: {problems[0]}", fix="Its times are not of a transfer.")
                if self._pause(_POLL_S):
                    raise StopRequested
        found.movements |= moved


def _notes(options: HandoverOptions, found: Sequence[Measured]) -> tuple[str, ...]:
    threads = f"{options.threads} thread" + ("s" if options.threads > 1 else "")
    beside = dict.fromkeys(each.beside for each in found)
    return (
        f"{threads} a server; prompts of {options.prompt_tokens} tokens, {options.new_tokens} new ones, greedy; both "
        "legs sent by this client, connections kept.",
        "Up together, in turns: " + "; ".join(", ".join(names) for names in beside) + ".",
        *(f"{each.system.name}: {each.system.note}." for each in found if each.concurrency == options.concurrency[0]),
    )
