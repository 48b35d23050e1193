"""The fuzz from the command line: `python -m tests.fuzz.run_fuzz --frames 1000000 --seed 1`.

Of the frames, most go to the decoders and, where they are messages, to the state machines; a part goes over real
sockets to a process with a real prefill rank and a real decode side's status channel.  The exit status is 1 where
anything but the agreed answer came.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections import Counter

from hawk_connector.config import HawkConfig
from tests.fuzz.decoders import fuzz_config, fuzz_known_keys, fuzz_message, fuzz_params
from tests.fuzz.endpoint_attack import attack, resident_bytes
from tests.fuzz.frames import FrameSource
from tests.fuzz.machines import Machines

# What a process may grow by after the first quarter of the frames, in bytes of resident memory.
GROWTH_BOUND = 32 << 20


def fuzz_decoders(frames: int, seed: int) -> Counter[str]:
    """``frames`` frames through every decoder and the state machines.  AssertionError where one is answered wrongly."""
    seen: Counter[str] = Counter()
    config = HawkConfig.parse({}, "kv_consumer")
    source = FrameSource(seed, Machines.epochs(), Machines.transfers())
    rng = random.Random(seed + 1)
    machines = Machines(source)
    before = 0
    for n in range(frames):
        if n % 20 == 0:
            fuzz_params(rng, seen, config)
        elif n % 200 == 1:
            fuzz_config(rng, seen)
        elif n % 200 == 2:
            fuzz_known_keys(rng, seen)
        else:
            kind, frame = source.frame()
            seen[f"frame: {kind}"] += 1
            message = fuzz_message(frame, seen)
            if message is not None:
                machines.feed(message)
        if n == frames // 4:
            before = resident_bytes(os.getpid())  # caches are warm, replays are remembered
    machines.end()
    seen["bytes grown"] = max(0, resident_bytes(os.getpid()) - before)
    assert seen["bytes grown"] < GROWTH_BOUND, f"memory grew by {seen['bytes grown']} bytes"
    seen.update({f"action: {name}": n for name, n in machines.seen.items()})
    return seen


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.run_fuzz", description=__doc__)
    parser.add_argument("--frames", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--part", choices=["all", "decoders", "sockets"], default="all")
    options = parser.parse_args()
    share = {"all": options.frames * 4 // 5, "decoders": options.frames, "sockets": 0}[options.part]
    for name, frames, part, most in (
        ("decoders and machines", share, fuzz_decoders, 50_000),
        ("sockets", options.frames - share, attack, 100_000),
    ):
        if not frames:
            continue
        seed, first = options.seed, 0
        while frames:
            # In pieces, each a run of its own that its seed repeats.
            piece = min(frames, most)
            began = time.monotonic()
            seen = part(piece, seed)
            print(f"{name}: {piece} frames, seed {seed}, {time.monotonic() - began:.0f} s")
            for what, count in sorted(seen.items()):
                print(f"  {what:40} {count}", flush=True)
            frames, seed, first = frames - piece, seed + 1, first or resident_bytes(os.getpid())
        grown = resident_bytes(os.getpid()) - first
        assert grown < GROWTH_BOUND, f"this process grew by {grown} bytes after the first piece"
        print(f"{name}: this process grew by {max(0, grown)} bytes after the first piece")
    return 0


if __name__ == "__main__":
    sys.exit(main())
