"""Every mutant, by the rule that it breaks.  Each rule has at least one, so that each is shown to be able to fail."""

from __future__ import annotations

from tests.mutations.mutant import Edit, Mutant

_PREFILL, _DECODE, _ADMISSION = "protocol/prefill.py", "protocol/decode.py", "protocol/admission.py"
_READS, _LEASE, _LINK, _MESSAGES = (
    "protocol/read_book.py",
    "protocol/lease.py",
    "protocol/link.py",
    "protocol/messages.py",
)
_PAIRING = "plan/pairing.py"


def _mutant(name: str, rule: int | tuple[int, ...], *edits: tuple[str, str, str]) -> Mutant:
    return Mutant(name, rule, tuple(Edit(*edit) for edit in edits))


MUTANTS = (
    # --- 1. Fence first
    _mutant(
        "retry before the fence",
        1,
        (_READS, "return address not in self._asked_for and self", "return self"),
    ),
    _mutant(
        "report before the fence",
        1,
        (_DECODE, "any(rank.reading or rank.read_failed for", "any(rank.reading for"),
    ),
    _mutant(
        "report while reads run",
        1,
        (_DECODE, "any(rank.reading or rank.read_failed for", "any(rank.read_failed for"),
    ),
    _mutant(
        "fence while reads run",
        1,
        (_READS, "is not False or self._running[address]:", "is not False:"),
    ),
    _mutant(
        "Done after a read has failed",
        1,
        (
            _DECODE,
            "        elif load.failure is None:\n            now = self._clock()\n",
            "        else:\n            now = self._clock()\n",
        ),
    ),
    _mutant(
        "blocks given back while a pack reads them",
        1,
        (_PREFILL, "if ended_for_vllm and idle and not transfer", "if ended_for_vllm and not transfer"),
    ),
    # --- 2. One claimant
    _mutant(
        "a second claim let in",
        2,
        (_PREFILL, "        elif transfer.claim != claim:\n", "        elif False:\n"),
    ),
    _mutant(
        "anybody's Done, Renew and Abort are obeyed",
        2,
        (_PREFILL, "elif transfer.claim != Claim(message.epoch, message.claim):", "elif transfer.claim is None:"),
    ),
    _mutant(
        "a verdict forgotten",
        2,
        ("protocol/graveyard.py", "for p in transfer.parcels if p.state is ParcelState.ACCEPTED)", "for p in ())"),
    ),
    _mutant(
        "Renew revives an expired lease",
        2,
        (
            _PREFILL,
            "        if transfer is not None:\n            self._expire(transfer)\n",
            "        if transfer is not None:\n",
        ),
        (_LEASE, "        if self.expired(now):\n            return False\n", ""),
    ),
    _mutant(
        "a region is free at Done, not at Accepted",
        2,
        (
            _PREFILL,
            "        if isinstance(message, Pull):\n            self._pull(",
            "        if isinstance(message, Done) and message.parcel < len(transfer.parcels):\n"
            "            self._parcels.free(transfer.parcels[message.parcel])\n"
            "        if isinstance(message, Pull):\n            self._pull(",
        ),
    ),
    _mutant(
        "blocks that are read in place are given back at the offer",
        (2, 9),
        (
            "protocol/transfer.py",
            "return self.state.needs_blocks or (self.in_place and self.state is ParcelState.OFFERED)",
            "return self.state.needs_blocks",
        ),
    ),
    _mutant(
        "a preemption leaves a claimed offer in place",
        2,
        (_PREFILL, " or transfer.claim is None or parcel.in_place:", " or transfer.claim is None:"),
    ),
    _mutant(
        "a preemption leaves the generation as it was",
        2,
        (_PREFILL, "        transfer.generation += 1\n", ""),
    ),
    # --- 3. Everything held has a deadline
    _mutant(
        "a lease that never ends",
        (2, 3),
        (_PREFILL, "times = [transfer.lease.until] if transfer.lease is not None else []", "times: list[float] = []"),
    ),
    _mutant(
        "a wait for the buffer that never ends",
        3,
        (_PREFILL, "if transfer.wait_until is not None and not transfer.packed:", "if False:"),
    ),
    _mutant(
        "a load without a deadline",
        3,
        (_DECODE, "if load.failure is None and now >= load.deadline:", "if False:"),
    ),
    _mutant(
        "an admission without a deadline",
        3,
        (_ADMISSION, "is VerdictKind.PENDING and now >= asked.deadline:", "is VerdictKind.PENDING and False:"),
    ),
    _mutant(
        "requests wait for a peer whose circuit is open",
        3,
        (_ADMISSION, "            if shut is not None:\n", "            if False:\n"),
    ),
    _mutant(
        "a side that drains offers what is new",
        3,
        (_PREFILL, "if self.draining or transfer_id in", "if transfer_id in"),
    ),
    # --- 4. A failed load never reaches decode
    _mutant(
        "bytes believed before Accepted",
        4,
        (
            _DECODE,
            "            self._say_done(load, rank, fetch)\n        self._fence_when_quiet(address)",
            "            self._say_done(load, rank, fetch)\n            fetch.state = FetchState.ACCEPTED\n"
            "        self._fence_when_quiet(address)",
        ),
    ),
    _mutant(
        "a failed read taken for a good one",
        (1, 4),
        (
            _DECODE,
            "        elif not ok:\n            fetch.read_failed = True",
            "        elif False:\n            fetch.read_failed = True",
        ),
    ),
    _mutant(
        "all ranks taken for complete once one is",
        4,
        (
            "protocol/load.py",
            "return all(rank.complete for rank in self.ranks)",
            "return any(rank.complete for rank in self.ranks)",
        ),
    ),
    # --- 5. Idle means empty
    _mutant(
        "the region of a failed pack is lost",
        5,
        (_PREFILL, "                self._parcels.release(done.region)\n", "                pass\n"),
    ),
    _mutant(
        "a farewell that is never given up",
        5,
        ("protocol/farewells.py", "        self._said = [f for f in self._said if not f.resend.given_up(now)]\n", ""),
    ),
    _mutant(
        "an early Pull is kept for ever",
        5,
        (
            "protocol/early_pulls.py",
            "in self._waiting.values() if early.until <= now]",
            "in self._waiting.values() if False]",
        ),
    ),
    # --- 6. Loss changes nothing but time
    _mutant(
        "Pull is said once",
        6,
        (_DECODE, "elif waits and rank.pull is not None and rank.pull.due(now):", "elif False:"),
    ),
    _mutant(
        "Done is said once",
        6,
        (_DECODE, "fetch.done is not None and fetch.done.due(now):", "False:"),
    ),
    _mutant(
        "a repeated Ready starts a second read",
        (1, 4, 6),
        (_DECODE, "fetch.state is not FetchState.AWAITED:\n", "fetch.state is FetchState.READING:\n"),
    ),
    # --- 7. A restart is a new epoch
    _mutant(
        "messages for another life are obeyed",
        7,
        (
            _PREFILL,
            "self._peers.heard(message.epoch) if message.to == self.epoch else None",
            "self._peers.heard(message.epoch)",
        ),
    ),
    _mutant(
        "the engine of a peer's earlier life is used on",
        7,
        (_DECODE, "            self._reads.want_fence(link.address)\n", "            return\n"),
    ),
    # --- 8. A pairing that would give wrong bytes is refused
    _mutant(
        "another model is welcome",
        8,
        (_PAIRING, "if prefill.model != decode.model:", "if False:"),
    ),
    _mutant(
        "a lease shorter than its renewals is paired with",
        8,
        (_LINK, "if welcome.lease_s < 2 * self._limits.renew_s:", "if False:"),
    ),
    # --- 9. KV is bound to its tokens
    _mutant(
        "the prompt's digest is not compared",
        9,
        (_PREFILL, "if pull.digest != transfer.digest or pull.tokens", "if pull.tokens"),
    ),
    _mutant(
        "a pack of a stale generation is offered",
        (2, 9),
        (
            _PREFILL,
            "            if parcel.state is not ParcelState.OFFERED or transfer.claim is None or parcel.in_place:\n",
            "            if parcel.state in (ParcelState.WAITING, ParcelState.QUEUED):\n",
        ),
    ),
    _mutant(
        "KV of before a cache reset is given away",
        9,
        (_PREFILL, '            self._end(transfer, "expired")\n\n    def drain', "            pass\n\n    def drain"),
    ),
    _mutant(
        "an offer in place names the blocks of another parcel",
        9,
        (_PREFILL, "transfer.block_ids[parcel.first_block : parcel.first_block", "transfer.block_ids[0 : 0"),
    ),
    # --- 10. Messages are typed and bounded
    _mutant(
        "messages of any size are taken",
        10,
        (_MESSAGES, "    if len(data) > MAX_MESSAGE_BYTES:\n        raise", "    if False:\n        raise"),
    ),
    _mutant(
        "messages of any kind are taken",
        10,
        (_MESSAGES, "if allowed is not None and type(message) not in allowed:", "if False:"),
    ),
    _mutant(
        "transfers without a limit",
        10,
        (_PREFILL, " or len(self._transfers) >= self.limits.max_transfers:", ":"),
    ),
    _mutant(
        "one peer may claim everything",
        10,
        (_PREFILL, "if self._claimed_by(pull.epoch) >= self.limits.max_transfers_per_peer:", "if False:"),
    ),
)
