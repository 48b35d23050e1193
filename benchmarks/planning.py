"""How long planning takes: all reads of one request, for every prefill rank and parcel.

The case is the one of the project's target: 8,192 tokens of Llama-3.1-70B, prefilled on 4 ranks, decoded on 4 chips
with a cross_layer bfp8 pool of 64-token blocks, decode's blocks scattered.  Each figure is the best and the median of
many runs after the first, which fills the tables that later ones share; the machine may be busy with other things.

    python benchmarks/planning.py [--tokens 8192] [--parcel-tokens 512] [--pool cross_layer] [--runs 200]
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable

import numpy as np

from hawk_connector.layout.kv_pool import KVPoolLayout
from hawk_connector.layout.kv_shape import KVShape
from hawk_connector.plan.pairing import DecodeFacts, Pairing, PrefillFacts, pair
from hawk_connector.plan.segments import PoolPlacement, Segments, pool_segments, request_segments

LAYERS, KV_HEADS, HEAD_DIM, RANKS, CHIPS, BANKS, BLOCK = 80, 8, 128, 4, 4, 8, 64
POOL_BLOCKS = 4096


def pairings(layout: KVPoolLayout) -> list[Pairing]:
    """One for each prefill rank."""
    shape = KVShape(LAYERS, KV_HEADS, HEAD_DIM, "bfloat16")
    found = []
    for rank in range(RANKS):
        facts = PrefillFacts(shape, "llama-3.1-70b", RANKS, rank, 16, 1 << 32)
        pairing = pair(facts, DecodeFacts(shape, "llama-3.1-70b", layout))
        if not isinstance(pairing, Pairing):
            raise SystemExit("\n".join(str(mismatch) for mismatch in pairing))
        found.append(pairing)
    return found


def placement_of(layout: KVPoolLayout) -> PoolPlacement:
    """Made-up addresses: a bank has 64 GiB for itself; nothing is read there."""
    size = layout.rule.slots(layout.pool_pages(POOL_BLOCKS)) * layout.page_pitch
    banks = np.arange(CHIPS * BANKS, dtype=np.int64).reshape(CHIPS, BANKS)
    return PoolPlacement((banks + 1) << 36, tuple(pool * size for pool in range(layout.pools)), POOL_BLOCKS)


def timed(name: str, work: Callable[[], list[Segments]], runs: int) -> None:
    """Prints the first run and the later ones, in milliseconds."""
    times = []
    for _ in range(runs + 1):
        start = time.perf_counter()
        found = work()
        times.append((time.perf_counter() - start) * 1e3)
    reads, nbytes = sum(part.count for part in found), sum(part.nbytes for part in found)
    print(
        f"{name:<32} {len(found):>4} parcels {reads:>8} reads {nbytes:>14,} bytes   first {times[0]:8.2f} ms   "
        f"then best {min(times[1:]):6.3f} ms, median {statistics.median(times[1:]):6.3f} ms"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--parcel-tokens", type=int, default=512)
    parser.add_argument("--pool", choices=["cross_layer", "per_layer"], default="cross_layer")
    parser.add_argument("--runs", type=int, default=200)
    given = parser.parse_args()
    layout = KVPoolLayout(given.pool, LAYERS, CHIPS, KV_HEADS // CHIPS, BLOCK, HEAD_DIM, "bfp8", BANKS, 64)
    ranks, placement = pairings(layout), placement_of(layout)
    blocks, each = given.tokens // BLOCK, given.parcel_tokens // BLOCK
    parcels = blocks // each
    if not parcels or blocks % each:
        raise SystemExit("--tokens must be a multiple of --parcel-tokens, and both multiples of 64")
    nbytes = ranks[0].plan(each).nbytes
    regions = [(1 << 46) + index * nbytes for index in range(parcels)]
    for order in ("scattered", "consecutive"):
        ids = list(range(blocks)) if order == "consecutive" else random.Random(1).sample(range(POOL_BLOCKS), blocks)
        table = np.array(ids, dtype=np.int64).reshape(parcels, each)
        lists = table.tolist()

        def one_by_one(lists: list[list[int]] = lists) -> list[Segments]:
            return [
                pool_segments(pairing.plan(each), region, mine, placement)
                for pairing in ranks
                for region, mine in zip(regions, lists, strict=True)
            ]

        def at_once(table: np.ndarray = table) -> list[Segments]:
            return [
                segments
                for pairing in ranks
                for segments in request_segments(pairing.plan(each), regions, table, placement)
            ]

        timed(f"{order}, parcel by parcel", one_by_one, given.runs)
        timed(f"{order}, request at once", at_once, given.runs)


if __name__ == "__main__":
    main()
