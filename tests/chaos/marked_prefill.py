"""A prefill side in a process of its own whose KV names its owner: `python -m tests.chaos.marked_prefill`.

argv: a Job as JSON.  It computes one transfer for each mark, every element of whose K and V is that mark, prints a
line of tickets as JSON, and lives until its stdin ends.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import msgspec
import numpy as np

from hawk_connector.prefill.metadata import PrefillStep, RequestProgress
from hawk_connector.protocol.ticket import Ticket
from hawk_connector.transport.mooncake import mooncake_factory
from tests.workers.sides import PrefillSide
from tests.workers.source import Geometry


class Job(msgspec.Struct):
    layers: int
    kv_heads: int
    head_dim: int
    tokens: int
    marks: list[float]

    def geometry(self) -> Geometry:
        block_size = 64
        blocks = len(self.marks) * -(-self.tokens // block_size)
        return Geometry("LBHNC", self.layers, self.kv_heads, self.head_dim, block_size, blocks=blocks)

    @property
    def nbytes(self) -> int:
        """Of one transfer's KV."""
        return self.layers * 2 * self.kv_heads * self.head_dim * 4 * self.tokens


@dataclass
class Marked:
    """A prompt as `tests/workers/sides.py` knows one; ``values`` is only what its digest looks at."""

    tokens: int
    mark: float

    @property
    def values(self) -> np.ndarray:
        return np.full((1, 1, 1, 1, 1), self.mark, dtype=np.float32)


def main() -> None:
    job = msgspec.json.decode(sys.argv[1], type=Job)
    geometry = job.geometry()
    engines = mooncake_factory("127.0.0.1", protocol="tcp", timeout_s=5, max_segments_per_batch=1024)
    room = (len(job.marks) + 1) * job.nbytes
    side = PrefillSide(
        geometry, engines, parcel_tokens=job.tokens, parcel_bytes=room, send_buffer_bytes=room, lease_s=120.0
    )
    tickets: list[Ticket] = []
    for mark in job.marks:
        running = side.begin(Marked(job.tokens, mark))  # type: ignore[arg-type]
        (cache,) = side.caches
        cache.flat.view(geometry.layers, geometry.blocks, -1)[:, running.table] = mark
        progress = RequestProgress(running.name, job.tokens, tuple(running.table))
        side.step(PrefillStep(progress=[progress]))
        side.finish(running)
        tickets.append(side.ticket(running))
    print(msgspec.json.encode(tickets).decode(), flush=True)
    sys.stdin.read()
    side.close()


if __name__ == "__main__":
    main()
