"""A prefill and a decode engine on a network of their own, with keys, short deadlines, few blocks and a small disk."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

from hawk_connector.transport.curve import write_key_pair
from tests.chaos.load import Bounds, Prompt
from tests.chaos.network import Network, SmallDisk
from tests.chaos.side import Side
from tests.e2e.harness import Engine, decode_engine, prefill_engine

PREFILL_HOST, DECODE_HOST = 1, 2
PORT = 18550
VOCABULARY = 384

# Seconds, so that a fault outlives them all in little time; Mooncake takes none shorter than 5 for a read.
TIMES_PREFILL: dict[str, Any] = {
    "lease_s": 4.0,
    "buffer_wait_s": 5.0,
    "verdict_keep_s": 8.0,
    "transfer_timeout_s": 5,
}
TIMES_DECODE: dict[str, Any] = {
    "hello_deadline_s": 2.0,
    "admission_deadline_s": 3.0,
    "claim_hold_s": 8.0,
    "load_deadline_s": 9.0,
    "renew_s": 1.0,
    "resend_s": 0.25,
    "transfer_timeout_s": 5,
}
PAST_EVERY_DEADLINE_S = max(*TIMES_PREFILL.values(), *TIMES_DECODE.values()) + 1.0

# What computing may take on a busy machine, beside what the configuration grants.
_COMPUTE_S = 30.0
BOUNDS = Bounds(
    prefill_s=_COMPUTE_S,
    # A load may be given up at its deadline with a read just begun, which then fails, and is fenced.
    decode_s=_COMPUTE_S
    + sum(TIMES_DECODE[key] for key in ("admission_deadline_s", "claim_hold_s", "load_deadline_s"))
    + 2 * TIMES_DECODE["transfer_timeout_s"],
)
# What may be held so long after the last request: a lease, a wait for the buffer, farewells, a read and its fence.
IDLE_WITHIN_S = 10.0

# Blocks of 128 tokens are 1 MiB here (prefill), of 64 tokens 512 KiB (decode): eight requests do not fit at once.
SMALL: dict[str, Any] = {"max_model_len": 1024, "max_num_seqs": 8, "enable_prefix_caching": True}
PREFILL_CACHE_BYTES, DECODE_CACHE_BYTES = 20 << 20, 18 << 20
PREFILL: dict[str, Any] = {"send_buffer_bytes": 10 << 20, "parcel_tokens": 128}
HISTORY = 1 << 20  # every transfer is counted
# Half a second for a long prompt's KV, shared by all.
RATE = "80mbit"


def prompt_tokens(count: int, seed: int) -> list[tuple[int, ...]]:
    """``count`` prompts of 30 to 700 tokens; some share their first blocks."""
    rng = random.Random(f"prompts/{seed}")

    def draw(length: int) -> tuple[int, ...]:
        return tuple(rng.randrange(3, VOCABULARY) for _ in range(length))

    shared = [draw(length) for length in (128, 256, 384)]
    prompts = []
    for number in range(count):
        first = rng.choice(shared) if number % 3 == 0 else ()
        prompts.append((*first, *draw(rng.randrange(30, 700 - len(first)))))
    return prompts


def reference_answers(
    model: Path, log: Path, prompts: Sequence[tuple[int, ...]], lengths: Sequence[int]
) -> list[Prompt]:
    """The prompts with what one plain vLLM on its CPU backend answers."""
    with Engine({"model": str(model), "max_model_len": SMALL["max_model_len"]}, log) as alone:
        answers = alone.generate([list(p) for p in prompts], max_tokens=max(lengths), timeout_s=300)
    return [
        Prompt(tokens, tuple(answer["tokens"][0][:length]))
        for tokens, answer, length in zip(prompts, answers, lengths, strict=True)
    ]


class Deployment:
    """The two sides; started by ``start``, ended by ``close``.  ``kept``: where logs go when it ends."""

    def __init__(self, model: Path, kept: Path) -> None:
        self._stack = ExitStack()
        self._kept = kept
        kept.mkdir(parents=True, exist_ok=True)
        self.network = Network(2, RATE)
        self._stack.callback(self.network.close)
        self.disk = SmallDisk(4096)
        self._stack.callback(self.disk.close)
        self._stack.callback(self._keep_logs)
        self._model = model
        self._keys = self._make_keys()
        self.prefill = self._prefill_side()
        self._decode: Side | None = None

    def _make_keys(self) -> dict[str, dict[str, str]]:
        hosts = {"prefill": self.network.address(PREFILL_HOST), "decode": self.network.address(DECODE_HOST)}
        public = {}
        for name in hosts:
            file = self._kept / f"{name}.key"
            file.unlink(missing_ok=True)
            public[name] = write_key_pair(file).decode("ascii")
        keys = {}
        for name, other in (("prefill", "decode"), ("decode", "prefill")):
            known = self._kept / f"{name}.known"
            known.write_text(f"{hosts[other]} {public[other]}\n")
            keys[name] = {
                "side_channel_host": hosts[name],
                "curve_key_file": str(self._kept / f"{name}.key"),
                "curve_known_keys_file": str(known),
            }
        return keys

    def _open_log(self, name: str) -> IO[bytes]:
        return (self.disk.directory / name).open("ab")

    def _side(self, name: str, engine: Engine, host: int) -> Side:
        # Logs of every level that a user sees, so that a full disk is felt.
        environment = {**engine.environment, "VLLM_LOGGING_LEVEL": "INFO"}
        return Side(name, engine.options, environment, self._open_log, self.network.hosts[host - 1].wrapper)

    def _prefill_side(self) -> Side:
        engine = prefill_engine(
            self._model,
            self._kept / "unused",
            {
                **PREFILL,
                **TIMES_PREFILL,
                **self._keys["prefill"],
                "side_channel_port": PORT,
                "status_history": HISTORY,
            },
            kv_cache_memory_bytes=PREFILL_CACHE_BYTES,
            **SMALL,
        )
        return self._side("prefill", engine, PREFILL_HOST)

    def _decode_side(self, policy: str) -> Side:
        peer = self.network.address(PREFILL_HOST)
        engine = decode_engine(
            self._model,
            self._kept / "unused",
            config={
                **TIMES_DECODE,
                **self._keys["decode"],
                "side_channel_port": PORT,
                "status_history": HISTORY,
                "peers": [f"{peer}:{PORT}"],
                "allowed_peer_hosts": [peer],
            },
            policy=policy,
            kv_cache_memory_bytes=DECODE_CACHE_BYTES,
            **SMALL,
        )
        return self._side(f"decode-{policy}", engine, DECODE_HOST)

    async def start(self, policy: str) -> None:
        """Starts what does not run; a decode side of another policy is ended first."""
        if self._decode is not None:
            await self._decode.close()
        self._decode = self._decode_side(policy)
        waiting = [side.start() for side in (self.prefill, self.decode) if not side.alive]
        await asyncio.wait_for(asyncio.gather(*waiting), 240)

    @property
    def decode(self) -> Side:
        assert self._decode is not None, "not started"
        return self._decode

    @property
    def sides(self) -> tuple[Side, Side]:
        return self.prefill, self.decode

    async def close(self) -> None:
        try:
            for side in (self.prefill, self._decode):
                if side is not None:
                    await side.close()
        finally:
            self._stack.close()

    def _keep_logs(self) -> None:
        for log in self.disk.directory.glob("*.log"):
            (self._kept / log.name).write_bytes(log.read_bytes())
