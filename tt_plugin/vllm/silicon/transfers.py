"""The KV connector's calls around each step, which Tenstorrent's runner does not make.

That runner gives a step's result in one of three ways: at once (nothing was scheduled), from ``sample_tokens``, or from
there as an object that is asked later.  The connector's output belongs to the step and is put into its result,
whichever way it comes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

from vllm.v1.outputs import AsyncModelRunnerOutput, KVConnectorOutput, ModelRunnerOutput

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
    from vllm.v1.core.sched.output import SchedulerOutput

__all__ = ["LateOutput", "StepTransfers"]

Result: TypeAlias = ModelRunnerOutput | AsyncModelRunnerOutput | None


class LateOutput(AsyncModelRunnerOutput):
    """A step's result that is still on the device, with what the connector had to say at that step."""

    def __init__(self, output: AsyncModelRunnerOutput, transfers: KVConnectorOutput) -> None:
        self._output = output
        self._transfers = transfers

    def get_output(self) -> ModelRunnerOutput:
        return replace(self._output.get_output(), kv_connector_output=self._transfers)


class StepTransfers:
    """Makes the connector's calls; one thread's, the step loop's."""

    def __init__(self, connector: KVConnectorBase_V1) -> None:
        self._connector = connector
        self._unsampled: deque[KVConnectorOutput] = deque()

    def execute(self, step: SchedulerOutput, execute: Callable[[SchedulerOutput], Result]) -> Result:
        """Runs ``execute(step)`` with loads begun before it and ended loads collected after it.

        None means, as in vLLM, that the result comes from ``sample_tokens``; ``sampled`` is then called once.
        """
        connector, metadata = self._connector, step.kv_connector_metadata
        if metadata is None:
            raise ValueError("expected the connector's metadata in every step of an instance with a KV connector")
        connector.bind_connector_metadata(metadata)
        try:
            connector.handle_preemptions(metadata)
            # HAWK only notes what to load: the reads run on threads of their own.
            connector.start_load_kv(None)
            result = execute(step)
            connector.wait_for_save()
            transfers = self._collect(step)
        finally:
            connector.clear_connector_metadata()
        if result is None:
            self._unsampled.append(transfers)
            return None
        return _with(result, transfers)

    def sampled(self, result: Result) -> Result:
        """``result`` of ``sample_tokens`` with the connector's output of the oldest step that waits for one."""
        if result is None:
            return None
        return _with(result, self._unsampled.popleft())

    def _collect(self, step: SchedulerOutput) -> KVConnectorOutput:
        connector = self._connector
        sent, received = connector.get_finished(step.finished_req_ids)
        return KVConnectorOutput(
            finished_sending=sent,
            finished_recving=received,
            invalid_block_ids=connector.get_block_ids_with_load_errors(),
            kv_connector_stats=connector.get_kv_connector_stats(),
            # How peers did and whether this side drains: without it the scheduler would never hear of either.
            kv_connector_worker_meta=connector.build_connector_worker_meta(),
        )


def _with(result: ModelRunnerOutput | AsyncModelRunnerOutput, transfers: KVConnectorOutput) -> Result:
    if isinstance(result, AsyncModelRunnerOutput):
        return LateOutput(result, transfers)
    # A copy: vLLM's result of an empty step is one object for all.
    return replace(result, kv_connector_output=transfers)
