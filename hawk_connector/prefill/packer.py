"""The packer: one thread that packs parcels, waits for steps where nothing is packed, and computes digests, in the
order of the protocol."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

from ..protocol.prefill_actions import Hash, Pack, Settle

__all__ = ["Packer"]

_log = logging.getLogger(__name__)


class Packer:
    """``pack``, ``settle`` and ``digest`` do the work of one job; ``packed(job, ok)`` or
    ``hashed(job, digest or None)`` is called when it has ended.  All five on this thread.

    What else the thread is to do beforehand, such as compiling, comes as a callable."""

    def __init__(
        self,
        pack: Callable[[Pack], None],
        settle: Callable[[Settle], None],
        packed: Callable[[int, bool], object],
        digest: Callable[[Hash], str],
        hashed: Callable[[int, str | None], object],
    ) -> None:
        self._pack = pack
        self._settle = settle
        self._packed = packed
        self._digest = digest
        self._hashed = hashed
        self._jobs: queue.SimpleQueue[Pack | Settle | Hash | Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="hawk-packer", daemon=True)
        self._thread.start()

    def submit(self, job: Pack | Settle | Hash | Callable[[], None]) -> None:
        self._jobs.put(job)

    def close(self, timeout_s: float) -> None:
        """Ends after the jobs that were submitted, or after ``timeout_s``."""
        self._jobs.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                if isinstance(job, Hash):
                    self._hashed(job.job, self._computed(job))
                elif isinstance(job, (Pack, Settle)):
                    self._packed(job.job, self._done(job))
                else:
                    job()
            except Exception:
                _log.exception("the packer met an unexpected error in %s", job)

    def _done(self, job: Pack | Settle) -> bool:
        try:
            if isinstance(job, Pack):
                self._pack(job)
            else:
                self._settle(job)
        except Exception:
            # One transfer's failure must not end the packing of others; decode recomputes this one.
            _log.exception("a %s of transfer %s failed", type(job).__name__.lower(), job.transfer)
            return False
        return True

    def _computed(self, job: Hash) -> str | None:
        try:
            return self._digest(job)
        except Exception:
            _log.exception("computing the digest of a parcel of transfer %s failed", job.transfer)
            return None
