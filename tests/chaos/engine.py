"""One vLLM engine in a process of its own that serves many requests at once: `python -m tests.chaos.engine`.

Orders are JSON lines on stdin, events JSON lines on the descriptor in argv.  `tests/chaos/side.py` is the other end.
Unlike `tests/e2e/engine.py`, which it builds on, it goes on stepping while it takes orders.
"""

from __future__ import annotations

import json
import os
import select
import sys
from collections import Counter
from typing import IO, Any

from tests.e2e.engine import Server

# How long an engine with nothing to compute waits for orders between two steps: while loads or packs run, and idle.
_WAITING_S = 0.002
_IDLE_S = 0.02


class ChaosServer(Server):
    """Requests by name; an event for the first token of each, and one for its end."""

    def __init__(self, options: dict[str, Any], events: IO[str]) -> None:
        super().__init__(options)
        self._events = events
        self._begun: set[str] = set()

    def tell(self, **event: Any) -> None:
        self._events.write(json.dumps(event) + "\n")

    def add(self, name: str, prompt: list[int], max_tokens: int, params: dict[str, Any] | None) -> None:
        from vllm import SamplingParams

        sampling = SamplingParams(
            max_tokens=max_tokens,
            temperature=0,
            ignore_eos=True,
            extra_args={"kv_transfer_params": params} if params is not None else None,
        )
        self.llm.llm_engine.add_request(name, {"prompt_token_ids": prompt}, sampling)

    def abort(self, name: str) -> None:
        """What vLLM's server does when a client is gone."""
        self.llm.llm_engine.abort_request([name])
        self._begun.discard(name)

    def ask(self, number: int) -> None:
        """What this side holds: the connector's counts, and vLLM's own blocks."""
        scheduler = self.scheduler()
        pool = scheduler.kv_cache_manager.block_pool
        worker = self.side()._worker
        self.tell(
            status=number,
            held=self.held(),
            transfers=Counter(report.outcome for report in worker.log.recent()),
            # vLLM keeps one block, which stands for none.
            used_blocks=pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(),
            requests=len(scheduler.requests),
            epoch=worker._epoch,
            descriptors=len(os.listdir("/proc/self/fd")),
        )

    def step(self) -> bool:
        """One step; whether it gave anything."""
        outputs = self.llm.llm_engine.step()
        for output in outputs:
            name, (answer,) = output.request_id, output.outputs
            if output.finished:
                self._begun.discard(name)
                self.tell(
                    done=name,
                    tokens=list(answer.token_ids),
                    finish=answer.finish_reason,
                    params=output.kv_transfer_params,
                )
            elif answer.token_ids and name not in self._begun:
                self._begun.add(name)
                self.tell(begun=name)
        return bool(outputs)

    @property
    def busy(self) -> bool:
        return bool(self.llm.llm_engine.has_unfinished_requests())


def main() -> None:
    events = os.fdopen(int(sys.argv[2]), "w", buffering=1)
    server = ChaosServer(json.loads(sys.argv[1]), events)
    server.tell(ready=True)
    buffer, moved = b"", False
    while True:
        pause = 0.0 if moved else _WAITING_S if server.busy else _IDLE_S
        if select.select([0], [], [], pause)[0]:
            data = os.read(0, 1 << 16)
            if not data:
                break
            *lines, buffer = (buffer + data).split(b"\n")
            for line in lines:
                order = json.loads(line)
                getattr(server, order.pop("order"))(**order)
        moved = server.step()
    # vLLM's and Mooncake's exit handlers are not what is tested here, and take a second.
    os._exit(0)


if __name__ == "__main__":
    main()
