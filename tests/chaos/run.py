"""The chaos run: load, faults, and the verdicts.  `python -m tests.chaos --help` runs it by hand."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.chaos.deployment import BOUNDS, IDLE_WITHIN_S, Deployment
from tests.chaos.faults import Fault, Kind, Phase
from tests.chaos.load import Load, Prompt, Stage, Tally
from tests.chaos.side import Died, Side, Snapshot

CLIENTS = 6
# How long a fault waits for the phase that it aims at; afterwards it takes what there is.
_AIM_S = 3.0
# Once no fault lasts any more, KV must move again within this; TCP alone may sleep as long as a cut lasted.
RECOVERY_S = 40.0
_POLL_S = 0.01
_STAGES = {
    Phase.PREFILLING: (Stage.PREFILL,),
    Phase.BETWEEN: (Stage.BETWEEN,),
    Phase.ADMISSION: (Stage.WAITING,),
    Phase.READING: (Stage.WAITING,),
    Phase.DECODING: (Stage.DECODING,),
}


@dataclass(frozen=True, slots=True)
class Hit:
    """A fault that was done: ``phases`` that transfers were in then, the one aimed at first if it was among them."""

    fault: Fault
    policy: str
    phases: tuple[Phase, ...]

    @property
    def phase(self) -> str:
        return self.phases[0].value if self.phases else "none under way"


@dataclass(slots=True)
class Verdict:
    """What one policy's part of the run showed; ``broken`` is empty where every promise was kept."""

    policy: str
    hits: list[Hit] = field(default_factory=list)
    tally: Tally = field(default_factory=Tally)
    broken: list[str] = field(default_factory=list)
    idle_after_s: float = 0.0
    recoveries_s: list[float] = field(default_factory=list)  # from the end of a fault to the next transfer's end
    transfers: Counter[str] = field(default_factory=Counter)
    descriptors: dict[str, tuple[int, int]] = field(default_factory=dict)  # open ones of a side, first and last


