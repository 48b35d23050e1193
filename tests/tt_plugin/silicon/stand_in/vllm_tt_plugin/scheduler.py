"""The scheduler's contract: prefill and decode do not mix in a step, and a prefill step without tokens is given up."""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import create_request_queue


class TTScheduler(AsyncScheduler):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.given_up_loads = 0

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        decoding = [request for request in self.running if not request.is_prefill_chunk]
        if not (any(self._queues().values()) or len(decoding) < len(self.running)):
            return self._finalize_scheduler_output(super().schedule())
        tried = self._schedule_prefill_only()
        if tried.total_num_scheduled_tokens == 0 and decoding:
            if tried.kv_connector_metadata is not None:
                self.given_up_loads += len(tried.kv_connector_metadata.step.loads)
            return self._finalize_scheduler_output(self._schedule_decode_only())
        return self._finalize_scheduler_output(tried)

    def _finalize_scheduler_output(self, scheduler_output: SchedulerOutput) -> SchedulerOutput:
        return scheduler_output

    def _schedule_prefill_only(self) -> SchedulerOutput:
        decoding = [request for request in self.running if not request.is_prefill_chunk]
        self.running = [request for request in self.running if request.is_prefill_chunk]
        self.max_num_running_reqs -= len(decoding)
        try:
            return super().schedule()
        finally:
            self.running.extend(decoding)
            self.max_num_running_reqs += len(decoding)

    def _schedule_decode_only(self) -> SchedulerOutput:
        queues = self._queues()
        for name in queues:
            setattr(self, name, create_request_queue(self.policy))
        try:
            return super().schedule()
        finally:
            for name, queue in queues.items():
                queue.prepend_requests(getattr(self, name))
                setattr(self, name, queue)

    def _queues(self) -> dict[str, Any]:
        """vLLM's queues of requests that have not begun; releases differ in what they keep apart."""
        names = ("waiting", "skipped_waiting")
        return {name: getattr(self, name) for name in names if hasattr(self, name)}
