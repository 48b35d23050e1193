"""What a small read costs besides its bytes: Mooncake over TCP between two processes on loopback.

    python benchmarks/read_cost.py [--reads 1024] [--rounds 15]

Prints µs a read for several sizes, the best and the median of the rounds.  What small reads take on a quiet machine is
the default of `hawk plan --read-us`.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time

import numpy as np

from hawk_connector.plan.segments import Segments
from hawk_connector.transport.mooncake import MooncakeEngine

SIZES = (512, 2048, 16_384, 65_536)
TIMEOUT_S = 30


def serve(nbytes: int) -> None:
    """Registers a region, says where it is, and lives until standard input ends."""
    region = np.ones(nbytes, dtype=np.uint8)
    engine = MooncakeEngine("127.0.0.1", protocol="tcp", timeout_s=TIMEOUT_S)
    engine.register(region.ctypes.data, region.nbytes)
    print(engine.session, region.ctypes.data, flush=True)
    sys.stdin.read()
    engine.close()


def rounds_us(
    engine: MooncakeEngine, session: str, remote: int, local: int, size: int, reads: int, n: int
) -> list[float]:
    """µs a read in each of ``n`` rounds of ``reads`` reads of ``size`` bytes, one batch a round."""
    at = np.arange(reads, dtype=np.int64) * size
    segments = Segments(remote + at, local + at, np.full(reads, size, dtype=np.int64))
    found = []
    for _ in range(n):
        begun = time.perf_counter()
        engine.read(session, segments)
        found.append((time.perf_counter() - begun) / reads * 1e6)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--reads", type=int, default=1024, help="reads in a batch (at most 1024)")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve)
        return
    nbytes = max(SIZES) * args.reads
    command = [sys.executable, __file__, "--serve", str(nbytes)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as peer:
        assert peer.stdout is not None
        session, remote = peer.stdout.readline().split()
        region = np.zeros(nbytes, dtype=np.uint8)
        engine = MooncakeEngine("127.0.0.1", protocol="tcp", timeout_s=TIMEOUT_S)
        engine.register(region.ctypes.data, region.nbytes)
        print(f"{args.reads} reads a batch, {args.rounds} rounds, Mooncake over TCP, loopback")
        for size in SIZES:
            us = rounds_us(engine, session, int(remote), region.ctypes.data, size, args.reads, args.rounds)
            print(f"{size:>7,} B: best {min(us):6.1f} µs, median {statistics.median(us):6.1f} µs a read")
        engine.close()


if __name__ == "__main__":
    main()
