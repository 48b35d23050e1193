"""Mode direct: letting peers read vLLM's cache itself, from the first peer on that asks for it and can be served."""

from __future__ import annotations

import logging
from contextlib import suppress

from ..config import PrefillConfig
from ..errors import LocalError
from ..plan.pairing import DirectPairing, PrefillFacts, pair
from ..protocol.messages import PROTOCOL_VERSION, Hello
from ..transport.engine import TransferEngine
from .kv_source import CacheSource

__all__ = ["Exposure"]

_log = logging.getLogger(__name__)


class Exposure:
    """Of ``cache`` through ``engine``, at most once; until then peers can read no more than the send buffer."""

    def __init__(
        self, config: PrefillConfig, facts: PrefillFacts, cache: CacheSource | None, engine: TransferEngine
    ) -> None:
        self._config = config
        self._facts = facts
        self._cache = cache
        self._engine = engine
        self._tried = False

    def ask(self, hello: Hello) -> tuple[int, ...] | None:
        """The address of each layer's first block, where this Hello made the cache readable; else None.

        Registering may pin all of the cache, so it belongs on the channel loop's thread.  A peer that will be refused
        anyway exposes nothing.  Where it fails, which is said in the log, mode direct is refused from then on.
        """
        if self._tried or self._cache is None or not self._may_be_direct(hello):
            return None
        self._tried = True
        if self._cache.blocks[0].device.type != "cpu" and self._config.protocol != "rdma":
            _log.error("mode direct reads a cache in GPU memory over RDMA only: set protocol to rdma on both sides")
            return None
        memory = self._cache.memory
        registered: list[int] = []
        try:
            for start, length in memory.regions:
                self._engine.register(start, length)
                registered.append(start)
        except LocalError as error:
            for start in registered:
                with suppress(LocalError):
                    self._engine.unregister(start)
            _log.error("vLLM's cache cannot be read in mode direct: %s", error)
            return None
        _log.info("mode direct: peers can read vLLM's cache, %.0f MiB", sum(n for _, n in memory.regions) / 2**20)
        return memory.bases

    def _may_be_direct(self, hello: Hello) -> bool:
        """Whether nothing but the exposure keeps the peer from mode direct."""
        if hello.version != PROTOCOL_VERSION or self._config.parcel_digest or hello.digests:
            return False
        return isinstance(pair(self._facts, hello.facts), DirectPairing)
