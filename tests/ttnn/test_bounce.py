"""End to end into TTNN: vLLM prefills, HAWK moves over Mooncake, the bounce path writes the banks, and ttnn reads.

The prefill side is vLLM's stock CPU backend in a process of its own.  The decode side is HAWK's core in the process in
which TTNN has a chip open; pools are TTNN's tensors.  What TTNN reads back is compared, for every layer, block, head,
token and dim, with the prefill side's own cache, rounded by the scalar oracle or by TTNN itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from hawk_connector.cli.models import model_reference
from hawk_connector.layout.catalog import device_named
from hawk_connector.layout.kv_pool import KVPoolLayout, PoolKind
from hawk_connector.plan.pairing import DecodeFacts, PrefillFacts
from hawk_connector.plan.placement import Placement
from hawk_connector.protocol.digest import token_digest
from hawk_connector.protocol.ticket import Ticket, parse_params
from tests.e2e.conftest import prompt
from tests.e2e.harness import REMOTE_DECODE, Engine, prefill_engine
from tests.models.tiny import TinyLlama
from tests.oracle import scalar
from tests.ttnn.client import TtnnProcess
from tests.ttnn.conftest import Opener
from tt_plugin.landing import LandingChoice

pytestmark = [pytest.mark.ttnn, pytest.mark.vllm]

TOKENS = 70
BLOCK_SIZE = 64
BLOCK_IDS = [2, 0]
"""Two blocks, the second not full, scattered in a pool of four."""
NUM_BLOCKS = 4
SCRIPT = "decode_worker.py"


@dataclass(frozen=True)
class Case:
    codec: str
    kind: PoolKind
    placement: Placement
    interleaved: bool
    """K in Meta's order of RoPE dims; else in HF's."""

    def __str__(self) -> str:
        return f"{self.codec}-{self.kind}-{self.placement}-{'meta' if self.interleaved else 'hf'}"


@dataclass
class Prefill:
    """A prefill engine and the prompt that is sent again and again, each time as a transfer of its own."""

    engine: Engine
    facts: PrefillFacts
    address: str
    folder: Path
    vocabulary: int
    sent: int = 0

    def send(self) -> tuple[Ticket, NDArray[np.float32]]:
        """A transfer, and its K and V in the prefill side's cache: fp32 ``[layers, 2, heads, tokens, head_dim]``."""
        ids = prompt(TOKENS, vocabulary=self.vocabulary)
        answer = self.engine.call("prefill_only", prompt=ids, params=REMOTE_DECODE)
        params = parse_params(answer["params"])
        assert params is not None
        self.sent += 1
        ticket = Ticket(params.transfer, f"{self.sent:032x}", token_digest(ids), params.tokens, params.ranks)
        path = self.folder / "source.npy"
        self.engine.call("source", path=str(path))
        source = np.load(path)
        table = np.array(answer["block_ids"])
        tokens = np.arange(TOKENS)
        block_size = source.shape[4]
        values = source[:, :, table[tokens // block_size], :, tokens % block_size]
        return ticket, np.ascontiguousarray(np.moveaxis(values, 0, 3))


@pytest.fixture(scope="module")
def prefill(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prefill]:
    """The engine of a model by name; parcels are one block, so that several are on their way at once."""
    folder = tmp_path_factory.mktemp("prefill")
    options: dict[str, Any] = {"max_model_len": 256, "kv_cache_memory_bytes": 24 << 20}
    if request.param == "tiny":
        model = TinyLlama(layers=3).directory(request.getfixturevalue("model_cache"))
        options["dtype"], vocabulary = "float32", 384
    else:
        model = Path(model_reference(request.param, print))
        options["dtype"], vocabulary = "bfloat16", 40_000
    engine = prefill_engine(model, folder / "log.txt", {"parcel_tokens": BLOCK_SIZE}, **options)
    with engine:
        said = engine.call("facts")
        yield Prefill(engine, msgspec.convert(said["facts"], PrefillFacts), said["address"], folder, vocabulary)


def cases(*, codecs: tuple[str, ...] = ("bfloat16", "bfp8")) -> list[Case]:
    kinds: tuple[PoolKind, ...] = ("per_layer", "cross_layer")
    placements: tuple[Placement, ...] = ("pool", "staged")
    return [Case(c, k, p, order) for c in codecs for k in kinds for p in placements for order in (True, False)]


SMOLLM2 = [
    Case("bfloat16", "per_layer", "pool", True),
    Case("bfp8", "cross_layer", "pool", False),
    Case("bfp8", "per_layer", "staged", True),
    Case("bfloat16", "cross_layer", "staged", False),
]
SEVEN_BANKS = [
    Case("bfloat16", "per_layer", "pool", True),
    Case("bfp8", "per_layer", "staged", False),
    Case("bfp8", "cross_layer", "pool", True),
    Case("bfloat16", "cross_layer", "staged", True),
]


def layout_of(case: Case, facts: PrefillFacts, device: TtnnProcess, chips: int = 1) -> KVPoolLayout:
    entry = device_named(device.device.catalog)
    shape = facts.shape
    return KVPoolLayout(
        case.kind,
        shape.layers,
        chips,
        max(1, shape.kv_heads // chips),
        BLOCK_SIZE,
        shape.head_dim,
        case.codec,
        entry.banks,
        entry.alignment,
        rope_interleaved=case.interleaved,
    )


def pool_tensors(values: NDArray[np.float32], layout: KVPoolLayout) -> list[NDArray[np.float32]]:
    """Each pool as the tensor that TTNN must read, not rounded yet: the request in its blocks, zeros elsewhere."""
    rows = NUM_BLOCKS * (layout.layers if layout.kind == "cross_layer" else 1)
    shape = (layout.pools, rows, layout.heads, BLOCK_SIZE, layout.head_dim)
    pools = np.zeros(shape, dtype=np.float32)
    dims = layout.head_dim
    order = [scalar.k_order(dim, dims, dims if layout.rope_interleaved else 0) for dim in range(dims)]
    for layer in range(layout.layers):
        for kv in (0, 1):
            stored = values[layer, kv][..., order] if kv == 0 else values[layer, kv]
            pool = kv if layout.kind == "cross_layer" else 2 * layer + kv
            for index, block in enumerate(BLOCK_IDS):
                row = block * layout.layers + layer if layout.kind == "cross_layer" else block
                tokens = stored[:, index * BLOCK_SIZE : (index + 1) * BLOCK_SIZE]
                pools[pool, row, :, : tokens.shape[1]] = tokens
    return list(pools)


def rounded_by_oracle(tensor: NDArray[np.float32], codec: str) -> NDArray[np.float32]:
    """The tensor as pages of the scalar oracle hold it."""
    found = np.zeros_like(tensor)
    rows, heads, tokens, dims = tensor.shape
    for row in range(rows):
        for head in range(heads):
            for top in range(0, tokens, 32):
                for left in range(0, dims, 32):
                    tile = (row, head, slice(top, top + 32), slice(left, left + 32))
                    if tensor[tile].any():
                        page = scalar.encode_page(tensor[tile].tolist(), codec)  # type: ignore[arg-type]
                        found[tile] = scalar.decode_page(page, codec)  # type: ignore[arg-type]
    return found


def oracle_pool(layout: KVPoolLayout, addresses: list[int], bases: list[int]) -> scalar.Pool:
    buffers: Any
    if layout.kind == "cross_layer":
        buffers = {"k": addresses[0], "v": addresses[1]}
    else:
        buffers = [{"k": addresses[2 * i], "v": addresses[2 * i + 1]} for i in range(layout.layers)]
    return scalar.Pool(
        layout.kind,
        layout.layers,
        layout.heads,
        layout.block_size,
        layout.head_dim,
        bases,
        buffers,
        layout.codec,  # type: ignore[arg-type]
        layout.alignment,
    )


def load(
    device: TtnnProcess, prefill: Prefill, case: Case, layout: KVPoolLayout
) -> tuple[dict[str, Any], NDArray[np.float32], scalar.Pool]:
    """A transfer into fresh pools: what the load took, the prefill side's values, the oracle's idea of the pools."""
    facts = DecodeFacts(prefill.facts.shape, prefill.facts.model, layout)
    choice = LandingChoice(placement=case.placement, bounce_buffer_bytes=8 << 20, stage_bytes_per_bank=1 << 20)
    begun = device.ask(
        "begin",
        facts=msgspec.json.encode(facts).decode(),
        num_blocks=NUM_BLOCKS,
        choice=msgspec.json.encode(choice).decode(),
        peer=prefill.address,
    )
    ticket, values = prefill.send()
    took = device.ask("load", ticket=msgspec.json.encode(ticket).decode(), block_ids=BLOCK_IDS)
    assert (took["ok"], took["held_bytes"]) == ([True], 0), took["reason"]
    return took, values, oracle_pool(layout, begun["addresses"], device.ask("describe")["bases"])


def check_counts(took: dict[str, Any], case: Case, layout: KVPoolLayout, pool: scalar.Pool) -> None:
    """Reads, device writes and copies of the two parcels, by the oracle's count of runs."""
    parcels = len(BLOCK_IDS)
    runs = scalar.expected_segments(pool, BLOCK_IDS, chips=layout.chips, blocks_per_parcel=1)
    classes = sum(1 for stream in scalar.stream_pages(pool, BLOCK_IDS[:1]) if stream)
    streams = layout.chips * classes * parcels
    staged = case.placement == "staged"
    assert took["segments"] == streams
    assert took["wire_bytes"] == parcels * layout.chips * layout.block_bytes
    assert took["counts"] == {
        "parcels": parcels,
        "staged": parcels if staged else 0,
        "device_writes": streams if staged else runs,
        "copies": runs if staged else 0,
    }


def check(device: TtnnProcess, prefill: Prefill, case: Case, *, by_ttnn: bool) -> None:
    layout = layout_of(case, prefill.facts, device)
    took, values, pool = load(device, prefill, case, layout)
    check_counts(took, case, layout, pool)
    for index, tensor in enumerate(pool_tensors(values, layout)):
        if by_ttnn:
            wanted = device.ask("rounded", values=tensor, dtype=case.codec)
        else:
            wanted = rounded_by_oracle(tensor, case.codec)
        assert tensor.any()
        if prefill.facts.shape.dtype == case.codec:
            np.testing.assert_array_equal(wanted, tensor)  # nothing was rounded
        np.testing.assert_array_equal(device.ask("pool", index=index), wanted)


@pytest.mark.parametrize("case", cases(), ids=str)
@pytest.mark.parametrize("prefill", ["tiny"], indirect=True)
def test_a_tiny_llama_is_read_by_ttnn(ttnn_device: Opener, prefill: Prefill, case: Case) -> None:
    check(ttnn_device("simulated-p150", SCRIPT), prefill, case, by_ttnn=False)


@pytest.mark.parametrize("case", SEVEN_BANKS, ids=str)
@pytest.mark.parametrize("prefill", ["tiny"], indirect=True)
def test_on_seven_banks(ttnn_device: Opener, prefill: Prefill, case: Case) -> None:
    check(ttnn_device("simulated-7-banks", SCRIPT), prefill, case, by_ttnn=False)


@pytest.mark.parametrize("prefill", ["tiny"], indirect=True)
def test_on_a_mesh_of_four_chips(ttnn_device: Opener, prefill: Prefill) -> None:
    """A mock has addresses and no memory: what goes to each bank of each chip is counted, and nothing is read."""
    case = Case("bfp8", "per_layer", "pool", True)
    device = ttnn_device("mock-4xp150", SCRIPT)
    layout = layout_of(case, prefill.facts, device, chips=4)
    took, _, pool = load(device, prefill, case, layout)
    check_counts(took, case, layout, pool)
    counts: dict[int, int] = {}
    for stream in scalar.stream_pages(pool, BLOCK_IDS):
        for bank, _ in stream:
            counts[bank] = counts.get(bank, 0) + layout.page_pitch
    assert took["bank_fill"] == [[chip, bank, counts[bank]] for chip in range(4) for bank in sorted(counts)]


@pytest.mark.parametrize("case", SMOLLM2, ids=str)
@pytest.mark.parametrize("prefill", ["smollm2-135m-instruct"], indirect=True)
def test_smollm2_is_read_by_ttnn(ttnn_device: Opener, prefill: Prefill, case: Case) -> None:
    check(ttnn_device("simulated-p150", SCRIPT), prefill, case, by_ttnn=True)
