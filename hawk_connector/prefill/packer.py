"""The packer: one thread that packs parcels in the order in which the protocol started them."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

from ..protocol.prefill_actions import Pack

__all__ = ["Packer"]

_log = logging.getLogger(__name__)


class Packer:
    """``pack`` does the work of one job; ``report(job, ok)`` is called when it has ended, on this thread."""

    def __init__(self, pack: Callable[[Pack], None], report: Callable[[int, bool], None]) -> None:
        self._pack = pack
        self._report = report
        self._jobs: queue.SimpleQueue[Pack | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="hawk-packer", daemon=True)
        self._thread.start()

    def submit(self, job: Pack) -> None:
        self._jobs.put(job)

    def close(self, timeout_s: float) -> None:
        """Ends after the jobs that were submitted, or after ``timeout_s``."""
        self._jobs.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                self._pack(job)
                ok = True
            except Exception:
                # One transfer's failure must not end the packing of others; decode recomputes this one.
                _log.exception("packing blocks from %d of transfer %s failed", job.first_block, job.transfer)
                ok = False
            try:
                self._report(job.job, ok)
            except Exception:
                _log.exception("reporting a pack of transfer %s failed", job.transfer)
