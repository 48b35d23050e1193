"""The connector's calls around a step: what it says must be in the step's result, whichever way that comes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata
from vllm.v1.outputs import (
    EMPTY_MODEL_RUNNER_OUTPUT,
    AsyncModelRunnerOutput,
    KVConnectorOutput,
    ModelRunnerOutput,
)

from tt_plugin.vllm.silicon.transfers import StepTransfers

pytestmark = pytest.mark.vllm


class Feedback(KVConnectorWorkerMetadata):
    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        raise AssertionError("never called")


class Connector:
    """Notes what it is asked, and says something else in each answer and each step."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.said: list[KVConnectorOutput] = []

    def __getattr__(self, name: str) -> Any:
        def call(*_: Any) -> Any:
            self.calls.append(name)
            if name == "get_finished":
                step = len(self.said)
                self.said.append(
                    KVConnectorOutput(
                        finished_sending={f"sent {step}"},
                        finished_recving={f"received {step}"},
                        invalid_block_ids={step},
                        kv_connector_worker_meta=Feedback(),
                    )
                )
                return self.said[-1].finished_sending, self.said[-1].finished_recving
            if name == "get_block_ids_with_load_errors":
                return self.said[-1].invalid_block_ids
            if name == "build_connector_worker_meta":
                return self.said[-1].kv_connector_worker_meta
            return None

        return call


class Late(AsyncModelRunnerOutput):
    def get_output(self) -> ModelRunnerOutput:
        return EMPTY_MODEL_RUNNER_OUTPUT


def step() -> Any:
    return SimpleNamespace(kv_connector_metadata=object(), finished_req_ids=set())


def test_what_the_connector_says_comes_with_the_step_that_it_said_it_in() -> None:
    connector = Connector()
    transfers = StepTransfers(connector)  # type: ignore[arg-type]
    # Two steps are executed before the first is sampled, and a third has nothing to compute.
    assert transfers.execute(step(), lambda _: None) is None
    assert transfers.execute(step(), lambda _: None) is None
    third = transfers.execute(step(), lambda _: EMPTY_MODEL_RUNNER_OUTPUT)
    first = transfers.sampled(EMPTY_MODEL_RUNNER_OUTPUT)
    second = transfers.sampled(Late())
    assert isinstance(second, AsyncModelRunnerOutput)
    found = [result.kv_connector_output for result in (first, second.get_output(), third)]  # type: ignore[union-attr]
    assert found == connector.said
    assert EMPTY_MODEL_RUNNER_OUTPUT.kv_connector_output is None  # one object for all


def test_a_step_that_fails_leaves_no_metadata_behind() -> None:
    connector = Connector()

    def failing(_: Any) -> None:
        raise RuntimeError("the device failed")

    with pytest.raises(RuntimeError, match="the device failed"):
        StepTransfers(connector).execute(step(), failing)  # type: ignore[arg-type]
    assert connector.calls == [
        "bind_connector_metadata",
        "handle_preemptions",
        "start_load_kv",
        "clear_connector_metadata",
    ]
