"""Every phase of a transfer meets every fault: what comes of the request, and that nothing is left of it.

A cell of EXPECTED is what decode's vLLM hears of the request: ``ok``, ``aborted``, ``failed:kind`` (its load),
``own:kind`` (it computes its own KV, nothing was loaded) or ``-`` (it was never asked for, or its process is gone).
Whatever it is, each cell also shows rules 1 to 5: see ``Story.end``.
"""

from __future__ import annotations

import pytest

from hawk_connector.protocol.admission import AdmissionProtocol, VerdictKind
from hawk_connector.protocol.decode import DecodeProtocol
from hawk_connector.protocol.messages import Accepted
from hawk_connector.series import Failure
from tests.protocol.table import ADMISSION, DECODE, OTHER, P2, T, Table
from tests.protocol.world import BLOCK

pytestmark = pytest.mark.slow

D2 = "e" * 32
TOKENS = 4 * BLOCK  # two parcels
BLOCK_BYTES = 2 * 2 * 1088

PHASES = ("before", "queued", "packing", "offered", "reading", "landing", "accepted", "decoding")
FAULTS = (
    "nothing",
    "prefill aborts",
    "decode aborts",
    "prefill restarts",
    "decode restarts",
    "prefill is silent",
    "silence for 3 s",
    "a read fails",
    "other bytes",
    "preemption",
    "cache reset",
    "prefill drains",
    "decode drains",
    "an hour passes",
)

# By fault, in the order of PHASES.
EXPECTED = {
    "nothing": "ok ok ok ok ok ok ok ok",
    "prefill aborts": "own:aborted failed:aborted failed:aborted failed:aborted failed:aborted failed:aborted ok ok",
    "decode aborts": "- aborted aborted aborted aborted aborted ok ok",
    "prefill restarts": "own:restarted failed:restarted failed:restarted failed:restarted failed:restarted "
    "failed:restarted ok ok",
    "decode restarts": "ok - - - - - ok ok",
    "prefill is silent": "own:no_answer failed:no_answer failed:no_answer failed:no_answer failed:no_answer "
    "failed:no_answer ok ok",
    "silence for 3 s": "ok ok ok ok ok ok ok ok",
    "a read fails": "failed:read failed:read failed:read failed:read failed:read ok ok ok",
    "other bytes": "failed:corrupt failed:corrupt failed:corrupt failed:corrupt failed:corrupt ok ok ok",
    "preemption": "ok ok ok ok ok ok ok ok",
    "cache reset": "own:expired failed:expired failed:expired failed:expired failed:expired failed:expired ok ok",
    "prefill drains": "ok ok ok ok ok ok ok ok",
    "decode drains": "own:draining ok ok ok ok ok ok ok",
    "an hour passes": "ok failed:deadline failed:deadline failed:deadline failed:deadline failed:deadline ok ok",
}


