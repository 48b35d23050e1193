"""A process for the fuzz to attack: a real prefill rank and a real decode worker behind real side channels.

`python -m tests.fuzz.endpoint RATE PEER [KEY_FILE KNOWN_FILE]` prints one line of JSON (addresses, epochs) and serves
until its standard input ends.  Live transfers come and go meanwhile.  The decode worker pairs with the prefill rank and
with PEER, which may be anybody.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
from typing import cast

import numpy as np
import torch

from hawk_connector.config import HawkConfig
from hawk_connector.decode.landing import Landing
from hawk_connector.decode.worker import DecodeWorker
from hawk_connector.layout.kv_shape import KVShape
from hawk_connector.plan.pairing import PrefillFacts
from hawk_connector.prefill.metadata import BeginTransfer, PrefillStep, RequestProgress
from hawk_connector.prefill.worker import PrefillWorker
from hawk_connector.transform.reference import LayerSource
from hawk_connector.transport.curve import CurveKeys, load_curve_keys
from hawk_connector.transport.memory import MemoryFabric
from hawk_connector.transport.side_channel import SideChannelClient, SideChannelServer
from tests.protocol.world import decode_facts

DIGEST = "5" * 64


class ErrorLog(logging.Handler):
    """Keeps what is logged as an error: nothing that a peer sends may be one."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(self.format(record))


class NoLanding:
    """For a decode worker that has nothing to load."""

    layout = decode_facts().layout
    num_blocks = 0

    def regions(self) -> list[tuple[int, int]]:
        return []


def decode_worker(peers: list[str], rate: float, keys: CurveKeys | None) -> DecodeWorker:
    config = HawkConfig.parse({"peers": peers}, "kv_consumer")
    server = SideChannelServer("127.0.0.1", 0, keys=keys, max_messages_per_s=rate)
    client = SideChannelClient(keys=keys)
    landing = cast(Landing, NoLanding())
    return DecodeWorker(config, decode_facts(), landing, server, client, MemoryFabric().engine)


def main() -> None:
    rate, peer = float(sys.argv[1]), sys.argv[2]
    keys = load_curve_keys(sys.argv[3], sys.argv[4]) if len(sys.argv) > 4 else None
    errors = ErrorLog()
    logging.getLogger().addHandler(errors)
    config = HawkConfig.parse({"send_buffer_bytes": 1 << 20, "lease_s": 5.0, "buffer_wait_s": 5.0}, "kv_producer")
    shape = KVShape(1, 2, 32, "float32")
    facts = PrefillFacts(shape, "m", 1, 0, 16, config.send_buffer_bytes)
    server = SideChannelServer("127.0.0.1", 0, keys=keys, max_messages_per_s=rate)
    worker = PrefillWorker(config, facts, server, MemoryFabric().engine)
    caches = [torch.from_numpy(np.zeros((64, 2, 16, 32), dtype=np.float32)) for _ in range(2)]
    worker.register([LayerSource(caches[0], caches[1])], 16)
    decode = decode_worker([worker.handshake.address, peer] if keys is None else [], rate, keys)
    said = {"address": worker.handshake.address, "epoch": worker.handshake.epoch}
    decode.start()
    print(json.dumps({**said, "status": decode.handshake.status_address}), flush=True)
    over = threading.Event()

    def requests() -> None:
        count = 0
        while not over.wait(0.05):
            count += 1
            name, transfer = f"request {count}", f"{count:032x}"
            step = PrefillStep(begun=[BeginTransfer(name, transfer, DIGEST, 48)])
            worker.after_step(step)
            worker.after_step(PrefillStep(progress=[RequestProgress(name, 48, (1, 2, 3))]))
            worker.after_step(PrefillStep(finished=[name]))
            worker.take_finished({name})

    thread = threading.Thread(target=requests, daemon=True)
    thread.start()
    sys.stdin.read()
    over.set()
    thread.join()
    decode.close()
    worker.close()
    print("threads after close:", [thread.name for thread in threading.enumerate()], file=sys.stderr, flush=True)
    print(json.dumps({"errors": errors.texts[:5]}), flush=True)


if __name__ == "__main__":
    main()