class Chaos:
    """Does ``faults`` to ``deployment`` under load."""

    def __init__(
        self, deployment: Deployment, policy: str, prompts: list[Prompt], seed: int, say: Callable[[str], None]
    ) -> None:
        self._deployment = deployment
        self._prompts = prompts
        self._seed = seed
        self._say = say
        self._rng = random.Random(f"chaos/{seed}/{policy}")
        self._busy: set[str] = set()
        self._disturbed = False  # by faults since KV was last seen to move
        self._undoing: set[asyncio.Task[None]] = set()
        self._undone: list[asyncio.Task[None]] = []
        self._seen: dict[str, Snapshot] = {}
        self.verdict = Verdict(policy)

    async def run(self, faults: list[Fault]) -> Verdict:
        """Raises Died where a side ends by itself, or cannot be started again."""
        tasks = [asyncio.create_task(self._run(faults)), asyncio.create_task(self._watch())]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
        return self.verdict

    async def _watch(self) -> None:
        while True:
            for side in self._deployment.sides:
                if side.deaths:
                    raise Died("; ".join(side.deaths))
            for task in self._undone:
                task.result()
            self._undone.clear()
            await asyncio.sleep(0.2)

    async def _run(self, faults: list[Fault]) -> None:
        deployment, verdict = self._deployment, self.verdict
        self._load = Load(
            *deployment.sides,
            self._prompts,
            BOUNDS,
            CLIENTS,
            self._seed,
            errors_allowed=verdict.policy == "fail",
        )
        pollers = [asyncio.create_task(self._poll(side)) for side in deployment.sides]
        try:
            await self._recovered()  # a transfer without a fault first
            for side in deployment.sides:
                opened = (await side.ask()).descriptors
                verdict.descriptors[side.name] = (opened, opened)
            for fault in faults:
                await self._do(fault)
            while self._undoing:
                await asyncio.gather(*self._undoing)
            await self._recovered()
            await self._load.end()
            await self._wait_idle()
        finally:
            for poller in pollers:
                poller.cancel()
        verdict.tally = self._load.tally
        verdict.broken += verdict.tally.broken
        verdict.transfers = self._deployment.decode.transfers()

    # --- what is going on

    async def _poll(self, side: Side) -> None:
        while True:
            self._seen.pop(side.name, None)
            try:
                while True:
                    self._seen[side.name] = await side.ask()
                    await asyncio.sleep(_POLL_S)
            except Died:
                await asyncio.sleep(0.1)

    def _phases(self) -> set[Phase]:
        nothing = Snapshot()
        prefill, decode = (self._seen.get(side.name, nothing).held for side in self._deployment.sides)
        shown = {
            Phase.PREFILLING: self._load.count(Stage.PREFILL),
            Phase.QUEUED: prefill.get("parcels_queued", 0),
            Phase.PACKING: prefill.get("packs", 0),
            Phase.OFFERED: prefill.get("regions", 0) - decode.get("reads", 0),
            Phase.BETWEEN: self._load.count(Stage.BETWEEN),
            Phase.ADMISSION: decode.get("admissions", 0),
            Phase.READING: decode.get("reads", 0),
            Phase.QUARANTINE: decode.get("quarantined_blocks", 0),
            Phase.DECODING: self._load.count(Stage.DECODING),
        }
        return {phase for phase, count in shown.items() if count > 0}

    # --- faults

    async def _recovered(self) -> None:
        """Waits until KV moves; that it does not in time is a broken promise."""
        decode = self._deployment.decode
        before, began = decode.transfers()["completed"], time.monotonic()
        while decode.transfers()["completed"] == before:
            if time.monotonic() - began > RECOVERY_S:
                self.verdict.broken.append(f"no KV has moved for {RECOVERY_S:g} s although no fault lasts any more")
                return
            await asyncio.sleep(_POLL_S)
        self.verdict.recoveries_s.append(time.monotonic() - began)

    async def _do(self, fault: Fault) -> None:
        if fault.alone and self._undoing:
            await asyncio.wait(self._undoing)
        if not self._undoing and self._disturbed:
            self._disturbed = False
            await self._recovered()
        await asyncio.sleep(fault.pause_s)
        while self._busy & set(fault.occupies) or len(self._undoing) > 1 or not self._has_victim(fault):
            await asyncio.sleep(_POLL_S)
        aimed_until = time.monotonic() + _AIM_S
        while fault.phase not in self._phases() and time.monotonic() < aimed_until:
            await asyncio.sleep(_POLL_S)
        await asyncio.sleep(fault.delay_s)
        phases = sorted(self._phases(), key=lambda phase: (phase is not fault.phase, phase.value))
        hit = Hit(fault, self.verdict.policy, tuple(phases))
        self.verdict.hits.append(hit)
        under_way = ", ".join(phase.value for phase in phases)
        self._say(f"{fault.number:3} {fault.kind.value:16} {fault.lasts_s:5.1f} s, under way: {under_way}")
        self._busy.update(fault.occupies)
        self._disturbed = self._disturbed or bool(fault.occupies)
        task = asyncio.create_task(self._carry_out(fault))
        self._undoing.add(task)
        task.add_done_callback(self._over)
        if not fault.occupies:
            await task

    def _over(self, task: asyncio.Task[None]) -> None:
        self._undoing.discard(task)
        self._undone.append(task)

    def _has_victim(self, fault: Fault) -> bool:
        """A process that is being started again is left alone."""
        if "prefill" in fault.occupies:
            return self._deployment.prefill.ready
        if "decode" in fault.occupies:
            return self._deployment.decode.ready
        return fault.kind is not Kind.CLIENT_GONE or bool(self._load.live)

    async def _carry_out(self, fault: Fault) -> None:
        try:
            await self._carry(fault)
        finally:
            self._busy.difference_update(fault.occupies)

    async def _carry(self, fault: Fault) -> None:
        network, disk = self._deployment.network, self._deployment.disk
        prefill, decode = self._deployment.sides
        match fault.kind:
            case Kind.KILL_PREFILL:
                await self._restart(prefill)
            case Kind.KILL_DECODE:
                await self._restart(decode)
            case Kind.STOP_PREFILL:
                await self._during(fault, prefill.stop, prefill.resume)
            case Kind.STOP_DECODE:
                await self._during(fault, decode.stop, decode.resume)
            case Kind.CUT:
                await self._during(fault, network.cut, network.mend)
            case Kind.UNPLUG_PREFILL:
                await self._during(fault, lambda: network.unplug(1), lambda: network.plug(1))
            case Kind.UNPLUG_DECODE:
                await self._during(fault, lambda: network.unplug(2), lambda: network.plug(2))
            case Kind.DISK_FULL:
                await self._during(fault, disk.fill, disk.free)
            case Kind.CLIENT_GONE:
                self._load.leave(self._rng, _STAGES.get(fault.phase, tuple(Stage)))
            case Kind.PRESSURE:
                self._load.burst(self._rng, 6)

    async def _during(self, fault: Fault, do: Callable[[], None], undo: Callable[[], None]) -> None:
        do()
        try:
            await asyncio.sleep(fault.lasts_s)
        finally:
            undo()

    async def _restart(self, side: Side) -> None:
        await side.kill()
        await side.start()

    # --- the end

    async def _wait_idle(self) -> None:
        """All counts of both sides go to zero, and all blocks are vLLM's, within the time promised."""
        began = time.monotonic()
        while True:
            asked = [asyncio.create_task(side.ask()) for side in self._deployment.sides]
            try:
                snapshots = await asyncio.wait_for(asyncio.gather(*asked), 60)
            except TimeoutError:
                self.verdict.broken.append("a side does not answer any more")
                return
            self.verdict.idle_after_s = time.monotonic() - began
            for side, snapshot in zip(self._deployment.sides, snapshots, strict=True):
                first, _ = self.verdict.descriptors[side.name]
                self.verdict.descriptors[side.name] = (first, snapshot.descriptors)
            if all(snapshot.idle for snapshot in snapshots):
                return
            if self.verdict.idle_after_s > IDLE_WITHIN_S:
                for side, snapshot in zip(self._deployment.sides, snapshots, strict=True):
                    if not snapshot.idle:
                        text = f"{side.name} {IDLE_WITHIN_S:g} s after the end of the load: {snapshot}"
                        self.verdict.broken.append(text)
                return
            await asyncio.sleep(0.1)