class Story:
    """One request from prefill to decode on the table; both vLLMs do at once what they are asked for."""

    def __init__(self) -> None:
        # Room for four parcels of two blocks.
        self.table = Table(buffer_bytes=4 * (2 * BLOCK_BYTES + 256)).pair()
        self.asked = self.loading = self.wanted = False
        self.prefill_alive = self.decode_alive = True
        self.packs_end = self.reads_end = True
        self.bad_reads: Failure | None = None
        self.fence_due = False
        self.heard: list[str] = []
        self.accepted_at_report = 0

    # --- vLLM

    def turn(self) -> None:
        table = self.table
        table.exchange()
        while self.packs_end and table.packs:
            table.prefill.packed(table.packs.pop(0).job, True)
            table.exchange()
        while self.reads_end and table.reads:
            read = table.reads.pop(0)
            if self.bad_reads is not None and read.request == "r1":
                self.fence_due = True
                table.worker.read_ended(read.id, False, "fault", failure=self.bad_reads)
            else:
                table.worker.read_ended(read.id, True)
            table.exchange()
        while table.fences:
            self.hear()
            self.fence_due = False
            table.worker.fenced(table.fences.pop().address)
            table.exchange()
        self.hear()
        verdict = table.admission.verdict("r1") if self.asked else None
        if verdict is None or verdict.kind is VerdictKind.PENDING:
            return
        if verdict.kind is VerdictKind.CLAIMED:
            assert table.admission.hand_over("r1") is not None
            self.loading = True
            table.load(tokens=TOKENS)
        else:
            table.admission.drop("r1")
            self.heard.append(f"own:{verdict.failure}")
        self.asked = False

    def hear(self) -> None:
        for report in self.table.reports:
            if report.request == "r1":
                assert not [read for read in self.table.reads if read.request == "r1"], "rule 1: a read of it runs"
                assert not self.fence_due, "rule 1: a read of it has failed and is not fenced"
                self.heard.append("ok" if report.ok else "aborted" if report.aborted else f"failed:{report.failure}")
                self.accepted_at_report = len({m.parcel for m in self.table.said(Accepted) if m.transfer == T})
        self.table.reports.clear()

    def ask(self) -> None:
        self.asked = self.wanted = True
        self.table.ask(tokens=TOKENS)

    def pass_time(self, seconds: float) -> None:
        for _ in range(int(seconds / 0.25)):
            self.turn()
            self.table.wait(0.25)
        self.turn()

    # --- phases

    def reach(self, phase: str) -> None:
        table = self.table
        if phase in ("queued", "offered"):
            # Another request's parcels: they fill the buffer, or keep all of decode's readers busy.
            table.compute(OTHER, (8 if phase == "queued" else 4) * BLOCK)
            table.load(2, transfer=OTHER, tokens=(8 if phase == "queued" else 4) * BLOCK)
            table.pack()
        self.packs_end = phase != "packing"
        self.reads_end = phase in ("accepted", "decoding", "landing")
        if phase == "landing":
            table.lose = lambda message: isinstance(message, Accepted)
        table.compute(tokens=TOKENS, finish=False)
        self.turn()
        if phase != "before":
            self.ask()
            self.turn()
            self.turn()
        if phase == "decoding":
            table.prefill.finished(T)
            self.turn()
        fetches = table.worker.live["r1"].ranks[0].fetches if "r1" in table.worker.live else None
        states = {fetch.state.name for fetch in fetches or ()}
        assert (
            states
            == {
                "before": set(),
                "queued": {"AWAITED"},
                "packing": {"AWAITED"},
                "offered": {"OFFERED"},
                "reading": {"READING"},
                "landing": {"READ"},
                "accepted": set(),
                "decoding": set(),
            }[phase]
        ), states

    # --- faults

    def strike(self, fault: str) -> None:
        table = self.table
        if fault == "prefill aborts":
            table.prefill.abandoned(T)
        elif fault == "decode aborts":
            table.admission.drop("r1")
            table.worker.abort("r1")
            self.asked = False
            if not self.wanted:
                self.decode_alive = False  # its client is gone: nobody will ask
        elif fault == "prefill restarts":
            table.prefill = table.new_prefill(P2)
            table.packs.clear()
            self.prefill_alive = False
        elif fault == "decode restarts":
            table.worker = DecodeProtocol(D2, table.facts, DECODE, table.time)
            table.admission = AdmissionProtocol(D2, table.facts, ADMISSION, table.time)
            table.reads.clear()
            table.pair()
            self.asked = False
            self.decode_alive = not self.wanted
        elif fault == "prefill is silent":
            table.lose = lambda message: True
        elif fault == "silence for 3 s":
            table.lose = lambda message: True
            self.pass_time(3.0)
            table.lose = lambda message: False
        elif fault in ("a read fails", "other bytes"):
            self.bad_reads = "read" if fault == "a read fails" else "corrupt"
        elif fault == "preemption":
            table.prefill.preempted(T)
            table.exchange()
            table.prefill.computed(T, TOKENS)
        elif fault == "cache reset":
            table.prefill.reset()
        elif fault == "prefill drains":
            table.prefill.drain()
        elif fault == "decode drains":
            table.admission.drain()
        elif fault == "an hour passes":
            table.wait(0.25 + 3600.0, step=3600.0)
        if fault != "prefill is silent":
            table.lose = lambda message: False

    # --- the end

    def end(self) -> str:
        """Everything ends: the first request, and what stood in its way."""
        table = self.table
        self.turn()
        self.packs_end = self.reads_end = True
        if self.prefill_alive:
            table.prefill.finished(T)
        if not self.wanted and self.decode_alive:
            self.ask()
        self.pass_time(200.0)
        assert len(self.heard) <= 1, "rule 1: reported once"
        outcome = self.heard[0] if self.heard else "-"
        if outcome == "ok":
            assert self.accepted_at_report == 2, "rule 4: bytes are believed only where all of them were accepted"
        assert table.held() == {}, "rule 5: idle means empty"
        if self.prefill_alive:
            assert table.released.count(T) == 1, "rule 3: vLLM has its blocks back, once"
        return outcome


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("phase", PHASES)
def test_every_fault_in_every_phase(phase: str, fault: str) -> None:
    story = Story()
    story.reach(phase)
    story.strike(fault)
    expected = dict(zip(PHASES, EXPECTED[fault].split(), strict=True))
    assert story.end() == expected[phase]


def test_the_table_is_complete() -> None:
    assert set(EXPECTED) == set(FAULTS)
    assert all(len(row.split()) == len(PHASES) for row in EXPECTED.values())
