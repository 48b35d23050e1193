"""One prefill rank, one decode worker and its admission at one table: messages are handed over by hand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from hawk_connector.plan.pairing import DecodeFacts
from hawk_connector.protocol.admission import AdmissionLimits, AdmissionProtocol, Verdict
from hawk_connector.protocol.decode import DecodeProtocol
from hawk_connector.protocol.decode_actions import DecodeLimits, Disconnect, Fence, Read, Report, SendTo, StopRead
from hawk_connector.protocol.link import LinkLimits
from hawk_connector.protocol.messages import decode_message, encode
from hawk_connector.protocol.prefill import PrefillProtocol
from hawk_connector.protocol.prefill_actions import Ended, Hash, Pack, PrefillLimits, ReleaseBlocks, Send, Settle
from hawk_connector.protocol.ticket import RankAddress, Ticket
from tests.protocol.world import BLOCK, LIMITS, decode_facts, prefill_facts, prefill_protocol

ADDRESS = "prefill-0:1"
P, P2, D = "a" * 32, "b" * 32, "d" * 32
T, OTHER = "1" * 32, "2" * 32
DIGEST, WRONG = "5" * 64, "6" * 64
LINK = LinkLimits(hello_deadline_s=5.0, resend_s=0.5, renew_s=5.0)
DECODE = DecodeLimits(link=LINK, admission_deadline_s=10.0, load_deadline_s=120.0, reads=2)
ADMISSION = AdmissionLimits(link=LINK, admission_deadline_s=10.0, claim_hold_s=120.0)


class Time:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def claim(n: int) -> str:
    return f"{n:032x}"


class Table:
    """``lose`` says which messages never arrive; what the machines want done is in the lists, until taken."""

    def __init__(
        self,
        *,
        facts: DecodeFacts | None = None,
        buffer_bytes: int = 1 << 20,
        limits: PrefillLimits = LIMITS,
        epoch: str = D,
    ) -> None:
        self.time = Time()
        self.facts = facts or decode_facts()
        self.buffer_bytes, self.limits = buffer_bytes, limits
        self.prefill: PrefillProtocol = self.new_prefill(P)
        self.worker = DecodeProtocol(epoch, self.facts, DECODE, self.time)
        self.admission = AdmissionProtocol(epoch, self.facts, ADMISSION, self.time)
        self.lose: Callable[[Any], bool] = lambda message: False
        self.sent: list[Any] = []
        self.packs: list[Pack] = []
        self.settles: list[Settle] = []
        self.hashes: list[Hash] = []
        self.released: list[str] = []
        self.ended: list[Ended] = []
        self.reads: list[Read] = []
        self.fences: list[Fence] = []
        self.stops: list[StopRead] = []
        self.reports: list[Report] = []
        self.disconnects: list[str] = []

    def new_prefill(self, epoch: str) -> PrefillProtocol:
        return prefill_protocol(prefill_facts(buffer_bytes=self.buffer_bytes), epoch, self.time, self.limits)

    # --- handing over

    def exchange(self) -> None:
        """Until nobody has anything more to say."""
        while self._turn():
            pass

    def _turn(self) -> bool:
        moved = False
        for action in self.worker.take_actions():
            moved = True
            if isinstance(action, SendTo):
                self._to_prefill("worker", action.message)
            elif isinstance(action, Read):
                self.reads.append(action)
            elif isinstance(action, Fence):
                self.fences.append(action)
            elif isinstance(action, StopRead):
                self.stops.append(action)
            elif isinstance(action, Disconnect):
                self.disconnects.append(action.address)
            else:
                self.reports.append(action)
        for said in self.admission.take_actions():
            moved = True
            if isinstance(said, SendTo):
                self._to_prefill("admission", said.message)
            else:
                self.disconnects.append(said.address)
        for done in self.prefill.take_actions():
            moved = True
            if isinstance(done, Send):
                self._to_decode(done)
            elif isinstance(done, Pack):
                self.packs.append(done)
            elif isinstance(done, Settle):
                self.settles.append(done)
            elif isinstance(done, Hash):
                self.hashes.append(done)
            elif isinstance(done, ReleaseBlocks):
                self.released.append(done.transfer)
            else:
                self.ended.append(done)
        return moved

    def _to_prefill(self, identity: str, message: Any) -> None:
        self.sent.append(message)
        if not self.lose(message):
            self.prefill.receive(identity, decode_message(encode(message)))  # type: ignore[arg-type]

    def _to_decode(self, action: Send) -> None:
        self.sent.append(action.message)
        if not self.lose(action.message):
            machine = self.worker if action.identity == "worker" else self.admission
            machine.receive(ADDRESS, decode_message(encode(action.message)))  # type: ignore[arg-type]

    def wait(self, seconds: float, step: float = 0.25) -> None:
        """Lets time pass in ``step`` s, everybody ticking and talking."""
        end = self.time.now + seconds
        while self.time.now < end:
            self.time.now = min(end, self.time.now + step)
            self.prefill.tick()
            self.worker.tick()
            self.admission.tick()
            self.exchange()

    def said(self, kind: type) -> list[Any]:
        return [m for m in self.sent if isinstance(m, kind)]

    # --- usual moves

    def pair(self) -> Table:
        self.worker.connect(ADDRESS)
        self.admission.connect(ADDRESS)
        self.exchange()
        return self

    def compute(self, transfer: str = T, tokens: int = 4 * BLOCK, digest: str = DIGEST, *, finish: bool = True) -> None:
        self.prefill.begin(transfer, digest, tokens)
        self.prefill.computed(transfer, tokens, tuple(range(7, 7 - (-tokens // BLOCK))))
        if finish:
            self.prefill.finished(transfer)
        self.exchange()

    def pack(self, ok: bool = True) -> None:
        """Every pack that is out ends, and those that follow."""
        while self.packs:
            self.prefill.packed(self.packs.pop(0).job, ok)
            self.exchange()

    def settle(self) -> None:
        """What the steps have written is in memory."""
        while self.settles:
            self.prefill.packed(self.settles.pop(0).job, True)
            self.exchange()

    def ticket(
        self, n: int = 1, transfer: str = T, tokens: int = 4 * BLOCK, digest: str = DIGEST, epoch: str = P
    ) -> Ticket:
        return Ticket(transfer, claim(n), digest, tokens, (RankAddress(ADDRESS, epoch),))

    def ask(self, n: int = 1, **fields: Any) -> Verdict:
        self.admission.ask(f"r{n}", self.ticket(n, **fields))
        self.exchange()
        verdict = self.admission.verdict(f"r{n}")
        assert verdict is not None
        return verdict

    def load(self, n: int = 1, first_block: int = 0, **fields: Any) -> None:
        ticket = self.ticket(n, **fields)
        blocks = tuple(range(100 * n, 100 * n - (-ticket.tokens // BLOCK) - first_block))
        self.worker.load(f"r{n}", ticket, first_block, blocks)
        self.exchange()

    def read(self, ok: bool = True) -> None:
        """The oldest read ends."""
        self.worker.read_ended(self.reads.pop(0).id, ok, "" if ok else "broken")
        self.exchange()

    def held(self) -> dict[str, int]:
        """What anybody holds that is not nothing."""
        total: Counter[str] = Counter()
        for machine in (self.prefill, self.worker, self.admission):
            total.update(machine.held())
        return {name: n for name, n in total.items() if n}
