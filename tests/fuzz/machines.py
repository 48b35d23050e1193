"""The state machines under frames that decode: an attacker that has paired, knows ids, and may even guess.

Whatever comes, nothing is raised, what is held stays within its limits, and past the deadlines nothing is held.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, get_args

from hawk_connector.protocol import messages
from hawk_connector.protocol.decode_actions import Fence, Read, SendTo
from hawk_connector.protocol.messages import PROTOCOL_VERSION, Hello
from hawk_connector.protocol.prefill_actions import Hash, Pack, PrefillLimits, Send, Settle
from hawk_connector.protocol.ticket import RankAddress, Ticket
from tests.fuzz.frames import FrameSource
from tests.protocol.table import ADDRESS, DIGEST, P2, D, P, Table, claim
from tests.protocol.world import BLOCK

__all__ = ["Machines"]

_FROM_DECODE, _FROM_PREFILL = get_args(messages.DecodeMessage), get_args(messages.PrefillMessage)
_LIMITS = PrefillLimits(
    parcel_tokens=2 * BLOCK, lease_s=30.0, buffer_wait_s=60.0, verdict_keep_s=60.0, max_transfers=16, max_peers=4
)


class Machines:
    """A table with live transfers and loads; ``feed`` gives a message to whichever machines take its kind."""

    def __init__(self, source: FrameSource) -> None:
        self.source, self.rng = source, source.rng
        self.table = Table(limits=_LIMITS, buffer_bytes=1 << 16).pair()
        self.fed = 0
        self._requests = 0
        self.seen: Counter[str] = Counter()

    @staticmethod
    def epochs() -> list[str]:
        return [P, P2, D]

    @staticmethod
    def transfers() -> list[str]:
        """Ids of transfers, which are the claims' nonces here too: the attacker may guess right."""
        return [claim(n) for n in range(1, 9)]

    def feed(self, message: Any) -> None:
        table = self.table
        self.fed += 1
        if isinstance(message, _FROM_DECODE) and (isinstance(message, Hello) or hasattr(message, "to")):
            table.prefill.receive(self.rng.choice(["worker", "admission", "a stranger"]), message)
        elif isinstance(message, _FROM_PREFILL) and hasattr(message, "to"):
            self.rng.choice([table.worker, table.admission]).receive(ADDRESS, message)
        if self.fed % 5 == 0:
            self._live()
        self._carry_out()
        self._check()

    def _live(self) -> None:
        """Requests come and go meanwhile, and time passes."""
        table, rng = self.table, self.rng
        transfer = rng.choice(self.transfers())
        tokens = (1, 31, 64, 129)[int(transfer, 16) % 4]
        table.prefill.begin(transfer, DIGEST, tokens)
        blocks = rng.choice([-(-tokens // BLOCK), 0])
        table.prefill.computed(transfer, rng.choice([tokens, tokens // 2]), tuple(range(blocks)))
        end = rng.choices([table.prefill.finished, table.prefill.abandoned, table.prefill.preempted], [6, 1, 1])[0]
        end(transfer)
        if len(table.worker._loads) < 8:
            self._requests += 1
            ticket = Ticket(transfer, rng.choice(self.transfers()), DIGEST, tokens, (RankAddress(ADDRESS, P),))
            name = f"fuzz-{self._requests}"
            rng.choice(
                [table.admission.ask, lambda r, t: table.worker.load(r, t, 0, tuple(range(-(-tokens // BLOCK))))]
            )(name, ticket)
        for request in list(table.admission._asked):
            if rng.random() < 0.3:
                table.admission.drop(request)
        table.time.now += rng.choices([0.0, 0.1, 1.0, 20.0], [4, 4, 4, 1])[0]
        table.prefill.tick()
        table.worker.tick()
        table.admission.tick()

    def _carry_out(self) -> None:
        """What the machines ask for is done, and most of what they say to each other arrives."""
        table, rng = self.table, self.rng
        for action in table.prefill.take_actions():
            self.seen[type(action).__name__] += 1
            if isinstance(action, (Pack, Settle)):
                table.prefill.packed(action.job, rng.random() < 0.9)
            elif isinstance(action, Hash):
                table.prefill.hashed(action.job, "0" * 32)
            elif isinstance(action, Send) and rng.random() < 0.8:
                for machine in (table.worker, table.admission):
                    machine.receive(ADDRESS, action.message)
        for done in table.worker.take_actions():
            self.seen[type(done).__name__] += 1
            if isinstance(done, Read):
                table.worker.read_ended(done.id, rng.random() < 0.7, "fuzz")
            elif isinstance(done, Fence):
                table.worker.fenced(done.address)
            elif isinstance(done, SendTo) and rng.random() < 0.8:
                table.prefill.receive("worker", done.message)
        for said in table.admission.take_actions():
            if isinstance(said, SendTo) and rng.random() < 0.8:
                table.prefill.receive("admission", said.message)
        table.worker.take_outcomes()

    def _check(self) -> None:
        table = self.table
        held = table.prefill.held()
        assert held["transfers"] <= _LIMITS.max_transfers, held
        assert held["region_bytes"] <= 1 << 16, held
        assert len(table.prefill.peers()) <= 2 * _LIMITS.max_peers
        assert len(table.worker._loads) <= 9 and len(table.worker.links) == len(table.admission.links) == 1

    def end(self) -> None:
        """Every deadline passes; then nothing may be left."""
        table = self.table
        for request in list(table.admission._asked):
            table.admission.drop(request)
        for transfer in list(table.prefill._transfers):
            table.prefill.abandoned(transfer)
        for _ in range(300):
            table.time.now += 1.0
            for machine in (table.prefill, table.worker, table.admission):
                machine.tick()
            self._carry_out()
        assert table.held() == {}, f"held after every deadline: {table.held()}"
        table.prefill.receive("worker", Hello(epoch=D, version=PROTOCOL_VERSION, facts=table.facts, number=1))
        table.prefill.take_actions()
