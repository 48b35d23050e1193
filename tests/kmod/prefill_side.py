"""The prefill side in the VM: `python -m tests.kmod.prefill_side FOLDER`.

Computes one request's KV (made up, see tests/workers/source.py), packs and offers it over RDMA, and beside it a
SendBuffer of random bytes. Writes FOLDER/job, waits for FOLDER/pulled, and ends well only when nothing is held.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path

import msgspec
import torch

from hawk_connector.layout.kv_pool import KVPoolLayout
from hawk_connector.layout.kv_shape import KVShape
from hawk_connector.plan.pairing import DecodeFacts
from hawk_connector.prefill.send_buffer import SendBuffer
from hawk_connector.transport.mooncake import MooncakeEngine, mooncake_factory
from tests.kmod.job import Job, Loose, read_when_there, write_whole
from tests.workers.sides import MODEL, Sides, wait_idle
from tests.workers.source import Geometry, Prompt

__all__ = ["GEOMETRY", "loose_bytes"]

GEOMETRY = Geometry(family="LBHNC", layers=3, kv_heads=4, head_dim=64, block_size=16, dtype=torch.bfloat16)
TOKENS = 300  # five blocks of 64, the last with 44 tokens
SEED = 41
LAYOUT = KVPoolLayout(
    kind="cross_layer",
    layers=GEOMETRY.layers,
    chips=1,
    heads=GEOMETRY.kv_heads,
    block_size=64,
    head_dim=GEOMETRY.head_dim,
    codec="bfp8",
    banks=8,
    alignment=64,
)
PATIENCE_S = 600.0


def loose_bytes(loose: Loose) -> bytes:
    return bytes(torch.randint(256, (loose.nbytes,), generator=torch.Generator().manual_seed(loose.seed)).tolist())


def main() -> None:
    folder = Path(sys.argv[1])
    shape = KVShape(GEOMETRY.layers, GEOMETRY.kv_heads, GEOMETRY.head_dim, "bfloat16")
    loose_engine = MooncakeEngine("127.0.0.1", protocol="rdma", timeout_s=120)
    buffer = SendBuffer(300_001, torch.device("cpu"))
    loose_engine.register(buffer.address, buffer.nbytes)
    loose = Loose(loose_engine.session, buffer.address, buffer.nbytes, 43, bank=2, target=(40 << 20) + 4093)
    buffer.region(0, buffer.nbytes)[:] = torch.frombuffer(bytearray(loose_bytes(loose)), dtype=torch.uint8)
    factory = mooncake_factory("127.0.0.1", protocol="rdma", timeout_s=120, max_segments_per_batch=1024)
    with ExitStack() as stack:
        side = Sides(stack).prefill(
            GEOMETRY, factory, parcel_tokens=128, lease_s=PATIENCE_S, buffer_wait_s=PATIENCE_S, protocol="rdma"
        )
        running = side.run(Prompt(GEOMETRY, TOKENS, SEED))
        job = Job(
            facts=DecodeFacts(shape, MODEL, LAYOUT),
            ticket=side.ticket(running),
            tokens=TOKENS,
            seed=SEED,
            num_blocks=12,
            # The first address that TTNN hands out on Blackhole, and one far from it.
            buffer_addresses=(0x100080, 32 << 20),
            block_ids=(11, 3, 7, 8, 0),
            loose=loose,
        )
        write_whole(folder / "job", msgspec.json.encode(job))
        read_when_there(folder / "pulled", PATIENCE_S)
        side.wait_released(running)
        wait_idle(side)
        (report,) = side.reports()
        assert (report.outcome, report.tokens) == ("completed", TOKENS), report
    loose_engine.close()
    print("ok prefill holds nothing after its request was pulled", flush=True)


if __name__ == "__main__":
    main()
