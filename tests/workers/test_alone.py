"""What the decode side's core may need: no vLLM, no torch; and how little `import hawk_connector` loads."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np

from hawk_connector.plan.pairing import DecodeFacts
from hawk_connector.transport.mooncake import mooncake_factory
from tests.oracle import scalar
from tests.workers.sides import MODEL, Sides, wait_idle
from tests.workers.source import Geometry, Prompt

ROOT = Path(__file__).parents[2]
ALONE = """
import sys
before = set(sys.modules)
import hawk_connector
new = sorted({name.partition(".")[0] for name in set(sys.modules) - before})
print(" ".join(new))
"""


def test_a_whole_load_without_vllm_and_torch(sides: Sides, tmp_path: Path) -> None:
    geometry = Geometry()
    factory = mooncake_factory("127.0.0.1", protocol="tcp", timeout_s=30, max_segments_per_batch=1024)
    prefill = sides.prefill(geometry, factory, parcel_tokens=64)
    # Only the facts of this side are used: the loading side is the other process.
    here = sides.decode(geometry, factory, codec="bfp8", chips=2)
    running = prefill.run(Prompt(geometry, 150, seed=1))
    block_ids = [11, 3, 7]
    facts: DecodeFacts = here.worker.handshake.facts
    job = {
        "facts": facts,
        "device": "blackhole-p150",
        "num_blocks": 16,
        "ticket": prefill.ticket(running),
        "block_ids": block_ids,
        "banks": str(tmp_path / "banks.npy"),
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.workers.bare_decode", msgspec.json.encode(job).decode()],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert (answer["ok"], answer["loaded"]) == ([True], []), answer["reason"]
    banks = np.load(tmp_path / "banks.npy")
    pitch, compared = banks.shape[-1], 0
    for (chip, bank), pages in here.expected(running.prompt, block_ids).items():
        for address, content in pages.items():
            pool = max(i for i, start in enumerate(answer["addresses"]) if start <= address)
            slot, rest = divmod(address - answer["addresses"][pool], pitch)
            assert rest == 0
            assert banks[chip, pool, bank, slot].tobytes() == content
            compared += len(content)
    assert answer["wire_bytes"] == compared
    assert scalar.PAGE_BYTES["bfp8"] == pitch
    prefill.wait_released(running)
    wait_idle(prefill)
    assert facts.model == MODEL


def test_the_package_itself_loads_almost_nothing() -> None:
    """Its 0.5 s are kept by what it does not import; a count, since a shared machine makes seconds lie."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", ALONE], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    loaded = done.stdout.split()
    assert "hawk_connector" in loaded
    assert not {"numpy", "vllm", "torch", "zmq", "msgspec", "mooncake", "tt_plugin", "numba"} & set(loaded)
    assert len(loaded) <= 10, loaded
