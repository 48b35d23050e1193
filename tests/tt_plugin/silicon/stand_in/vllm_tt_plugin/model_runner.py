"""The runner's contract: how it calls the model, what it keeps, and that results wait for `sample_tokens`."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import torch
import ttnn
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput

STEP_S = 0.002  # what a step takes on the device; without it hundreds are over before a peer has answered


class Model:
    """tt_transformers' face to the runner; every answer is token 7."""

    class Arguments:
        use_hf_rope = False

    model_args = (Arguments(),)

    def __init__(self, mesh: ttnn.Mesh) -> None:
        self.mesh = mesh
        self.calls: list[dict[str, Any]] = []

    def allocate_kv_cache(self, shape: tuple[int, ...], dtype: Any, layers: int) -> Any:
        def tensor() -> ttnn.Tensor:
            return ttnn.empty(
                list(shape),
                dtype=ttnn.bfloat8_b,
                layout=ttnn.TILE_LAYOUT,
                device=self.mesh,
                memory_config=ttnn.DRAM_MEMORY_CONFIG,
            )

        return [[[tensor(), tensor()] for _ in range(layers)]]

    def prefill_forward(self, page_tables_per_layer: Any = None, **kwargs: Any) -> None:
        self.calls.append({**kwargs, "page_tables_per_layer": page_tables_per_layer})

    def decode_forward(self, page_tables_per_layer: Any = None, **kwargs: Any) -> None:
        self.calls.append({**kwargs, "page_tables_per_layer": page_tables_per_layer})


class TTModelRunner:
    def __init__(self, mesh: ttnn.Mesh) -> None:
        self.mesh = mesh
        self.model: Any = Model(mesh)
        self.kv_caches: Any = None
        self.prompts: dict[str, int] = {}
        self.tables: dict[str, list[int]] = {}
        self.unsampled: deque[ModelRunnerOutput] = deque()

    def execute_model(self, scheduler_output: Any) -> ModelRunnerOutput | None:
        step = scheduler_output
        for request in step.finished_req_ids:
            self.prompts.pop(request, None)
            self.tables.pop(request, None)
        computed: dict[str, int] = {}
        for new in step.scheduled_new_reqs:
            self.prompts[new.req_id] = len(new.prompt_token_ids)
            self.tables[new.req_id] = list(new.block_ids[0])
            computed[new.req_id] = new.num_computed_tokens
        cached = step.scheduled_cached_reqs
        for request, tokens, blocks in zip(
            cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True
        ):
            computed[request] = tokens
            if blocks is not None:
                self.tables[request] += blocks[0]
        if not step.total_num_scheduled_tokens:
            return EMPTY_MODEL_RUNNER_OUTPUT
        requests = list(step.num_scheduled_tokens)
        width = max(len(self.tables[request]) for request in requests)
        table = torch.full((len(requests), width), -1, dtype=torch.int32)
        for row, request in enumerate(requests):
            table[row, : len(self.tables[request])] = torch.tensor(self.tables[request], dtype=torch.int32)
        starts = [computed[request] for request in requests]
        time.sleep(STEP_S)
        if step.scheduled_new_reqs:
            self.model.prefill_forward(page_table=table, kv_cache=self.kv_caches, start_pos=starts)
        else:
            self.model.decode_forward(page_table=table, kv_cache=self.kv_caches, start_pos=starts)
        ended = [computed[r] + step.num_scheduled_tokens[r] >= self.prompts[r] for r in requests]
        self.unsampled.append(
            ModelRunnerOutput(
                req_ids=requests,
                req_id_to_index={request: index for index, request in enumerate(requests)},
                sampled_token_ids=[[7] if done else [] for done in ended],
            )
        )
        return None
