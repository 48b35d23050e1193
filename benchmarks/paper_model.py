"""A model, not a measurement: what HAWK's plans should take on the hardware of the paper.

    python benchmarks/paper_model.py [--nic GBPS] [--pcie GBPS] [--copy GBPS] [--convert GBPS] [--read-us] ...

Bytes and reads are those of HAWK's own plans for Llama-3.1-70B, 4 prefill ranks, 4 chips with 8 banks, cross_layer
pools of 64-token blocks, decode's blocks scattered.  Rates are the options; their defaults are data-sheet numbers,
taken down where the sheet gives a peak, and none of them was measured by us.  Prints the table of docs/performance.md.
"""

from __future__ import annotations

import argparse
import random
from dataclasses import dataclass

import numpy as np

from hawk_connector.layout.catalog import device_named, layout_named
from hawk_connector.layout.kv_pool import KVPoolLayout
from hawk_connector.layout.kv_shape import KVShape
from hawk_connector.plan.pairing import DecodeFacts, Pairing, PrefillFacts, pair
from hawk_connector.plan.segments import PoolPlacement, pool_segments

LAYERS, KV_HEADS, HEAD_DIM, RANKS, CHIPS, SOURCE_BLOCK, DECODE_BLOCK = 80, 8, 128, 4, 4, 16, 64
PARCEL_TOKENS = 512
SIZES_MB = (10, 20, 40, 80, 160, 320, 640, 1280)
TOKEN_BYTES = LAYERS * KV_HEADS * HEAD_DIM * 2 * 2  # K and V in bf16
MB = 1 << 20
POOL_BLOCKS = 4096


@dataclass(frozen=True)
class Machine:
    """Rates in GB/s of a whole node, times in seconds.

    ``nic``: of the node's one adapter.  ``pcie``: between host memory and all the node's devices together.  ``copy``:
    of one GPU's memory, read and written.  ``convert``: host code, all cores, GB/s of bf16 source.  ``read``: one RDMA
    read besides its bytes.  ``exchange``: one question and answer on the side channel.
    """

    nic: float
    pcie: float
    copy: float
    convert: float
    read: float
    exchange: float


@dataclass(frozen=True)
class Plan:
    """What one prompt takes: parcels, bytes on the wire and reads of all ranks, and of the first parcel alone."""

    parcels: int
    nbytes: int
    reads: int
    first_tokens: int


def pool(codec: str) -> KVPoolLayout:
    return layout_named("ttnn-interleaved").pool(
        kind="cross_layer",
        layers=LAYERS,
        chips=CHIPS,
        heads=KV_HEADS // CHIPS,
        block_size=DECODE_BLOCK,
        head_dim=HEAD_DIM,
        codec=codec,
        device=device_named("blackhole-p150"),
    )


