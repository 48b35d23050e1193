"""Tenstorrent's scheduler, without losing what a step that it gives up had for the workers.

It never mixes prefill and decode in a step.  With prompts waiting it tries a prefill step first, and where that has no
tokens, it throws the result away and makes a decode step.  A prompt whose KV is being loaded counts as waiting, and the
step that begins its load has no tokens: thrown away with it, the load would never begin.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_tt_plugin.scheduler import TTScheduler

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

__all__ = ["SiliconScheduler", "carry_over"]


def carry_over(given_up: SchedulerOutput, step: SchedulerOutput) -> None:
    """Puts into ``step`` what ``given_up``, made just before it and never run, had for the workers."""
    step.finished_req_ids |= given_up.finished_req_ids
    for name in ("preempted_req_ids", "new_block_ids_to_zero"):
        first: Any = getattr(given_up, name, None)
        if first:
            then = getattr(step, name, None)
            setattr(step, name, first if not then else first | then if isinstance(first, set) else first + then)
    earlier, metadata = given_up.kv_connector_metadata, step.kv_connector_metadata
    if earlier is not None and metadata is not None:
        step.kv_connector_metadata = metadata.following(earlier)


class SiliconScheduler(TTScheduler):
    """TTScheduler on the decode side of HAWK."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._prefill_try: SchedulerOutput | None = None

    def _schedule_prefill_only(self) -> SchedulerOutput:
        self._prefill_try = super()._schedule_prefill_only()
        return self._prefill_try

    def _finalize_scheduler_output(self, scheduler_output: SchedulerOutput) -> SchedulerOutput:
        tried, self._prefill_try = self._prefill_try, None
        if tried is not None and tried is not scheduler_output:
            carry_over(tried, scheduler_output)
        finalized: SchedulerOutput = super()._finalize_scheduler_output(scheduler_output)
        return finalized
