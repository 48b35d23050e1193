"""A decode side in mode direct: its own cache of the prefill side's kind, looked at element by element."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hawk_connector.config import DecodeConfig, HawkConfig
from hawk_connector.decode.cache_landing import CacheLanding
from hawk_connector.decode.metadata import DecodeStep, LoadRequest
from hawk_connector.decode.worker import DecodeWorker, LoadEnd
from hawk_connector.layout.kv_shape import KVShape
from hawk_connector.metrics import TransferReport
from hawk_connector.plan.pairing import DecodeFacts
from hawk_connector.prefill.kv_source import cache_source
from hawk_connector.protocol.messages import Status
from hawk_connector.protocol.ticket import Ticket
from hawk_connector.transport.engine import EngineFactory
from hawk_connector.transport.side_channel import SideChannelClient, SideChannelServer
from tests.oracle import scalar
from tests.transport.waiting import eventually
from tests.workers.sides import DECODE, MODEL, PrefillSide, Running, ask
from tests.workers.source import Cache, Geometry, Prompt


class DirectSide:
    """``block_size``: vLLM's tokens of a block, where it is not the cache's own."""

    def __init__(
        self,
        geometry: Geometry,
        make_engine: EngineFactory,
        *,
        block_size: int | None = None,
        model: str = MODEL,
        **config: Any,
    ) -> None:
        self.geometry = g = geometry
        self.block_size = block_size or g.block_size
        self.cache = Cache(g, 0)
        self.source = cache_source(self.cache.sources(), self.block_size)
        self.landing = CacheLanding(self.source.memory)
        self.config = HawkConfig.parse({**DECODE, "mode": "direct", **config}, "kv_consumer")
        assert isinstance(self.config, DecodeConfig)
        shape = KVShape(g.layers, g.kv_heads, g.head_dim, str(g.dtype).removeprefix("torch."))
        self.worker = DecodeWorker(
            self.config,
            DecodeFacts(shape, model, self.landing.layout, "direct"),
            self.landing,
            SideChannelServer("127.0.0.1", 0),
            SideChannelClient(),
            make_engine,
        )
        self.worker.start()
        self.count = 0
        self._ended: dict[str, LoadEnd] = {}

    def load(self, ticket: Ticket, block_ids: Sequence[int], first_block: int = 0) -> str:
        self.count += 1
        request = f"direct-{self.count}"
        self.worker.step(DecodeStep(loads=[LoadRequest(request, ticket, first_block, tuple(block_ids))]))
        return request

    def wait(self, request: str) -> LoadEnd:
        def ended() -> bool:
            self._ended.update({end.request: end for end in self.worker.take_ended()})
            return request in self._ended

        eventually(ended, f"{request} ends")
        return self._ended[request]

    def report(self, request: str) -> TransferReport:
        (found,) = [r for r in self.worker.log.recent() if r.request_id == request]
        return found

    def status(self) -> Status:
        return ask(str(self.worker.handshake.status_address))

    def pull(self, prefill: PrefillSide, running: Running, block_ids: Sequence[int]) -> TransferReport:
        """A load that must end well, its elements looked at; its report."""
        request = self.load(prefill.ticket(running), block_ids)
        end, report = self.wait(request), self.report(request)
        assert end == LoadEnd(request, True, tuple(block_ids)), report.reason
        assert self.elements(running.prompt, block_ids) == self.values(running.prompt)
        return report

    def values(self, prompt: Prompt, first: int = 0) -> list[float]:
        """The prompt's K and V from token ``first`` on."""
        return [float(x) for x in prompt.values[:, :, :, first:].reshape(-1)]

    def elements(self, prompt: Prompt, block_ids: Sequence[int], first: int = 0) -> list[float]:
        """The same as this side's cache holds them, by the oracle's index; the first block of ``block_ids`` has it."""
        g, index = self.geometry, self.cache._source.index
        ratio = self.block_size // g.block_size
        cache = [block * ratio + i for block in block_ids for i in range(ratio)]
        tensors: tuple[scalar.Tensor, ...] = ("k", "v")
        places = [
            index(tensor, cache[(t - first) // g.block_size], layer, head, t % g.block_size, dim)
            for tensor in tensors
            for layer in range(g.layers)
            for head in range(g.kv_heads)
            for t in range(first, prompt.tokens)
            for dim in range(g.head_dim)
        ]
        return [float(x) for x in self.cache.flat[torch.tensor(places)]]

    def touched(self) -> set[int]:
        """The cache's blocks that hold anything."""
        g = self.geometry
        filled = ~torch.isnan(self.cache.flat.float()).view(g.layers, g.blocks, -1)
        return set(torch.nonzero(filled.any(dim=2).any(dim=0)).reshape(-1).tolist())

    def held(self) -> dict[str, int]:
        return {name: n for name, n in self.status().held.items() if n}

    def close(self) -> None:
        self.worker.close()
