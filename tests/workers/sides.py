"""Both sides of real worker objects, driven as vLLM drives them, over real side channels on loopback."""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal

from hawk_connector.address import Address
from hawk_connector.cli.status import StatusClient
from hawk_connector.config import DecodeConfig, HawkConfig, PrefillConfig
from hawk_connector.decode.metadata import DecodeStep, LoadRequest
from hawk_connector.decode.worker import DecodeWorker, LoadEnd
from hawk_connector.layout.kv_pool import KVPoolLayout, PoolKind
from hawk_connector.layout.kv_shape import KVShape
from hawk_connector.metrics import TransferReport
from hawk_connector.plan.pairing import DecodeFacts, PrefillFacts
from hawk_connector.prefill.metadata import BeginTransfer, PrefillStep, RequestProgress
from hawk_connector.prefill.worker import PrefillWorker
from hawk_connector.protocol.digest import token_digest
from hawk_connector.protocol.lease import Clock
from hawk_connector.protocol.messages import Status
from hawk_connector.protocol.ticket import RankAddress, Ticket
from hawk_connector.transform.packing import ReferencePacker, parcel_packer
from hawk_connector.transform.reference import LayerSource
from hawk_connector.transport.curve import CurveKeys
from hawk_connector.transport.engine import EngineFactory
from hawk_connector.transport.side_channel import SideChannelClient, SideChannelServer
from tests.oracle import scalar
from tests.transport.waiting import eventually
from tests.tt_plugin.pools import device_bytes, oracle_pool
from tests.workers.source import BlockAllocator, Cache, Geometry, Prompt
from tt_plugin.device.banks import BankTable
from tt_plugin.device.kv_pool import KVPools, heads_per_chip
from tt_plugin.device.simulated import SimulatedDevice
from tt_plugin.landing import LandingChoice, make_landing

MODEL = "a model"
UNTOUCHED = 0xA5
# Patience is for what must happen on a busy machine; nothing here measures time.
PREFILL: dict[str, Any] = {"lease_s": 60.0, "buffer_wait_s": 60.0, "send_buffer_bytes": 8 << 20}
DECODE: dict[str, Any] = {"resend_s": 0.1, "renew_s": 1.0, "hello_deadline_s": 10.0, "load_deadline_s": 60.0}

_random = random.Random(20)


def an_id() -> str:
    return f"{_random.getrandbits(128):032x}"


def digest_of(prompt: Prompt) -> str:
    return token_digest([prompt.tokens, int(prompt.values[0, 0, 0, 0, 0] * 1000)])


@dataclass
class Running:
    """A request on the prefill side."""

    name: str
    transfer: str
    prompt: Prompt
    table: list[int]
    computed: int = 0


