"""The packer: one thread that packs parcels, and computes digests of packed ones, in the order of the protocol."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

from ..protocol.prefill_actions import Hash, Pack

__all__ = ["Packer"]

_log = logging.getLogger(__name__)


class Packer:
    """``pack`` and ``digest`` do the work of one job; ``packed(job, ok)`` or ``hashed(job, digest or None)`` is called
    when it has ended.  All four on this thread."""

    def __init__(
        self,
        pack: Callable[[Pack], None],
        packed: Callable[[int, bool], object],
        digest: Callable[[Hash], str],
        hashed: Callable[[int, str | None], object],
    ) -> None:
        self._pack = pack
        self._packed = packed
        self._digest = digest
        self._hashed = hashed
        self._jobs: queue.SimpleQueue[Pack | Hash | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="hawk-packer", daemon=True)
        self._thread.start()

    def submit(self, job: Pack | Hash) -> None:
        self._jobs.put(job)

    def close(self, timeout_s: float) -> None:
        """Ends after the jobs that were submitted, or after ``timeout_s``."""
        self._jobs.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                if isinstance(job, Pack):
                    self._packed(job.job, self._done(job))
                else:
                    self._hashed(job.job, self._computed(job))
            except Exception:
                _log.exception("reporting a %s of transfer %s failed", type(job).__name__.lower(), job.transfer)

    def _done(self, job: Pack) -> bool:
        try:
            self._pack(job)
        except Exception:
            # One transfer's failure must not end the packing of others; decode recomputes this one.
            _log.exception("packing blocks from %d of transfer %s failed", job.first_block, job.transfer)
            return False
        return True

    def _computed(self, job: Hash) -> str | None:
        try:
            return self._digest(job)
        except Exception:
            _log.exception("computing the digest of a parcel of transfer %s failed", job.transfer)
            return None
