"""One vLLM engine in a process of its own: reads requests as JSON lines on stdin, answers on the descriptor in argv.

An idle in-process engine does not step, so the loop below steps it while nothing is asked.  `tests/e2e/harness.py` is
the other end.
"""

from __future__ import annotations

import json
import os
import select
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np


class Server:
    def __init__(self, options: dict[str, Any]) -> None:
        from vllm import LLM

        self.llm = LLM(**options)
        self.count = 0
        self.holding = False

    def idle(self) -> None:
        """Steps the engine, unless a request is held between two of its steps."""
        if not self.holding:
            self.llm.llm_engine.step()

    def side(self) -> Any:
        """The connector's worker side, or None on a plain engine."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

        if has_kv_transfer_group():
            return get_kv_transfer_group()._worker
        # A worker that holds its connector itself.
        connector = getattr(self.llm.llm_engine.model_executor.driver_worker.worker, "_connector", None)
        return connector._worker if connector is not None else None

    def _prompts(self, prompts: list[Any]) -> list[Any]:
        return [{"prompt_token_ids": p} if isinstance(p, list) else p for p in prompts]

    def generate(
        self, prompts: list[Any], params: list[dict[str, Any] | None], max_tokens: int, n: int = 1, logprobs: int = 0
    ) -> dict[str, Any]:
        """Greedy generation (seeded where ``n`` > 1); ``params`` are kv_transfer_params, one for each prompt."""
        from vllm import SamplingParams

        sampling = [
            SamplingParams(
                max_tokens=max_tokens,
                temperature=0 if n == 1 else 1,
                seed=None if n == 1 else 1,
                ignore_eos=True,
                n=n,
                logprobs=logprobs or None,
                extra_args={"kv_transfer_params": p} if p is not None else None,
            )
            for p in params
        ]
        outputs = self.llm.generate(self._prompts(prompts), sampling, use_tqdm=False)
        return {
            "outputs": [
                {
                    "tokens": [list(o.token_ids) for o in out.outputs],
                    "finish": [o.finish_reason for o in out.outputs],
                    "params": out.kv_transfer_params,
                    "prompt_tokens": list(out.prompt_token_ids),
                    "cached": out.num_cached_tokens,
                    "logprobs": [
                        [{str(t): lp.logprob for t, lp in step.items()} for step in o.logprobs or ()]
                        for o in out.outputs
                    ],
                }
                for out in outputs
            ]
        }

    def status(self) -> dict[str, Any]:
        worker = self.side()._worker
        reports = [r.outcome for r in worker.log.recent()]
        return {"held": self.held(), "reports": reports, "address": _address(worker)}

    def held(self) -> dict[str, int]:
        """What the connector's two roles hold, worker and scheduler."""
        holders = [self.side()._worker]
        connector = self.scheduler().connector
        if hasattr(connector._scheduler._scheduler, "_protocol"):  # a decode side's scheduler admits requests
            holders.append(connector._scheduler._scheduler)
        counts: Counter[str] = Counter()
        for holder in holders:
            with holder._lock:
                counts.update(holder._protocol.held())
        return dict(counts)

    def scheduler(self) -> Any:
        """vLLM's own."""
        return self.llm.llm_engine.engine_core.engine_core.scheduler

    def reports(self) -> dict[str, Any]:
        import msgspec

        return {"reports": [msgspec.to_builtins(r) for r in self.side()._worker.log.recent()]}

    def facts(self) -> dict[str, Any]:
        """What this prefill rank says of itself in a pairing, and where it can be asked."""
        import msgspec

        worker = self.side()._worker
        return {"facts": msgspec.to_builtins(worker._facts), "address": _address(worker)}

    def source(self, path: str) -> dict[str, Any]:
        """The prefill side's cache in natural order: float32 ``[layers, 2 (K, V), blocks, heads, tokens, dim]``."""
        layers = self.side()._worker._layers
        np.save(path, np.stack([np.stack([x.float().numpy() for x in (s.k, s.v)]) for s in layers]))
        return {}

    def pools(self) -> Any:
        return self.side()._worker._reader._landing._pools

    def geometry(self) -> dict[str, Any]:
        import msgspec

        pools = self.pools()
        return {
            "layout": msgspec.to_builtins(pools.layout),
            "buffer_addresses": list(pools.buffer_addresses),
            "num_blocks": pools.num_blocks,
            "bases": list(pools.device.table.bases),
        }

    def banks(self, path: str) -> dict[str, Any]:
        """Every pool's pages: uint8 ``[chips, pools, banks, slots, pitch]``."""
        pools = self.pools()
        layout = pools.layout
        pages = getattr(pools, "pages", None) or self._device_pages
        np.save(path, np.stack([np.stack([pages(c, p) for p in range(layout.pools)]) for c in range(layout.chips)]))
        return {}

    def _device_pages(self, chip: int, pool: int) -> Any:
        """A pool's pages read from a device whose banks are not host memory: uint8 ``[banks, slots, pitch]``."""
        pools = self.pools()
        layout = pools.layout
        slots = layout.rule.slots(layout.pool_pages(pools.num_blocks))
        address = pools.buffer_addresses[pool]
        banks = [pools.device.read(chip, bank, address, slots * layout.page_pitch) for bank in range(layout.banks)]
        return np.stack(banks).reshape(layout.banks, slots, layout.page_pitch)

    def prefill_only(self, prompt: Any, params: dict[str, Any]) -> dict[str, Any]:
        """Prefills one request and says which blocks of this side's cache hold it."""
        from vllm import SamplingParams

        engine = self.llm.llm_engine
        scheduler = engine.engine_core.engine_core.scheduler
        self.count += 1
        name = f"prefill-{self.count}"
        sampling = SamplingParams(max_tokens=1, temperature=0, extra_args={"kv_transfer_params": params})
        engine.add_request(name, self._prompts([prompt])[0], sampling)
        blocks: list[int] = []
        for _ in range(1000):
            done = [output for output in engine.step() if output.request_id == name and output.finished]
            found = [r for r in scheduler.requests if r.startswith(name)]
            if found:
                # A finished request keeps its blocks until they are packed; their contents stay longer.
                blocks = list(scheduler.kv_cache_manager.get_block_ids(found[0])[0])
            if done:
                return {"params": done[0].kv_transfer_params, "block_ids": blocks}
        raise RuntimeError("the prefill did not end")

    def load_only(
        self, prompt: Any, params: dict[str, Any], max_tokens: int, logprobs: int | None = None
    ) -> dict[str, Any]:
        """Adds a request and steps until its KV has landed, not one step further; ``finish`` goes on with it."""
        from vllm import SamplingParams

        engine = self.llm.llm_engine
        self.count += 1
        request = f"hold-{self.count}"
        before = len(self.side()._worker.log.recent())
        sampling = SamplingParams(
            max_tokens=max_tokens,
            temperature=0,
            ignore_eos=True,
            logprobs=logprobs,
            extra_args={"kv_transfer_params": params},
        )
        engine.add_request(request, self._prompts([prompt])[0], sampling)
        for _ in range(20000):
            engine.step()
            if len(self.side()._worker.log.recent()) > before:
                break
        else:
            raise RuntimeError("the load did not end")
        scheduler = engine.engine_core.engine_core.scheduler
        self.holding = True
        found = next(r for r in scheduler.requests if r.startswith(request))
        blocks = scheduler.kv_cache_manager.get_block_ids(found)[0]
        return {"request": request, "block_ids": list(blocks)}

    def finish(self, request: str) -> dict[str, Any]:
        """Runs a held request to its end."""
        self.holding = False
        engine = self.llm.llm_engine
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.request_id == request and output.finished:
                    return {
                        "tokens": list(output.outputs[0].token_ids),
                        "logprobs": [
                            {str(t): lp.logprob for t, lp in step.items()} for step in output.outputs[0].logprobs or ()
                        ],
                    }
        raise RuntimeError(f"{request} did not finish")

    def begin(self, prompt: Any, params: dict[str, Any], max_tokens: int, until_loading: bool = True) -> dict[str, Any]:
        """Adds a request whose KV is elsewhere and steps until its load is under way; ``finish`` goes on with it."""
        from vllm import SamplingParams

        engine = self.llm.llm_engine
        self.count += 1
        request = f"begun-{self.count}"
        extra = {"kv_transfer_params": params}
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True, extra_args=extra)
        engine.add_request(request, self._prompts([prompt])[0], sampling)
        for _ in range(20000):
            engine.step()
            if not until_loading or self.held()["loads"]:
                return {"request": request}
        raise RuntimeError("the load did not begin")

    def beside(self, prompt: Any, max_tokens: int) -> dict[str, Any]:
        """Runs one request to its end beside whatever else is there; counts and times the steps after its first token.

        ``longest_s`` is that of the longest such step.
        """
        from vllm import SamplingParams

        engine = self.llm.llm_engine
        self.count += 1
        request = f"beside-{self.count}"
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
        engine.add_request(request, self._prompts([prompt])[0], sampling)
        seen, times = 0, []
        while engine.has_unfinished_requests():
            begun = time.perf_counter()
            outputs = engine.step()
            if seen:
                times.append(time.perf_counter() - begun)
            for output in outputs:
                if output.request_id == request:
                    seen = len(output.outputs[0].token_ids)
                    if output.finished:
                        tokens = list(output.outputs[0].token_ids)
                        median = statistics.median(times)
                        return {"tokens": tokens, "steps": len(times), "median_s": median, "longest_s": max(times)}
        raise RuntimeError(f"{request} did not finish")

    def flip(self, chip: int, pool: int, bank: int, slot: int, byte: int, mask: int) -> dict[str, Any]:
        """Changes one byte of the banks."""
        self.pools().pages(chip, pool)[bank, slot, byte] ^= mask
        return {}

    def poison(self, nbytes: int, keep_blocks: list[int]) -> dict[str, Any]:
        """Fills every tensor of ``nbytes`` or more that is not a weight, and every other block of the banks, with NaN.

        What a cache in another layout would have to live in is among these.
        """
        import gc

        import torch

        model = self.side_model()
        weights = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
        filled = 0
        for found in gc.get_objects():
            # Plain tensors only: tracing leaves fakes without memory, and isinstance looks through dead weak proxies.
            if type(found) is not torch.Tensor or found.device.type != "cpu":
                continue
            size = found.untyped_storage().nbytes()
            if size < nbytes or found.untyped_storage().data_ptr() in weights:
                continue
            if found.dtype in (torch.float32, torch.bfloat16, torch.float16):
                found.data.fill_(float("nan"))
            elif found.dtype == torch.uint8:
                found.data.fill_(0xFF)
            else:
                continue
            filled += 1
        for cache in self.llm.llm_engine.vllm_config.compilation_config.static_forward_context.values():
            handle = getattr(cache, "kv_cache", None)
            if isinstance(handle, torch.Tensor):
                handle.data.fill_(0xFF)
                filled += 1
        pools = self.pools()
        layout = pools.layout
        units = [b for b in range(pools.num_blocks) if b not in keep_blocks]
        pages = (np.array(units)[:, None] * layout.pages_per_unit + np.arange(layout.pages_per_unit)).reshape(-1)
        for chip in range(layout.chips):
            for pool in range(layout.pools):
                pools.pages(chip, pool)[pages % layout.banks, pages // layout.banks] = 0xFF
        return {"filled": filled}

    def side_model(self) -> Any:
        return self.llm.llm_engine.model_executor.driver_worker.worker.model_runner.model

    def scheduler_number(self, attribute: str) -> dict[str, Any]:
        """A number that this engine's scheduler keeps."""
        return {"value": getattr(self.scheduler(), attribute)}

    def reset_prefix_cache(self) -> dict[str, Any]:
        return {"ok": bool(self.llm.reset_prefix_cache())}


def _address(worker: Any) -> str:
    return str(worker._server.address)


def _lines() -> Iterator[str | None]:
    """Lines of stdin; None while there is none."""
    buffer = b""
    while True:
        ready, _, _ = select.select([0], [], [], 0.005)
        if not ready:
            yield None
            continue
        data = os.read(0, 1 << 16)
        if not data:
            return
        buffer += data
        while b"\n" in buffer:
            line, buffer = buffer.split(b"\n", 1)
            yield line.decode()


def main() -> None:
    answers = os.fdopen(int(sys.argv[2]), "w", buffering=1)
    server = Server(json.loads(sys.argv[1]))
    answers.write(json.dumps({"ready": True}) + "\n")
    for line in _lines():
        if line is None:
            server.idle()
            continue
        call = json.loads(line)
        name = call.pop("call")
        if name == "quit":
            break
        try:
            result = getattr(server, name)(**call)
        except Exception as error:  # the other end raises it
            result = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(result) + "\n")
    # vLLM's and Mooncake's exit handlers are not what is tested here, and take a second.
    answers.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
