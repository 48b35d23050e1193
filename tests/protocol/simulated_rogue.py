"""A paired peer that means ill: claims, finishes, renews and gives up what is not its own, and sends garbage.

It knows the ids of transfers (routers and clients see them), not the claims of others nor the digests of prompts.
"""

from __future__ import annotations

from typing import Any

import msgspec

from hawk_connector.plan.pairing import DecodeFacts
from hawk_connector.protocol.messages import PROTOCOL_VERSION, Abort, Done, Hello, Pull, Ready, Renew, encode
from tests.protocol.simulated_network import Network
from tests.protocol.simulated_prefill import SimulatedPrefill
from tests.protocol.simulated_process import Process
from tests.protocol.world import World


def _oversize(fields: dict[str, Any]) -> bytes:
    """A Renew that is well formed but for its size: one field is said again and again."""
    renew = encode(Renew(**fields))
    again = msgspec.msgpack.encode("claim") + msgspec.msgpack.encode(fields["claim"])
    times = (1 << 20) // len(again) + 1
    return b"\xdf" + (renew[0] - 0x80 + times).to_bytes(4, "big") + renew[1:] + again * times


class Rogue(Process):
    def __init__(self, world: World, network: Network, facts: DecodeFacts, prefills: list[SimulatedPrefill]) -> None:
        super().__init__(world, "rogue")
        self.facts, self.prefills, self.network = facts, prefills, network
        self.epoch, self.foreign = world.id(), world.id()
        world.misfits.add(self.foreign)
        self.until = world.now + 15.0
        self.client = network.client(lambda address, payload: None)

    def start(self) -> None:
        self.born()
        for prefill in self.prefills:
            for address in prefill.addresses:
                self._say(address, Hello(epoch=self.epoch, version=PROTOCOL_VERSION, facts=self.facts, number=1))
        self.after(0.3, self._act)

    def _act(self) -> None:
        world, rng = self.world, self.world.rng
        prefill = rng.choice(self.prefills)
        if prefill.ranks and prefill.prompts:
            rank = rng.choice(prefill.ranks)
            transfer = rng.choice(list(prefill.prompts))
            # Half of the time of a life that is not there, or of one that was.
            to = rank.protocol.epoch if world.chance(0.8) else world.id()
            fields: dict[str, Any] = {"epoch": self.epoch, "to": to, "transfer": transfer, "claim": world.id()}
            digest = f"{rng.getrandbits(256):064x}"
            parcel, generation = rng.randint(0, 4), rng.randint(0, 2)
            tokens = prefill.prompts[transfer].text.tokens
            for _ in range(rng.randint(1, 3)):
                self._say(
                    rank.address,
                    rng.choice(
                        [
                            Pull(digest=digest, tokens=tokens, deliver=world.chance(0.5), first_block=parcel, **fields),
                            Renew(**fields),
                            Done(parcel=parcel, generation=generation, **fields),
                            Abort(digest=digest, **fields),
                        ]
                    ),
                )
            self.network.send(self.client, rank.address, self._garbage(fields))
        if world.now < self.until:
            self.after(world.between(0.05, 1.5), self._act)
        else:
            self.die()

    def _garbage(self, fields: dict[str, Any]) -> bytes:
        rng = self.world.rng
        ready = encode(Ready(parcel=0, generation=0, address=0, nbytes=1, **fields))
        kind = rng.randrange(6)
        if kind == 0:
            return ready  # a message, but not one of a decode side
        if kind == 1:
            return ready[: rng.randrange(len(ready))]
        if kind == 2:
            return msgspec.msgpack.encode({"type": "done", "parcel": 1 << 40, "generation": -1, **fields})
        if kind == 3:
            return msgspec.msgpack.encode({"type": "hello", "epoch": self.foreign, "version": 7, "number": 1})
        if kind == 4 and rng.random() < 0.05:
            return _oversize(fields)
        return rng.randbytes(rng.randint(0, 40))

    def _say(self, address: str, message: Any) -> None:
        self.network.send(self.client, address, encode(message))