def count(tokens: int, layout: KVPoolLayout) -> Plan:
    """Counts HAWK's own plans, rank by rank and parcel by parcel."""
    shape = KVShape(LAYERS, KV_HEADS, HEAD_DIM, "bfloat16")
    size = layout.rule.slots(layout.pool_pages(POOL_BLOCKS)) * layout.page_pitch
    origins = np.arange(CHIPS * layout.banks, dtype=np.int64).reshape(CHIPS, layout.banks) * 2 * layout.pools * size
    placement = PoolPlacement(origins, tuple(i * size for i in range(layout.pools)), POOL_BLOCKS)
    ids = random.Random(0).sample(range(0, POOL_BLOCKS, 2), -(-tokens // DECODE_BLOCK))
    step = PARCEL_TOKENS // DECODE_BLOCK
    nbytes = reads = 0
    for rank in range(RANKS):
        pairing = pair(
            PrefillFacts(shape, "llama-3.1-70b", RANKS, rank, SOURCE_BLOCK, 1 << 32),
            DecodeFacts(shape, "llama-3.1-70b", layout),
        )
        if not isinstance(pairing, Pairing):
            raise SystemExit("\n".join(str(mismatch) for mismatch in pairing))
        for first in range(0, len(ids), step):
            blocks = ids[first : first + step]
            segments = pool_segments(pairing.plan(len(blocks)), 0, blocks, placement)
            nbytes += segments.nbytes
            reads += segments.count
    return Plan(-(-len(ids) // step), nbytes, reads, min(tokens, PARCEL_TOKENS))


def wire(nbytes: float, reads: float, machine: Machine) -> float:
    """Reads and bytes overlap: the slower of the two decides."""
    return max(nbytes / (machine.nic * 1e9), reads * machine.read)


def hawk(tokens: int, plan: Plan, machine: Machine, cold: bool) -> float:
    """Pull, Ready; the bytes; Done, Accepted.  Cold: the first parcel's pack is on the clock, later ones are hidden."""
    pack = plan.first_tokens * TOKEN_BYTES / RANKS / (machine.copy * 1e9) if cold else 0.0
    return 2 * machine.exchange + pack + wire(plan.nbytes, plan.reads, machine)


def direct(tokens: int, machine: Machine) -> float:
    """Equal caches in bf16: a read for each block of 16 tokens, layer and rank."""
    reads = -(-tokens // SOURCE_BLOCK) * LAYERS * RANKS
    return 2 * machine.exchange + wire(tokens * TOKEN_BYTES, reads, machine)


def host(tokens: int, plan: Plan, machine: Machine) -> tuple[float, float]:
    """Device to host, wire, conversion, host to device: all parcels one step after the other, and overlapped.

    Overlapped, the slowest step decides and the others are paid for the first parcel alone.
    """
    raw = tokens * TOKEN_BYTES
    steps = (
        raw / (machine.pcie * 1e9),
        raw / (machine.nic * 1e9),
        raw / (machine.convert * 1e9),
        plan.nbytes / (machine.pcie * 1e9),
    )
    first = plan.first_tokens / tokens
    overlapped = max(steps) + (sum(steps) - max(steps)) * first
    return 2 * machine.exchange + sum(steps), 2 * machine.exchange + overlapped


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nic", type=float, default=25.0, help="GB/s: HDR InfiniBand, 200 Gb/s, one adapter a node")
    parser.add_argument("--pcie", type=float, default=25.0, help="GB/s: PCIe 4.0 x16 (32 GB/s) less its overhead")
    parser.add_argument("--copy", type=float, default=700.0, help="GB/s: A100, half of 1,555 GB/s, less a tenth")
    parser.add_argument("--convert", type=float, default=16.0, help="GB/s of bf16 on the host: 8 cores at 2 GB/s")
    parser.add_argument("--read-us", type=float, default=0.3, help="µs: an RDMA read besides its bytes (assumed)")
    parser.add_argument("--exchange-us", type=float, default=200.0, help="µs: a question and answer by ZMQ (assumed)")
    args = parser.parse_args()
    machine = Machine(args.nic, args.pcie, args.copy, args.convert, args.read_us * 1e-6, args.exchange_us * 1e-6)
    heads = (
        "size in bf16, MB",
        "tokens",
        "direct, ms",
        "hawk bf16, ms",
        "hawk bfp8, ms",
        "hawk bfp8 cold, ms",
        "host in steps, ms",
        "host overlapped, ms",
        "bfp8 reads",
        "bytes a read",
    )
    print(f"| {' | '.join(heads)} |")
    print("|---" * len(heads) + "|")
    for size in SIZES_MB:
        tokens = size * MB // TOKEN_BYTES
        wide, narrow = count(tokens, pool("bfloat16")), count(tokens, pool("bfp8"))
        steps, overlapped = host(tokens, narrow, machine)
        times = (
            direct(tokens, machine),
            hawk(tokens, wide, machine, cold=False),
            hawk(tokens, narrow, machine, cold=False),
            hawk(tokens, narrow, machine, cold=True),
            steps,
            overlapped,
        )
        cells = " | ".join(f"{t * 1e3:.2f}" for t in times)
        print(f"| {size} | {tokens} | {cells} | {narrow.reads} | {narrow.nbytes // narrow.reads:,} |")


if __name__ == "__main__":
    main()