class PrefillSide:
    """The ranks of one prefill instance with their caches, and the steps that vLLM makes."""

    def __init__(
        self,
        geometry: Geometry,
        make_engine: EngineFactory,
        *,
        ports: Sequence[int] | None = None,
        gate: type[LayerSource] | None = None,
        model: str = MODEL,
        clock: Clock = time.monotonic,
        keys: CurveKeys | None = None,
        vllm_block_size: int | None = None,
        **config: Any,
    ) -> None:
        """``gate``: wraps each layer's source, to hold packs where a test wants them.  ``vllm_block_size``: where its
        blocks are several of the cache's."""
        self.geometry = g = geometry
        self.config = HawkConfig.parse({**PREFILL, **config}, "kv_producer")
        assert isinstance(self.config, PrefillConfig)
        shape = KVShape(g.layers, g.kv_heads, g.head_dim, str(g.dtype).removeprefix("torch."))
        self.blocks = BlockAllocator(g.blocks)
        self.caches = [Cache(g, rank) for rank in range(g.ranks)]
        self.workers: list[PrefillWorker] = []
        self.count = 0
        for rank, cache in enumerate(self.caches):
            buffer = self.config.send_buffer_bytes
            facts = PrefillFacts(shape, model, g.ranks, rank, g.block_size, buffer)
            server = SideChannelServer("127.0.0.1", ports[rank] if ports else 0, keys=keys)
            # Packs stop at a gate where they look at a layer, which compiled kernels do not do one by one.
            packers: Any = (lambda *_: ReferencePacker()) if gate else parcel_packer
            worker = PrefillWorker(self.config, facts, server, make_engine, clock=clock, packers=packers)
            sources = cache.sources()
            worker.register([gate(s.k, s.v) for s in sources] if gate else sources, vllm_block_size or g.block_size)
            self.workers.append(worker)

    @property
    def ranks(self) -> tuple[RankAddress, ...]:
        return tuple(RankAddress(w.handshake.address, w.handshake.epoch) for w in self.workers)

    @property
    def ports(self) -> list[int]:
        return [Address.parse(w.handshake.address).port for w in self.workers]

    def step(self, step: PrefillStep) -> None:
        """One engine step without its compute: each worker gets metadata of its own, as from another process."""
        for worker in self.workers:
            own = copy.deepcopy(step)
            worker.before_step(own)
            worker.after_step(own)

    def begin(self, prompt: Prompt) -> Running:
        """vLLM has given the request its blocks; nothing is computed yet."""
        self.count += 1
        table = self.blocks.take(-(-prompt.tokens // self.geometry.block_size))
        running = Running(f"request-{self.count}", an_id(), prompt, table)
        begun = BeginTransfer(running.name, running.transfer, digest_of(prompt), prompt.tokens)
        self.step(PrefillStep(begun=[begun]))
        return running

    def compute(self, running: Running, upto: int) -> None:
        """A step that computes the request's tokens up to ``upto``."""
        for cache in self.caches:
            cache.write(running.prompt, running.table, running.computed, upto)
        running.computed = upto
        self.step(PrefillStep(progress=[RequestProgress(running.name, upto, tuple(running.table))]))

    def preempt(self, running: Running) -> None:
        """vLLM takes the request's blocks; the next thing is that another's KV is written there."""
        for worker in self.workers:
            worker.before_step(PrefillStep(preempted=[running.name]))
        for cache in self.caches:
            cache.poison(running.table)
        self.blocks.give_back(running.table)
        running.computed, running.table = 0, []

    def resume(self, running: Running) -> None:
        running.table = self.blocks.take(-(-running.prompt.tokens // self.geometry.block_size))

    def finish(self, running: Running) -> None:
        """The request has ended well; its parameters go to the client."""
        self.step(PrefillStep(finished=[running.name]))

    def abandon(self, running: Running) -> None:
        """The request was aborted."""
        self.step(PrefillStep(abandoned=[running.name]))

    def run(self, prompt: Prompt) -> Running:
        """The whole request in one step."""
        running = self.begin(prompt)
        self.compute(running, prompt.tokens)
        self.finish(running)
        return running

    def wait_released(self, *requests: Running) -> None:
        """Until every rank has given the blocks back; they are then overwritten."""
        wanted = {running.name for running in requests}
        for worker in self.workers:
            given: set[str] = set()

            def all_back(worker: PrefillWorker = worker, given: set[str] = given) -> bool:
                given |= worker.take_finished(wanted - given) or set()
                return given == wanted

            eventually(all_back, f"blocks of {sorted(wanted)} come back")
        for running in requests:
            for cache in self.caches:
                cache.poison(running.table)
            self.blocks.give_back(running.table)

    def ticket(self, running: Running, digest: str | None = None) -> Ticket:
        """What decode makes of the request's kv_transfer_params and its own tokens."""
        prompt = running.prompt
        return Ticket(running.transfer, an_id(), digest or digest_of(prompt), prompt.tokens, self.ranks)

    def statuses(self) -> list[Status]:
        return [ask(worker.handshake.address) for worker in self.workers]

    def held(self, name: str) -> list[int]:
        """One of the held counts, rank by rank."""
        return [status.held[name] for status in self.statuses()]

    def reports(self, rank: int = 0) -> list[TransferReport]:
        return list(self.workers[rank].log.recent())

    def close(self) -> None:
        for worker in self.workers:
            worker.close()


class DecodeSide:
    """A decode worker over a simulated device."""

    def __init__(
        self,
        geometry: Geometry,
        make_engine: EngineFactory,
        *,
        device: str = "blackhole-p150",
        chips: int = 1,
        kind: PoolKind = "cross_layer",
        codec: str = "float32",
        block_size: int = 64,
        num_blocks: int = 16,
        model: str = MODEL,
        landing: LandingChoice | None = None,
        mode: Literal["hawk", "host"] = "hawk",
        **config: Any,
    ) -> None:
        """``landing``: how parcels get into the pools, by default straight."""
        self.geometry = g = geometry
        table = BankTable.named(device)
        self.layout = KVPoolLayout(
            kind=kind,
            layers=g.layers,
            chips=chips,
            heads=heads_per_chip(g.kv_heads, chips),
            block_size=block_size,
            head_dim=g.head_dim,
            codec=codec,
            banks=table.banks,
            alignment=table.alignment,
        )
        self.pools = KVPools(SimulatedDevice(chips, table), self.layout, num_blocks)
        self.wipe()
        self.landing = make_landing(self.pools, landing or LandingChoice(), mode)
        self.config = HawkConfig.parse({**DECODE, "mode": mode, **config}, "kv_consumer")
        assert isinstance(self.config, DecodeConfig)
        shape = KVShape(g.layers, g.kv_heads, g.head_dim, str(g.dtype).removeprefix("torch."))
        self.worker = DecodeWorker(
            self.config,
            DecodeFacts(shape, model, self.layout, mode),
            self.landing,
            SideChannelServer("127.0.0.1", 0),
            SideChannelClient(),
            make_engine,
        )
        self.worker.start()
        self.count = 0
        self._ended: dict[str, LoadEnd] = {}

    def wipe(self) -> None:
        for chip in range(self.layout.chips):
            for pool in range(self.layout.pools):
                self.pools.pages(chip, pool)[:] = UNTOUCHED

    def load(self, ticket: Ticket, block_ids: Sequence[int], first_block: int = 0) -> str:
        """A step that starts a load; the request's name."""
        self.count += 1
        request = f"load-{self.count}"
        self.worker.step(DecodeStep(loads=[LoadRequest(request, ticket, first_block, tuple(block_ids))]))
        return request

    def abort(self, request: str) -> None:
        self.worker.step(DecodeStep(aborted=[request]))

    def poll(self) -> dict[str, LoadEnd]:
        """Every load that has ended so far, by request."""
        for end in self.worker.take_ended():
            assert end.request not in self._ended, f"{end.request} was reported twice"
            self._ended[end.request] = end
        return self._ended

    def wait(self, request: str) -> LoadEnd:
        eventually(lambda: request in self.poll(), f"{request} ends")
        return self._ended[request]

    def report(self, request: str) -> TransferReport:
        (found,) = [r for r in self.worker.log.recent() if r.request_id == request]
        return found

    def status(self) -> Status:
        return ask(str(self.worker.handshake.status_address))

    def pull(self, prefill: PrefillSide, running: Running, block_ids: Sequence[int]) -> TransferReport:
        """A load that must end well, with its bytes judged; its report."""
        request = self.load(prefill.ticket(running), block_ids)
        end = self.wait(request)
        report = self.report(request)
        assert end == LoadEnd(request, True, tuple(block_ids)), report.reason
        self.check(running.prompt, block_ids)
        return report

    def expected(self, prompt: Prompt, block_ids: Sequence[int]) -> dict[tuple[int, int], dict[int, bytes]]:
        return scalar.expected_banks(
            prompt.row,
            oracle_pool(self.pools),
            num_tokens=prompt.tokens,
            block_ids=list(block_ids),
            kv_heads=self.geometry.kv_heads,
            chips=self.layout.chips,
            rotary_dim=self.geometry.head_dim,
        )

    def check(self, prompt: Prompt, block_ids: Sequence[int]) -> int:
        """The oracle's bytes lie in the banks; the number of bytes compared."""
        checked = 0
        for (chip, bank), pages in self.expected(prompt, block_ids).items():
            for address, content in pages.items():
                found = device_bytes(self.pools, chip, bank, address, len(content))
                assert found == content, f"chip {chip}, bank {bank}, address {address:#x}"
                checked += len(content)
        return checked

    def touched(self) -> int:
        """Bytes of the pools that are no longer as ``wipe`` left them, whole pages counted."""
        pages = 0
        for chip in range(self.layout.chips):
            for pool in range(self.layout.pools):
                pages += int((self.pools.pages(chip, pool) != UNTOUCHED).any(axis=-1).sum())
        return pages * self.layout.page_pitch

    def close(self) -> None:
        self.worker.close()


def ask(address: str) -> Status:
    """A side's status over its side channel, as `hawk up` asks for it."""
    with StatusClient(Address.parse(address)) as client:
        status = client.ask(20.0)
    assert status is not None, f"no answer from {address}"
    return status


def wait_idle(*sides: PrefillSide | DecodeSide) -> None:
    """Until nothing is held anywhere."""
    for side in sides:

        def held(side: PrefillSide | DecodeSide = side) -> dict[str, int]:
            statuses = side.statuses() if isinstance(side, PrefillSide) else [side.status()]
            return {f"{i}/{k}": v for i, s in enumerate(statuses) for k, v in s.held.items() if v}

        eventually(lambda held=held: not held(), f"{type(side).__name__} is idle")


class Sides:
    """Makes sides that are closed when the test ends."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack

    def prefill(self, *args: Any, **kwargs: Any) -> PrefillSide:
        side = PrefillSide(*args, **kwargs)
        self._stack.callback(side.close)
        return side

    def decode(self, *args: Any, **kwargs: Any) -> DecodeSide:
        side = DecodeSide(*args, **kwargs)
        self._stack.callback(side.close)
        return side
