"""The prefill side's state machine: transfers, parcels, claims and leases.  No I/O, no threads, no wall clock.

Inputs are method calls: what vLLM did (``begin``, ``computed``, ``preempted``, ``finished``, ``abandoned``), what the
packer did (``packed``), what a peer said (``receive``) and the passing of time (``tick``).  Outputs are actions, taken
with ``take_actions``: messages to send, parcels to pack, blocks to give back to vLLM.

Theory of operation.  A parcel goes WAITING -> QUEUED -> PACKING -> OFFERED -> ACCEPTED (or SKIPPED).  vLLM's blocks are
needed up to OFFERED, the send buffer's region from PACKING to ACCEPTED.  In mode direct there is no region: a parcel is
offered as soon as what the steps wrote is in memory (its job is a Settle), and vLLM's blocks are needed to ACCEPTED; a
preemption takes the offer back even of a claimed one.  A transfer ends when all its parcels have
ended, or by ``_end`` with a reason that every later question is answered with (Gone).  Reads are one-sided, so the only
proof that a region was intact while it was read is that it is still on offer when Done comes: Accepted says so.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..errors import Mismatch
from ..plan.pairing import AnyPairing, PrefillFacts
from .early_pulls import EarlyPulls
from .graveyard import Graveyard, Tombstone
from .lease import Clock, Lease
from .messages import (
    PROTOCOL_VERSION,
    Abort,
    Accepted,
    Claimed,
    Done,
    ForeignHello,
    Gone,
    GoneReason,
    Hello,
    Pull,
    Ready,
    Refused,
    Renew,
    Renewed,
    Stale,
    Welcome,
)
from .parcels import ParcelQueue
from .peer_book import Peer, PeerBook
from .prefill_actions import Action, Ended, PrefillLimits, ReleaseBlocks, Send
from .transfer import Claim, Parcel, ParcelDigest, ParcelState, Transfer

__all__ = ["PrefillProtocol"]


class PrefillProtocol:
    """One prefill rank.  ``buffer_address``: address of the send buffer as the engine ``session`` serves it.

    ``process``: the session for readers on the same machine, empty where there is none.
    """

    def __init__(
        self,
        facts: PrefillFacts,
        limits: PrefillLimits,
        epoch: str,
        session: str,
        buffer_address: int,
        clock: Clock,
        process: str = "",
    ) -> None:
        self.facts = facts
        self.limits = limits
        self.epoch = epoch
        self.session = session
        self.process = process
        self.buffer_address = buffer_address
        self._cache: tuple[int, ...] = ()
        self._parcels = ParcelQueue(facts.send_buffer_bytes, limits.parcel_tokens, limits.parcel_bytes)
        self._clock = clock
        self._peers = PeerBook(facts, limits, self._parcels.regions.capacity, clock)
        # One rank alone begins a transfer before it can answer its request.
        wait_s = limits.early_pull_s if facts.ranks > 1 else 0.0
        self._early = EarlyPulls(limits.max_transfers, wait_s, clock)
        self._transfers: dict[str, Transfer] = {}
        self._graveyard = Graveyard(limits.verdict_keep_s, clock)
        self._actions: list[Action] = []
        self.draining = False

    # --- outputs

    def take_actions(self) -> list[Action]:
        """The actions since the last call, in order."""
        actions, self._actions = self._actions, []
        return actions

    @property
    def owed(self) -> int:
        """Transfers that have been promised to a client and can still be taken."""
        return sum(1 for t in self._transfers.values() if t.gone is None and t.finished_at is not None)

    def held(self) -> dict[str, int]:
        """Everything held, by name; all zero when idle."""
        live = self._transfers.values()
        return {
            "transfers": len(self._transfers),
            "leases": sum(1 for t in live if t.lease is not None and t.gone is None),
            "regions": self._parcels.regions.held_regions,
            "region_bytes": self._parcels.regions.held_bytes,
            "requests_with_blocks": sum(1 for t in live if not t.blocks_released),
            "parcels_queued": self._parcels.queued,
            "packs": self._parcels.packs,
            "early_pulls": len(self._early),
        }

    @property
    def live(self) -> Mapping[str, Transfer]:
        """Transfers that have not ended, by id, the oldest first.  Not to be changed."""
        return self._transfers

    def peers(self) -> dict[str, AnyPairing | tuple[Mismatch, ...]]:
        """Pairings and refusals by the decode side's epoch."""
        return self._peers.verdicts()

    def next_deadline(self) -> float | None:
        """When ``tick`` has something to do next, or None."""
        times = [t for transfer in self._transfers.values() for t in self._deadlines(transfer)]
        times += [t for t in (self._graveyard.next_deadline(), self._early.next_deadline()) if t is not None]
        return min(times, default=None)

    # --- inputs from vLLM

    def expose(self, cache: tuple[int, ...]) -> None:
        """Peers can read each layer's cache at these addresses: from here on mode direct is served."""
        self._cache = cache
        self._peers.exposed = True

    def begin(self, transfer_id: str, digest: str, tokens: int) -> None:
        """A request whose KV is wanted elsewhere is being computed.

        It is not offered past ``max_transfers``, nor while this side drains.
        """
        if self.draining or transfer_id in self._transfers or len(self._transfers) >= self.limits.max_transfers:
            return
        self._transfers[transfer_id] = Transfer(transfer_id, digest, tokens, begun_at=self._clock())
        early = self._early.take(transfer_id)
        if early is not None:
            self.receive(early.identity, early.pull)

    def computed(self, transfer_id: str, tokens: int, block_ids: tuple[int, ...] = ()) -> None:
        """The first ``tokens`` of the request are in vLLM's cache (a step has ended), in its blocks ``block_ids``."""
        transfer = self._transfers.get(transfer_id)
        if transfer is None or transfer.gone is not None:
            return
        transfer.block_ids = block_ids
        transfer.computed = max(transfer.computed, min(tokens, transfer.tokens))
        self._advance(transfer)

    def preempted(self, transfer_id: str) -> None:
        """vLLM takes the request's blocks back now and computes it again later: packs that are out are stale.

        Packed parcels that nobody has claimed are dropped too.  They would be good still, but a request that waits for
        vLLM's blocks must not hold the send buffer for which finished requests wait with vLLM's blocks.  Those that are
        read in place are good no more, whoever reads them now: their Done will name an old generation.
        """
        transfer = self._transfers.get(transfer_id)
        if transfer is None:
            return
        transfer.generation += 1
        transfer.computed, transfer.block_ids = 0, ()
        for parcel in transfer.parcels:
            if parcel.state is not ParcelState.OFFERED or transfer.claim is None or parcel.in_place:
                self._parcels.withdraw(transfer, parcel)
        self._pump()

    def finished(self, transfer_id: str) -> bool:
        """The request has finished and its parameters go to the client.  False where nothing is held for it."""
        transfer = self._transfers.get(transfer_id)
        if transfer is None or transfer.blocks_released:
            return False
        now = self._clock()
        transfer.finished_at = now
        transfer.lease = transfer.lease or Lease(now + self.limits.lease_s)
        transfer.wait_until = now + self.limits.buffer_wait_s
        self._advance(transfer)
        self._settle(transfer)
        return True

    def abandoned(self, transfer_id: str) -> bool:
        """The request was aborted: nobody will ask for it.  False where nothing is held for it."""
        transfer = self._transfers.get(transfer_id)
        if transfer is None or transfer.blocks_released:
            return False
        transfer.abandoned = True
        self._end(transfer, "aborted")
        self._settle(transfer)  # where it had ended before, with its blocks still vLLM's
        return True

    def reset(self) -> None:
        """vLLM's cache was reset, perhaps for new weights: no KV of before may be believed any more."""
        for transfer in list(self._transfers.values()):
            self._end(transfer, "expired")

    def drain(self) -> None:
        """Nothing new is offered any more.  What is offered goes on to its end."""
        self.draining = True

    # --- inputs from the packer

    def packed(self, job: int, ok: bool) -> bool:
        """A pack job has ended.  False where its result is discarded (stale, unwanted or failed)."""
        done = self._parcels.take_job(job)
        if done is None:
            return False
        transfer, parcel = done.transfer, done.parcel
        wanted = parcel.job == job
        kept = wanted and ok
        if wanted:
            parcel.job = None
        if kept:
            parcel.state = ParcelState.OFFERED
            parcel.offered_at = self._clock()
            if transfer.finished_at is not None:
                transfer.wait_until = parcel.offered_at + self.limits.buffer_wait_s
            self._offer(transfer, parcel)
        else:
            if done.region is not None:
                self._parcels.release(done.region)
            if wanted:
                parcel.region = None
                self._end(transfer, "failed")
        self._settle(transfer)
        self._pump()
        return kept

    def hashed(self, job: int, digest: str | None) -> None:
        """A digest has been computed; None where it could not be."""
        done = self._parcels.take_hash(job)
        if done is None or done.parcel.hash_job != job:
            return  # the parcel is no longer what it was
        done.parcel.hash_job = None
        if digest is None:
            self._end(done.transfer, "failed")
            return
        done.parcel.digest = ParcelDigest(done.skip_blocks, digest)
        self._offer(done.transfer, done.parcel)

    # --- inputs from peers

    def receive(self, identity: str, message: Hello | ForeignHello | Pull | Renew | Done | Abort) -> None:
        """A decoded message from a decode side."""
        if isinstance(message, (Hello, ForeignHello)):
            self._hello(identity, message)
            return
        peer = self._peers.heard(message.epoch) if message.to == self.epoch else None
        if peer is None:
            self._send(identity, Stale(epoch=self.epoch, to=message.epoch))
            return
        transfer = self._transfers.get(message.transfer)
        if transfer is not None:
            self._expire(transfer)
            transfer = self._transfers.get(message.transfer)
        if transfer is None or transfer.gone is not None:
            self._answer_ended(identity, message, transfer)
            return
        if isinstance(message, Pull):
            self._pull(identity, message, transfer, peer)
        elif isinstance(message, Abort) and transfer.claim is None and message.digest == transfer.digest:
            self._end(transfer, "aborted")
            self._gone(identity, message, "aborted")
        elif isinstance(message, Renew) and transfer.claim is None:
            pass  # it has overtaken its Pull, which claims and renews
        elif transfer.claim != Claim(message.epoch, message.claim):
            self._gone(identity, message, "claimed")
        elif isinstance(message, Renew):
            self._renew(transfer)
            self._send(identity, Renewed(**_claim_fields(self.epoch, message)))
        elif isinstance(message, Done):
            self._done(identity, message, transfer)
        else:
            transfer.claimant = None  # it is told below, once
            self._end(transfer, "aborted")
            self._gone(identity, message, "aborted")

    def tick(self) -> None:
        """Lets time pass: leases and waits run out, verdicts and silent peers are forgotten."""
        for transfer in list(self._transfers.values()):
            self._expire(transfer)
        self._graveyard.tick()
        self._peers.forget_silent()
        for early in self._early.take_late():
            self._gone(early.identity, early.pull, "unknown")
        self._pump()

    # --- peers

    def _hello(self, identity: str, hello: Hello | ForeignHello) -> None:
        mismatches = self._peers.hello(identity, hello)
        if mismatches or isinstance(hello, ForeignHello):
            self._send(identity, Refused(epoch=self.epoch, to=hello.epoch, mismatches=mismatches, number=hello.number))
            return
        self._send(
            identity,
            Welcome(
                epoch=self.epoch,
                to=hello.epoch,
                version=PROTOCOL_VERSION,
                facts=self.facts,
                engine=self.session,
                lease_s=self.limits.lease_s,
                number=hello.number,
                verdict_keep_s=self.limits.verdict_keep_s,
                process=self.process,
                cache=self._cache if hello.facts.mode == "direct" else (),
            ),
        )
        for transfer in list(self._transfers.values()):
            self._advance(transfer)
            self._settle(transfer)

    # --- claims

    def _pull(self, identity: str, pull: Pull, transfer: Transfer, peer: Peer) -> None:
        claim = Claim(pull.epoch, pull.claim)
        if transfer.claim is None:
            if pull.digest != transfer.digest or pull.tokens != transfer.tokens:
                self._gone(identity, pull, "digest")
                return
            if self._claimed_by(pull.epoch) >= self.limits.max_transfers_per_peer:
                self._gone(identity, pull, "busy")
                return
            if transfer.pairing is None or transfer.pairing != peer.pairing:
                if transfer.blocks_released:
                    self._gone(identity, pull, "layout")
                    return
                self._parcels.cut(transfer, peer.pairing)
            transfer.claim = claim
            transfer.digests = self.limits.digests or peer.digests
        elif transfer.claim != claim:
            self._gone(identity, pull, "claimed")
            return
        self._renew(transfer)
        if pull.deliver:
            transfer.claimant = identity
            transfer.first_block = pull.first_block
            self._skip(transfer)
        self._advance(transfer)
        self._send(
            identity,
            Claimed(
                blocks=transfer.blocks,
                parcel_blocks=transfer.parcel_blocks,
                ended_ago_s=_since(transfer.finished_at, self._clock()),
                **_claim_fields(self.epoch, pull),
            ),
        )
        if pull.deliver:
            for parcel in transfer.parcels:
                if parcel.state is ParcelState.OFFERED:
                    self._offer(transfer, parcel)
        self._settle(transfer)
        self._pump()

    def _done(self, identity: str, done: Done, transfer: Transfer) -> None:
        parcel = transfer.parcels[done.parcel] if done.parcel < len(transfer.parcels) else None
        known = parcel is not None and parcel.generation == done.generation
        if parcel is not None and known and parcel.state is ParcelState.OFFERED:
            self._parcels.free(parcel)
            parcel.state = ParcelState.ACCEPTED
            if transfer.finished_at is not None:
                transfer.wait_until = self._clock() + self.limits.buffer_wait_s
        if parcel is None or not known or parcel.state is not ParcelState.ACCEPTED:
            transfer.claimant = None  # it is told below, once
            self._end(transfer, "failed")
            self._gone(identity, done, "failed")
            return
        self._renew(transfer)
        self._accept(identity, done)
        self._settle(transfer)
        self._pump()

    def _answer_ended(self, identity: str, message: Pull | Renew | Done | Abort, transfer: Transfer | None) -> None:
        tomb = self._graveyard.find(message.transfer) if transfer is None else Tombstone.of(transfer)
        if tomb is None:
            if isinstance(message, Pull) and not self.draining and self._early.keep(identity, message):
                return
            if isinstance(message, Abort):
                self._early.take(message.transfer)
            self._gone(identity, message, "draining" if self.draining else "unknown")
            return
        reason = tomb.answer(message)
        if reason is not None:
            self._gone(identity, message, reason)
        elif isinstance(message, Done):
            self._accept(identity, message)

    def _renew(self, transfer: Transfer) -> None:
        if transfer.lease is not None:
            transfer.lease.renew(self._clock(), self.limits.lease_s)

    def _claimed_by(self, epoch: str) -> int:
        """How many live transfers the decode side has claimed."""
        return sum(1 for t in self._transfers.values() if t.claim is not None and t.claim.epoch == epoch)

    def _skip(self, transfer: Transfer) -> None:
        for parcel in transfer.parcels:
            if parcel.first_block + parcel.blocks <= transfer.first_block and not parcel.state.ended:
                self._parcels.withdraw(transfer, parcel)
                parcel.state = ParcelState.SKIPPED

    def _offer(self, transfer: Transfer, parcel: Parcel) -> None:
        """Tells the claimant, if there is one, that the parcel can be read; first its digest is made where wanted."""
        claimed = transfer.claim is not None
        needs_digest = transfer.digests if claimed else self.limits.digests or self._peers.want_digests
        digest = ""
        if needs_digest and not parcel.in_place:
            skip = max(0, transfer.first_block - parcel.first_block)
            if parcel.digest is None or parcel.digest.skip_blocks != skip:
                self._actions.extend(self._parcels.hash(transfer, parcel, skip))
                return
            digest = parcel.digest.value
        if transfer.claim is None or transfer.claimant is None:
            return
        address, blocks = 0, transfer.block_ids[parcel.first_block : parcel.first_block + parcel.blocks]
        if not parcel.in_place:
            if parcel.region is None:
                return
            address, blocks = self.buffer_address + parcel.region, ()
        elif len(blocks) != parcel.blocks:  # whoever told of the tokens did not tell of their blocks
            self._end(transfer, "failed")
            return
        self._send(
            transfer.claimant,
            Ready(
                epoch=self.epoch,
                to=transfer.claim.epoch,
                transfer=transfer.id,
                claim=transfer.claim.nonce,
                parcel=parcel.index,
                generation=parcel.generation,
                address=address,
                nbytes=parcel.nbytes,
                digest=digest,
                blocks=blocks,
            ),
        )

    # --- parcels

    def _advance(self, transfer: Transfer) -> None:
        """Queues the parcels whose tokens are computed, cutting the transfer first where that can be done eagerly."""
        if transfer.gone is not None or transfer.blocks_released:
            return
        if transfer.pairing is None:
            eager = self._peers.eager_pairing()
            if eager is None:
                return
            self._parcels.cut(transfer, eager)
        self._actions.extend(self._parcels.enqueue_computed(transfer))
        self._pump()

    def _pump(self) -> None:
        # A decode side that reads slowly must not keep the others from the buffer; alone it may have all of it.
        share = self.limits.peer_buffer_share if len(self._peers) > 1 else 1.0
        self._actions.extend(self._parcels.start(share))

    # --- ends

    def _deadlines(self, transfer: Transfer) -> list[float]:
        if transfer.gone is not None:
            return []
        times = [transfer.lease.until] if transfer.lease is not None else []
        if transfer.wait_until is not None and not transfer.packed:
            times.append(transfer.wait_until)
        return times

    def _expire(self, transfer: Transfer) -> None:
        if any(t <= self._clock() for t in self._deadlines(transfer)):
            self._end(transfer, "expired")

    def _end(self, transfer: Transfer, reason: GoneReason) -> None:
        """No more of this transfer: regions are freed, the claimant is told, packs that are out are discarded."""
        if transfer.gone is not None:
            return
        transfer.gone = reason
        for parcel in transfer.parcels:
            self._parcels.withdraw(transfer, parcel)
        if transfer.claim is not None and transfer.claimant is not None:
            self._send(
                transfer.claimant,
                Gone(
                    epoch=self.epoch,
                    to=transfer.claim.epoch,
                    transfer=transfer.id,
                    claim=transfer.claim.nonce,
                    reason=reason,
                ),
            )
        self._settle(transfer)
        self._pump()

    def _settle(self, transfer: Transfer) -> None:
        """Gives blocks back and buries the transfer where nothing of it is needed any more."""
        if transfer.id not in self._transfers:
            return
        ended_for_vllm = transfer.finished_at is not None or transfer.abandoned
        idle = self._parcels.idle(transfer)
        if ended_for_vllm and idle and not transfer.blocks_released and (transfer.gone or transfer.packed):
            transfer.blocks_released = True
            self._actions.append(ReleaseBlocks(transfer.id))
        if transfer.blocks_released and idle and (transfer.gone or transfer.completed):
            del self._transfers[transfer.id]
            self._graveyard.bury(transfer)
            accepted = [p for p in transfer.parcels if p.state is ParcelState.ACCEPTED]
            in_place = sum(p.nbytes for p in accepted if p.in_place)
            self._actions.append(Ended(transfer.id, transfer.gone, len(transfer.parcels), in_place))

    # --- sending

    def _send(
        self, identity: str, message: Welcome | Refused | Stale | Claimed | Ready | Renewed | Accepted | Gone
    ) -> None:
        self._actions.append(Send(identity, message))

    def _accept(self, identity: str, done: Done) -> None:
        fields = _claim_fields(self.epoch, done)
        self._send(identity, Accepted(parcel=done.parcel, generation=done.generation, **fields))

    def _gone(self, identity: str, message: Pull | Renew | Done | Abort, reason: GoneReason) -> None:
        self._send(identity, Gone(reason=reason, **_claim_fields(self.epoch, message)))


def _since(moment: float | None, now: float) -> float | None:
    """Seconds since ``moment``, as a message may say them."""
    return None if moment is None else min(max(0.0, now - moment), 86400.0)


def _claim_fields(epoch: str, message: Pull | Renew | Done | Abort) -> dict[str, str]:
    return {"epoch": epoch, "to": message.epoch, "transfer": message.transfer, "claim": message.claim}
