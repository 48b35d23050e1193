"""The rules as they show on one life of a decode worker, checked by a ledger that believes nothing the machine says."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hawk_connector.protocol.admission import AdmissionLimits, Verdict, VerdictKind
from hawk_connector.protocol.decode_actions import DecodeLimits, Read, Report
from hawk_connector.protocol.link import LinkState, PeerLink
from hawk_connector.protocol.messages import Abort, Accepted, Done
from hawk_connector.protocol.ticket import Ticket
from tests.protocol.simulated_process import Process

# What may pass between a deadline and its end: a tick, reads that are awaited, and fences.
_SLACK_S = 12.0

_Parcel = tuple[str, int, int]  # rank's address, parcel, generation


@dataclass(eq=False)
class _Load:
    ticket: Ticket
    blocks: tuple[int, ...]
    since: float
    unfenced: set[str] = field(default_factory=set)  # ranks of which a read failed
    failed: bool = False  # a read of it has failed
    ended: dict[str, int] = field(default_factory=dict)  # good reads by rank
    dones: set[_Parcel] = field(default_factory=set)
    accepted: set[_Parcel] = field(default_factory=set)


class DecodeWatch:
    """``misfit``: it must pair with nobody, for its facts or for its own limits."""

    def __init__(
        self, process: Process, epoch: str, limits: DecodeLimits, admission: AdmissionLimits, *, misfit: bool
    ) -> None:
        self.process, self.epoch, self.limits, self.admission = process, epoch, limits, admission
        self.misfit = misfit
        self.world = process.world
        self.loads: dict[str, _Load] = {}
        self.running: dict[int, tuple[str, str]] = {}  # read -> request, rank's address
        self._engine_epoch: dict[str, str] = {}
        self._tainted: set[str] = set()
        self._fencing: set[str] = set()
        self._reported: set[str] = set()
        self._asked_at: dict[str, float] = {}

    # --- what happens

    def asked(self, request: str) -> None:
        self._asked_at[request] = self.process.clock()

    def answered(self, request: str) -> None:
        self._asked_at.pop(request, None)

    def loading(self, request: str, ticket: Ticket, blocks: tuple[int, ...]) -> None:
        self.loads[request] = _Load(ticket, blocks, self.process.clock())

    def reading(self, read: Read) -> None:
        load = self.loads[read.request]
        epoch = next(rank.epoch for rank in load.ticket.ranks if rank.address == read.address)
        self.rule_1_no_read_before_the_fence(read, load)
        self.rule_7_an_engine_serves_one_life(read, epoch)
        self.running[read.id] = (read.request, read.address)

    def read_ended(self, read: int, ok: bool, stopped: bool) -> None:
        """``stopped``: between two batches, so that no byte of it can come late."""
        request, address = self.running.pop(read)
        load = self.loads[request]
        load.failed = load.failed or not ok
        if ok:
            load.ended[address] = load.ended.get(address, 0) + 1
        elif not stopped:
            load.unfenced.add(address)
            self._tainted.add(address)

    def fencing(self, address: str) -> None:
        self.rule_1_an_engine_is_fenced_when_quiet_and_once(address)
        self._fencing.add(address)

    def fenced(self, address: str) -> None:
        self._fencing.discard(address)
        self._tainted.discard(address)
        self._engine_epoch.pop(address, None)
        for load in self.loads.values():
            load.unfenced.discard(address)

    def heard(self, address: str, message: Any) -> None:
        if not isinstance(message, Accepted) or message.to != self.epoch:
            return
        for load in self.loads.values():
            lives = {rank.address: rank.epoch for rank in load.ticket.ranks}
            mine = (load.ticket.transfer, load.ticket.claim) == (message.transfer, message.claim)
            if mine and lives.get(address) == message.epoch:
                load.accepted.add((address, message.parcel, message.generation))

    def said(self, address: str, message: Any) -> None:
        if not isinstance(message, (Done, Abort)):
            return
        for request, load in self.loads.items():
            if (load.ticket.transfer, load.ticket.claim) != (message.transfer, message.claim):
                continue
            if isinstance(message, Abort):
                self.rule_1_abort_is_said_when_no_read_runs(request, load)
            else:
                load.dones.add((address, message.parcel, message.generation))
                self.rule_1_no_done_before_the_fence(request, load)
                self.rule_4_done_follows_a_good_read(request, load, address)

    def reported(self, report: Report) -> None:
        load = self.loads.pop(report.request, None)
        again = report.request in self._reported
        self.world.require(1, not again, lambda: f"{report.request} is reported twice")
        self._reported.add(report.request)
        if load is None:  # a load that failed before it began
            self.world.require(4, not report.ok, lambda: f"{report.request} was refused and is reported as loaded")
            return
        same = report.block_ids == load.blocks
        self.world.require(1, same, lambda: f"{report.request}: reports {report.block_ids}, not {load.blocks}")
        self.rule_1_no_report_before_the_fence(report, load)
        self.rule_4_only_accepted_bytes_are_believed(report, load)

    # --- the rules

    def _runs(self, request: str) -> list[int]:
        return [read for read, (owner, _) in self.running.items() if owner == request]

    def rule_1_no_read_before_the_fence(self, read: Read, load: _Load) -> None:
        what = f"{read.request}: read {read.id} from {read.address}"
        self.world.require(1, not load.failed, lambda: f"{what} follows a failed read of the same load")
        clean = read.address not in self._tainted and read.address not in self._fencing
        self.world.require(1, clean, lambda: f"{what} goes through an engine that waits for its fence")

    def rule_1_no_done_before_the_fence(self, request: str, load: _Load) -> None:
        self.world.require(1, not load.failed, lambda: f"{request}: Done after a read of it has failed")

    def rule_1_abort_is_said_when_no_read_runs(self, request: str, load: _Load) -> None:
        quiet = not self._runs(request) and not load.unfenced
        self.world.require(1, quiet, lambda: f"{request}: Abort while {self._runs(request)} run, {load.unfenced} wait")

    def rule_1_no_report_before_the_fence(self, report: Report, load: _Load) -> None:
        runs = self._runs(report.request)
        self.world.require(1, not runs, lambda: f"{report.request} is reported while {runs} run")
        waits = load.unfenced
        self.world.require(1, not waits, lambda: f"{report.request} is reported, {waits} are not fenced")

    def rule_1_an_engine_is_fenced_when_quiet_and_once(self, address: str) -> None:
        runs = [read for read, (_, a) in self.running.items() if a == address]
        self.world.require(1, not runs, lambda: f"the engine of {address} is fenced while {runs} run")
        self.world.require(1, address not in self._fencing, lambda: f"the engine of {address} is fenced twice")

    def rule_3_everything_held_has_a_deadline(self) -> None:
        now, slack = self.process.clock(), _SLACK_S + self.process.paused_s
        for request, load in self.loads.items():
            most = load.since + self.limits.load_deadline_s + slack
            self.world.require(3, now < most, lambda r=request: f"load {r} outlives its deadline")
        wait = self.admission.admission_deadline_s + self.admission.claim_hold_s
        for request, since in self._asked_at.items():
            self.world.require(3, now < since + wait + slack, lambda r=request: f"{r} waits for its claim for ever")

    def rule_3_who_cannot_be_served_is_told_at_once(self, verdict: Verdict | None) -> None:
        waits = verdict is not None and verdict.kind is VerdictKind.PENDING
        self.world.require(3, not waits, "a request waits for a peer whose circuit is open, or while this side drains")

    def rule_4_done_follows_a_good_read(self, request: str, load: _Load, address: str) -> None:
        said = len([parcel for parcel in load.dones if parcel[0] == address])
        read = load.ended.get(address, 0)
        self.world.require(4, said <= read, lambda: f"{request}: {said} parcels Done of {address}, {read} read")

    def rule_4_only_accepted_bytes_are_believed(self, report: Report, load: _Load) -> None:
        if not report.ok:
            return
        waits = load.dones - load.accepted
        self.world.require(4, not waits, lambda: f"{report.request} is believed, {waits} are not accepted")
        read = sum(load.ended.values())
        self.world.require(4, read == len(load.dones), lambda: f"{report.request} is believed before all is Done")
        self.world.require(4, not load.failed, lambda: f"{report.request} is believed after a failed read")

    def rule_7_an_engine_serves_one_life(self, read: Read, epoch: str) -> None:
        used = self._engine_epoch.setdefault(read.address, epoch)
        what = f"read {read.id} from {epoch} goes through the engine of {used}"
        self.world.require(7, used == epoch, what)

    def rule_8_misfits_do_not_pair(self, links: list[PeerLink]) -> None:
        for link in links:
            paired = link.state is LinkState.PAIRED
            self.world.require(8, not (self.misfit and paired), lambda a=link.address: f"{self.epoch} pairs with {a}")

    def rule_10_what_peers_name_is_bounded(self, links: int, most: int) -> None:
        self.world.require(10, links <= most, lambda: f"{links} links, at most {most} are wanted")
