"""The rules as they show on one life of a prefill rank, checked by a ledger that believes nothing the machine says."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from hawk_connector.protocol.messages import (
    Abort,
    Accepted,
    Claimed,
    Done,
    ForeignHello,
    Gone,
    Hello,
    Pull,
    Ready,
    Renew,
    Renewed,
    Stale,
    Welcome,
)
from hawk_connector.protocol.prefill_actions import Pack, PrefillLimits, Settle
from tests.protocol.simulated_process import Process
from tests.protocol.world import BUFFER_ADDRESS, Text

# What may pass between a deadline and its being looked at: a tick, and packs that run or wait their turn.
_SLACK_S = 15.0
_TURN_S = 2.0

_Verdict = tuple[str, str, str, int, int]  # transfer, claimant's epoch, claim, parcel, generation


def _verdict(about: Any, done: Any = None) -> _Verdict | None:
    """Which parcel a Done, or the Accepted that answers ``done``, is about."""
    if isinstance(about, Done):
        return about.transfer, about.epoch, about.claim, about.parcel, about.generation
    if isinstance(about, Accepted) and isinstance(done, Done):
        return about.transfer, about.to, about.claim, about.parcel, about.generation
    return None


class PrefillWatch:
    """``heard`` comes before the machine is told, ``said`` for each message that it answers, ``answered`` after."""

    def __init__(self, process: Process, epoch: str, limits: PrefillLimits, name: str) -> None:
        self.process, self.epoch, self.limits, self.name = process, epoch, limits, name
        self.world = process.world
        self.texts: dict[str, Text] = {}
        self.claims: dict[str, tuple[str, str]] = {}
        self.ended_at: dict[str, float] = {}
        self._accepted: set[_Verdict | None] = set()
        self._lease_until: dict[str, float] = {}
        self._progress: dict[str, float] = {}  # when a finished request last came nearer to being packed
        self._poisoned: set[str] = set()
        self._late: set[str] = set()  # begun while it drains
        self._offered: dict[int, tuple[str, int, int]] = {}  # region -> transfer, parcel, bytes: the claimant may read
        self._out: dict[int, Pack] = {}
        self._settles: dict[int, str] = {}  # jobs that pack nothing, and their transfers
        self._in_place: set[tuple[str, int, int]] = set()  # transfer, parcel, generation of offers of vLLM's own blocks
        self._void: set[tuple[str, int, int]] = set()  # those whose blocks vLLM has taken back
        self.draining = False
        self._pulls: dict[tuple[str, str, str], Pull] = {}  # one may be answered later, when its transfer begins
        self._heard: Any = None
        self._said: list[Any] = []

    # --- what happens

    def begun(self, transfer: str, text: Text) -> None:
        self.texts.setdefault(transfer, text)
        if self.draining:
            self._late.add(transfer)

    def finished(self, transfer: str) -> None:
        now = self.process.clock()
        self._lease_until.setdefault(transfer, now + self.limits.lease_s)
        self._progress[transfer] = now

    def reset(self) -> None:
        self._poisoned |= self.texts.keys()

    def heard(self, message: Any) -> None:
        self._heard, self._said = message, []
        if isinstance(message, Pull) and message.to == self.epoch:
            self._pulls[message.transfer, message.epoch, message.claim] = message
        if isinstance(message, Abort) and self.claims.get(message.transfer) == (message.epoch, message.claim):
            self._unprotect(message.transfer)

    def answered(self) -> None:
        message, self._heard = self._heard, None
        self.rule_7_messages_for_another_life_change_nothing(message)
        self.rule_2_verdicts_are_remembered(message)
        if isinstance(message, (Pull, Renew, Done)):
            now, transfer = self.process.clock(), message.transfer
            mine = self.claims.get(transfer) == (message.epoch, message.claim)
            until = self._lease_until.get(transfer)
            if mine and message.to == self.epoch and until is not None and now < until:
                self._lease_until[transfer] = max(until, now + self.limits.lease_s)

    def said(
        self,
        message: Any,
        offered: Callable[[Ready], bytes],
        expected: Callable[[Text, int, int], bytes | None],
    ) -> None:
        """``offered(ready)``: the parcel's bytes as a peer would read them now.  ``expected(text, parcel, nbytes)``: as
        worked out from the prompt."""
        self._said.append(message)
        if isinstance(message, Welcome):
            self.rule_8_no_misfit_is_welcome(message.to)
        elif isinstance(message, Claimed):
            self.rule_3_who_drains_takes_nothing_new(message)
            self.rule_8_no_misfit_is_welcome(message.to)
            self.rule_2_one_claimant(message)
            self.rule_2_an_expired_lease_stays_expired(message)
            self.rule_9_claims_are_bound_to_tokens(message)
            self.claims.setdefault(message.transfer, (message.to, message.claim))
            self.rule_10_one_peer_claims_no_more_than_its_share(message.to)
        elif isinstance(message, Renewed):
            self.rule_2_one_claimant(message)
            self.rule_2_an_expired_lease_stays_expired(message)
        elif isinstance(message, Ready):
            self.rule_2_one_claimant(message)
            self.rule_9_offers_are_the_prompts_own_kv(message, offered(message), expected)
            if message.blocks:
                self.rule_2_blocks_in_place_are_good_for_one_generation(message)
                self._in_place.add((message.transfer, message.parcel, message.generation))
            else:
                region = message.address - BUFFER_ADDRESS
                self._offered[region] = (message.transfer, message.parcel, message.nbytes)
        elif isinstance(message, Accepted):
            self.rule_2_one_claimant(message)
            self.rule_2_what_has_ended_is_not_accepted(message)
            self.rule_2_blocks_in_place_are_good_for_one_generation(message)
            if message.transfer in self._progress:
                self._progress[message.transfer] = self.process.clock()
            for region, (transfer, parcel, _) in list(self._offered.items()):
                if (transfer, parcel) == (message.transfer, message.parcel):
                    del self._offered[region]
        elif isinstance(message, Gone) and self.claims.get(message.transfer) == (message.to, message.claim):
            self._unprotect(message.transfer)

    def packing(self, job: Pack, capacity: int) -> None:
        self.rule_2_a_region_is_reused_only_when_free(job, capacity)
        self._out[job.job] = job

    def settling(self, job: Settle) -> None:
        self._settles[job.job] = job.transfer

    def packed(self, job: int) -> None:
        transfer = self._settles.pop(job) if job in self._settles else self._out.pop(job).transfer
        if transfer in self._progress:
            self._progress[transfer] = self.process.clock()

    def preempted(self, transfer: str) -> None:
        """vLLM takes the request's blocks back."""
        self._void |= {key for key in self._in_place if key[0] == transfer}

    def ended(self, transfer: str) -> None:
        self.world.require(6, transfer not in self.ended_at, lambda: f"{transfer} ended twice")
        self.ended_at[transfer] = self.process.clock()
        self._unprotect(transfer)

    def skipped(self, transfer: str, parcel_blocks: int, first_block: int) -> None:
        """A claimant has said that it has these blocks."""
        for region, (owner, parcel, _) in list(self._offered.items()):
            if owner == transfer and (parcel + 1) * parcel_blocks <= first_block:
                del self._offered[region]

    def _unprotect(self, transfer: str) -> None:
        for region, (owner, _, _) in list(self._offered.items()):
            if owner == transfer:
                del self._offered[region]

    # --- the rules

    def rule_1_blocks_are_given_back_when_no_pack_reads_them(self, transfer: str) -> None:
        out = [pack.job for pack in self._out.values() if pack.transfer == transfer]
        out += [job for job, owner in self._settles.items() if owner == transfer]
        self.world.require(1, not out, lambda: f"{self.name}: blocks of {transfer} given back while packs {out} read")
        self.preempted(transfer)

    def rule_2_one_claimant(self, message: Claimed | Renewed | Ready | Accepted) -> None:
        claim = (message.to, message.claim)
        unclaimed = claim if isinstance(message, Claimed) else None
        first = self.claims.get(message.transfer, unclaimed)
        what = f"{self.name}: {type(message).__name__} of {message.transfer} goes to {claim}, claimed by {first}"
        self.world.require(2, first == claim, what)

    def rule_2_an_expired_lease_stays_expired(self, message: Claimed | Renewed | Accepted) -> None:
        until, now = self._lease_until.get(message.transfer), self.process.clock()
        what = f"{self.name}: {type(message).__name__} of {message.transfer} at {now}, its lease ended at {until}"
        self.world.require(2, until is None or now < until, what)

    def rule_2_verdicts_are_remembered(self, done: Any) -> None:
        """What was accepted once is answered so again; a Gone may come beside it, that ends the rest."""
        key = _verdict(done)
        if key not in self._accepted:
            if key is not None and any(_verdict(said, done) == key for said in self._said):
                self._accepted.add(key)
            return
        ended = self.ended_at.get(done.transfer)
        forgotten = ended is not None and self.process.clock() >= ended + self.limits.verdict_keep_s
        again = any(isinstance(said, Accepted) for said in self._said)
        self.world.require(2, again or forgotten, lambda: f"{self.name}: {done}, accepted before, gets {self._said}")

    def rule_2_what_has_ended_is_not_accepted(self, message: Accepted) -> None:
        if _verdict(message, self._heard) in self._accepted:
            return
        self.rule_2_an_expired_lease_stays_expired(message)
        fresh = message.transfer not in self.ended_at and message.transfer not in self._poisoned
        self.world.require(2, fresh, lambda: f"{self.name}: {message} of a transfer that has ended")

    def rule_2_a_region_is_reused_only_when_free(self, job: Pack, capacity: int) -> None:
        end = job.region + job.plan.nbytes
        inside = job.region >= 0 and end <= capacity
        self.world.require(2, inside, lambda: f"{self.name}: {job} lies outside the send buffer")
        taken = [(p.region, p.plan.nbytes) for p in self._out.values()]
        taken += [(region, nbytes) for region, (_, _, nbytes) in self._offered.items()]
        for start, length in taken:
            apart = end <= start or start + length <= job.region
            what = f"{self.name}: region {job.region} is packed for {job.transfer}, another parcel may be read there"
            self.world.require(2, apart, what)

    def rule_3_everything_held_has_a_deadline(self, held: Iterable[str]) -> None:
        """``held``: vLLM's finished requests whose blocks are still kept for this rank."""
        now, slack = self.process.clock(), _SLACK_S + self.process.paused_s
        for transfer, until in self._lease_until.items():
            if transfer not in self.ended_at:
                self.world.require(3, now < until + slack, lambda t=transfer: f"{self.name}: {t} outlives its lease")
        waits = self.limits.buffer_wait_s + _TURN_S + 0.4 * len(self._out) + self.process.paused_s
        for transfer in held:
            since = self._progress.get(transfer)
            in_time = since is None or now < since + waits
            self.world.require(
                3, in_time, lambda t=transfer: f"{self.name}: blocks of {t} wait too long for the buffer"
            )

    def rule_3_who_drains_takes_nothing_new(self, message: Claimed) -> None:
        late = message.transfer in self._late
        self.world.require(3, not late, lambda: f"{self.name}: {message.transfer} was begun while it drains")

    def rule_7_messages_for_another_life_change_nothing(self, message: Any) -> None:
        if message is None or isinstance(message, (Hello, ForeignHello)) or message.to == self.epoch:
            return
        honest = all(isinstance(said, Stale) for said in self._said)
        self.world.require(7, honest, lambda: f"{self.name}: {message} is for another life, answered {self._said}")

    def rule_8_no_misfit_is_welcome(self, epoch: str) -> None:
        self.world.require(8, epoch not in self.world.misfits, lambda: f"{self.name}: {epoch} must not be paired with")

    def rule_9_claims_are_bound_to_tokens(self, message: Claimed) -> None:
        pull = self._pulls.get((message.transfer, message.to, message.claim))
        text = self.texts.get(message.transfer)
        bound = text is not None and pull is not None
        bound = bound and (pull.digest, pull.tokens) == (text.digest, text.tokens)  # type: ignore[union-attr]
        known = self.claims.get(message.transfer) == (message.to, message.claim)  # a repeat says no more than the first
        self.world.require(9, bound or known, lambda: f"{self.name}: {pull} gets a claim on the KV of {text}")
        fresh = message.transfer not in self._poisoned
        self.world.require(9, fresh, lambda: f"{self.name}: {message.transfer} is from before the cache was reset")

    def rule_2_blocks_in_place_are_good_for_one_generation(self, message: Ready | Accepted) -> None:
        """What is read in vLLM's own blocks is neither offered nor accepted once these blocks are vLLM's again."""
        if isinstance(message, Accepted) and _verdict(message, self._heard) in self._accepted:
            return
        void = (message.transfer, message.parcel, message.generation) in self._void
        self.world.require(2, not void, lambda: f"{self.name}: {message}, and vLLM has taken its blocks back")

    def rule_9_offers_are_the_prompts_own_kv(
        self, message: Ready, found: bytes, expected: Callable[[Text, int, int], bytes | None]
    ) -> None:
        own = expected(self.texts[message.transfer], message.parcel, message.nbytes)
        what = f"{self.name}: parcel {message.parcel} of {message.transfer} is offered with other bytes than its KV"
        self.world.require(9, own is None or found == own, what)

    def rule_10_what_peers_send_is_bounded(self, held: Mapping[str, int], peers: int) -> None:
        limits = self.limits
        bounded = held["transfers"] <= limits.max_transfers and peers <= 2 * limits.max_peers
        self.world.require(10, bounded, lambda: f"{self.name}: {held} with {peers} peers is past {limits}")

    def rule_10_one_peer_claims_no_more_than_its_share(self, epoch: str) -> None:
        live = [t for t, (owner, _) in self.claims.items() if owner == epoch and t not in self.ended_at]
        few = len(live) <= self.limits.max_transfers_per_peer
        self.world.require(10, few, lambda: f"{self.name}: {epoch} has claimed {len(live)} transfers")
