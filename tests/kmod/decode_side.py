"""The decode side in the VM: `python -m tests.kmod.decode_side FOLDER`. It has neither vLLM nor torch nor TTNN.

Opens the windows of the stand-in NPU, one for each bank, and pulls what FOLDER/job names into them over RDMA. Before,
while hawk_peermem is not loaded, it must be refused, with words that name the remedy: it then writes FOLDER/refused
and goes on when FOLDER/loaded is there.
"""

from __future__ import annotations

import sys

BLOCKED = ("torch", "vllm", "transformers", "numba", "triton", "ttnn")
for name in BLOCKED:
    sys.modules[name] = None  # type: ignore[assignment]

import ctypes  # noqa: E402
import time  # noqa: E402
from pathlib import Path  # noqa: E402

import msgspec  # noqa: E402
import numpy as np  # noqa: E402

from hawk_connector.config import DecodeConfig  # noqa: E402
from hawk_connector.decode.metadata import DecodeStep, LoadRequest  # noqa: E402
from hawk_connector.decode.worker import DecodeWorker  # noqa: E402
from hawk_connector.errors import LocalError  # noqa: E402
from hawk_connector.plan.segments import Segments  # noqa: E402
from hawk_connector.transport.mooncake import MooncakeEngine, mooncake_factory  # noqa: E402
from hawk_connector.transport.side_channel import SideChannelClient, SideChannelServer  # noqa: E402
from tests.kmod.job import SITES, UNTOUCHED, WINDOW_BYTES, Job, Loose, read_when_there, write_whole  # noqa: E402
from tt_plugin.device.windows import WindowSet  # noqa: E402
from tt_plugin.landing.windows import WindowLanding, WindowPools  # noqa: E402

NODE = "/dev/tenstorrent/0"
PATIENCE_S = 600.0
AROUND = 4096  # bytes beside the loose read that must stay as they were


def one_segment(remote: int, local: int, length: int) -> Segments:
    return Segments(*(np.array([value], dtype=np.int64) for value in (remote, local, length)))


def wipe(address: int, length: int) -> None:
    ctypes.memset(address, UNTOUCHED, length)


def refused_without_client(windows: WindowSet) -> None:
    engine = MooncakeEngine("127.0.0.1", protocol="rdma", timeout_s=120)
    try:
        engine.register(int(windows.origins[0, 0]), 1 << 20)
    except LocalError as error:
        assert "hawk_peermem" in str(error), error
        print("ok without hawk_peermem a window is refused, and the refusal names it", flush=True)
    else:
        raise AssertionError("a window was registered without a peer-memory client")
    finally:
        engine.close()


def read_loose(windows: WindowSet, loose: Loose) -> None:
    """One odd-sized read from a SendBuffer to an odd address of a window."""
    target = int(windows.origins[0, loose.bank]) + loose.target
    wipe(target - AROUND, loose.nbytes + 2 * AROUND)
    engine = MooncakeEngine("127.0.0.1", protocol="rdma", timeout_s=120)
    try:
        engine.register(target, loose.nbytes)
        engine.read(loose.session, one_segment(loose.address, target, loose.nbytes))
    finally:
        engine.close()
    windows.flush({(0, loose.bank): loose.target + loose.nbytes - 1})
    print("ok Mooncake read a SendBuffer into a window", flush=True)


def pull(windows: WindowSet, job: Job) -> None:
    """The request, as a decode server's worker pulls it."""
    pools = WindowPools(windows, job.facts.layout, job.num_blocks, job.buffer_addresses)
    for address, length in pools.regions():
        wipe(address, length)
    landing = WindowLanding(pools)
    worker = DecodeWorker(
        DecodeConfig(load_deadline_s=PATIENCE_S, hello_deadline_s=100, admission_deadline_s=100),
        job.facts,
        landing,
        SideChannelServer("127.0.0.1", 0),
        SideChannelClient(),
        mooncake_factory("127.0.0.1", protocol="rdma", timeout_s=120, max_segments_per_batch=1024),
    )
    worker.start()
    worker.step(DecodeStep(loads=[LoadRequest("in the VM", job.ticket, 0, job.block_ids)]))
    end = time.monotonic() + PATIENCE_S
    while not (ended := worker.take_ended()):
        assert time.monotonic() < end, "the load did not end"
        time.sleep(0.05)
    (report,) = worker.log.recent()
    assert [load.ok for load in ended] == [True], report.reason
    banks = {bank for _, bank, nbytes in report.bank_fill if nbytes}
    assert banks == set(range(job.facts.layout.banks)), report.bank_fill
    assert report.wire_bytes == len(job.block_ids) * job.facts.layout.block_bytes, report
    print(f"ok a request of {report.tokens} tokens landed in all {len(banks)} banks", flush=True)
    assert worker.close(), "a read could not be ended"
    landing.close()


def main() -> None:
    folder = Path(sys.argv[1])
    with WindowSet([NODE], [SITES], WINDOW_BYTES) as windows:
        refused_without_client(windows)
        write_whole(folder / "refused", b"")
        read_when_there(folder / "loaded", PATIENCE_S)
        job = msgspec.json.decode(read_when_there(folder / "job", PATIENCE_S), type=Job)
        read_loose(windows, job.loose)
        pull(windows, job)
    write_whole(folder / "pulled", b"")
    loaded = [name for name in BLOCKED if sys.modules.get(name) is not None]
    assert loaded == [], loaded
    print("ok decode ran without vLLM, torch and TTNN", flush=True)


if __name__ == "__main__":
    main()
