"""What the overlay on Tenstorrent's plugin finds in a model's caches, which are TTNN's own tensors."""

from __future__ import annotations

import pytest

from tests.ttnn.conftest import Opener

pytestmark = pytest.mark.ttnn

SCRIPT = "chunk_worker.py"
LAYERS, NUM_BLOCKS = 3, 10


@pytest.mark.parametrize(
    ("device", "chips", "banks", "shared"),
    [("mock-4xp150", 4, 8, False), ("mock-4xp150", 4, 8, True), ("mock-p100", 1, 7, False), ("mock-n150", 1, 12, True)],
)
def test_the_layout_is_read_from_the_tensors(
    ttnn_device: Opener, device: str, chips: int, banks: int, shared: bool
) -> None:
    kind = "cross_layer" if shared else "per_layer"
    process = ttnn_device(device, SCRIPT)
    found = process.ask("live", layers=LAYERS, num_blocks=NUM_BLOCKS, shared=shared, config={"pool": kind})
    layout = found["layout"]
    assert (layout["kind"], layout["layers"], layout["chips"], layout["heads"]) == (kind, LAYERS, chips, 2)
    assert (layout["block_size"], layout["head_dim"], layout["codec"]) == (64, 128, "bfp8")
    assert (layout["banks"], layout["rope_interleaved"], found["num_blocks"]) == (banks, True, NUM_BLOCKS)
    assert found["addresses"] == found["tensors"]
    assert len(found["addresses"]) == (2 if shared else 2 * LAYERS)


def test_caches_that_are_not_what_was_asked_for_are_refused(ttnn_device: Opener) -> None:
    process = ttnn_device("mock-p100", SCRIPT)

    def why(shared: bool, **config: object) -> str:
        return str(process.ask("live", layers=LAYERS, num_blocks=4, shared=shared, config=config)["error"])

    assert "expected one K and one V tensor for all layers, got 6 tensors" in why(False, pool="cross_layer")
    assert "expected two tensors for each layer, got 2 tensors" in why(True, pool="per_layer")
    assert "expected device 8 banks, alignment 64" in why(False, device="blackhole-p150")
