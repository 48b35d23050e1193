"""A decode side in a process that has neither vLLM nor torch: `python -m tests.workers.bare_decode`.

Reads a ticket and the layout as JSON from argv, loads the transfer over Mooncake, and prints one JSON line.
"""

from __future__ import annotations

import sys

# None in sys.modules makes every import of the name, and of what is in it, an ImportError.
BLOCKED = ("torch", "vllm", "transformers", "numba", "triton")
for name in BLOCKED:
    sys.modules[name] = None  # type: ignore[assignment]

import json  # noqa: E402
import time  # noqa: E402

import msgspec  # noqa: E402
import numpy as np  # noqa: E402

from hawk_connector.config import DecodeConfig  # noqa: E402
from hawk_connector.decode.metadata import DecodeStep, LoadRequest  # noqa: E402
from hawk_connector.decode.worker import DecodeWorker  # noqa: E402
from hawk_connector.plan.pairing import DecodeFacts  # noqa: E402
from hawk_connector.protocol.ticket import Ticket  # noqa: E402
from hawk_connector.transport.mooncake import mooncake_factory  # noqa: E402
from hawk_connector.transport.side_channel import SideChannelClient, SideChannelServer  # noqa: E402
from tt_plugin.device.banks import BankTable  # noqa: E402
from tt_plugin.device.kv_pool import KVPools  # noqa: E402
from tt_plugin.device.simulated import SimulatedDevice  # noqa: E402
from tt_plugin.landing import PoolLanding  # noqa: E402


class Job(msgspec.Struct):
    facts: DecodeFacts
    device: str
    num_blocks: int
    ticket: Ticket
    block_ids: tuple[int, ...]
    banks: str


def main() -> None:
    job = msgspec.json.decode(sys.argv[1], type=Job)
    layout = job.facts.layout
    pools = KVPools(SimulatedDevice(layout.chips, BankTable.named(job.device)), layout, job.num_blocks)
    worker = DecodeWorker(
        DecodeConfig(),
        job.facts,
        PoolLanding(pools),
        SideChannelServer("127.0.0.1", 0),
        SideChannelClient(),
        mooncake_factory("127.0.0.1", protocol="tcp", timeout_s=30, max_segments_per_batch=1024),
    )
    worker.start()
    worker.step(DecodeStep(loads=[LoadRequest("alone", job.ticket, 0, job.block_ids)]))
    deadline = time.monotonic() + 60
    while not (ended := worker.take_ended()):
        assert time.monotonic() < deadline, "the load did not end"
        time.sleep(0.01)
    pages = [np.stack([pools.pages(c, p) for p in range(layout.pools)]) for c in range(layout.chips)]
    np.save(job.banks, np.stack(pages))
    (report,) = worker.log.recent()
    loaded = sorted(n for n in BLOCKED if sys.modules.get(n) is not None)
    answer = {
        "ok": [end.ok for end in ended],
        "reason": report.reason,
        "wire_bytes": report.wire_bytes,
        "addresses": pools.buffer_addresses,
        "loaded": loaded,
    }
    print(json.dumps(answer), flush=True)
    worker.close()


if __name__ == "__main__":
    main()
