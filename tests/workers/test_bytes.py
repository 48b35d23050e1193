"""What lands in the banks, against the scalar oracle: source layouts, tensor parallelism, banks, pools, block ids."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hawk_connector.layout.kv_pool import PoolKind
from hawk_connector.transport.memory import MemoryFabric
from tests.oracle import scalar
from tests.transport.waiting import eventually
from tests.tt_plugin.pools import oracle_pool
from tests.workers.sides import DecodeSide, PrefillSide, Sides, wait_idle
from tests.workers.source import Geometry, Prompt

pytestmark = pytest.mark.slow

SCATTERED, DESCENDING, CONSECUTIVE = [9, 2, 13], [7, 6, 5], [4, 5, 6]


def runs(side: DecodeSide, block_ids: list[int], heads: list[int]) -> int:
    """Reads that move a parcel's pages of the chip-local ``heads`` to one chip: the oracle's streams with the other
    heads' pages left out, cut where the bank or the address jumps."""
    pool = oracle_pool(side.pools)
    tiles = pool.tiles_per_block()
    per_head = tiles // pool.heads
    count = 0
    for cls, stream in enumerate(scalar.stream_pages(pool, block_ids)):
        depth = pool.layers if pool.kind == "cross_layer" else 1
        unit = [i for i in range(depth * tiles) if i % len(pool.banks) == cls]
        last = None
        for position, (bank, address) in enumerate(stream):
            if unit[position % len(unit)] % tiles // per_head not in heads:
                continue
            if last is None or last != (bank, address - side.layout.page_pitch):
                count += 1
            last = (bank, address)
    return count


def segments_of(prefill: PrefillSide, decode: DecodeSide, block_ids: list[int]) -> int:
    """Reads of a transfer in one parcel a rank, by the oracle."""
    g, chips = prefill.geometry, decode.layout.chips
    total = 0
    for chip in range(chips):
        heads = scalar.heads_of_chip(chip, chips, g.kv_heads)
        sender = {head: next(r for r in range(g.ranks) if head in g.heads_of_rank(r)) for head in heads}
        for rank in sorted(set(sender.values())):
            total += runs(decode, block_ids, [i for i, head in enumerate(heads) if sender[head] == rank])
    return total


@pytest.mark.parametrize(
    ("geometry", "device", "chips", "kind", "codec", "block_size", "tokens", "block_ids"),
    [
        # P blocks of 16 and 128 into D blocks of 64 and 32; one rank, one chip.
        (Geometry("LBHNC"), "blackhole-p150", 1, "cross_layer", "float32", 64, 129, SCATTERED),
        (Geometry("LBNHC"), "blackhole-p150", 1, "cross_layer", "bfp8", 64, 150, CONSECUTIVE),
        (Geometry("LBNHC", block_size=128, blocks=6), "blackhole-p150", 1, "per_layer", "bfp8", 32, 70, DESCENDING),
        (Geometry("cpu", block_size=128, blocks=6), "blackhole-p150", 1, "cross_layer", "bfloat16", 64, 130, SCATTERED),
        (Geometry("cpu", block_size=128, blocks=6), "blackhole-p100", 2, "per_layer", "bfp8", 64, 180, CONSECUTIVE),
        # 7 and 12 banks; 3, 1 and 8 heads; head_dim 128; half-precision sources.
        (Geometry("LBHNC", kv_heads=3), "blackhole-p100", 1, "cross_layer", "bfp8", 64, 140, SCATTERED),
        (Geometry("LBHNC", kv_heads=3), "wormhole-n150", 3, "per_layer", "float32", 32, 65, DESCENDING),
        (Geometry("LBNHC", kv_heads=1, head_dim=128), "wormhole-n150", 1, "cross_layer", "bfp8", 32, 96, SCATTERED),
        (
            Geometry("LBHNC", kv_heads=8, head_dim=128, layers=1, dtype=torch.bfloat16),
            "blackhole-p150",
            4,
            "cross_layer",
            "bfp8",
            64,
            190,
            CONSECUTIVE,
        ),
        (Geometry("LBNHC", dtype=torch.float16), "wormhole-n150", 2, "cross_layer", "bfloat16", 64, 129, DESCENDING),
        # Prefill TP 2 and 4 into 1, 2 and 4 chips; replicated heads on both sides.
        (Geometry("LBHNC", ranks=2), "blackhole-p150", 1, "cross_layer", "bfp8", 64, 150, SCATTERED),
        (Geometry("LBNHC", ranks=2), "blackhole-p150", 2, "cross_layer", "bfp8", 64, 150, CONSECUTIVE),
        (Geometry("LBHNC", ranks=2), "blackhole-p100", 4, "per_layer", "float32", 64, 129, SCATTERED),
        (Geometry("LBHNC", ranks=4), "blackhole-p150", 1, "per_layer", "bfp8", 32, 80, DESCENDING),
        (Geometry("LBNHC", ranks=4), "wormhole-n150", 2, "cross_layer", "float32", 64, 150, SCATTERED),
        (
            Geometry("LBHNC", ranks=4, block_size=128, blocks=6),
            "blackhole-p150",
            4,
            "cross_layer",
            "bfp8",
            64,
            150,
            CONSECUTIVE,
        ),
        (Geometry("LBHNC", kv_heads=2, ranks=4), "blackhole-p150", 4, "cross_layer", "bfp8", 64, 150, SCATTERED),
        (
            Geometry("cpu", ranks=2, block_size=128, blocks=6),
            "blackhole-p150",
            2,
            "cross_layer",
            "float32",
            64,
            180,
            CONSECUTIVE,
        ),
    ],
)
def test_banks_hold_the_oracles_bytes(
    sides: Sides,
    fabric: MemoryFabric,
    geometry: Geometry,
    device: str,
    chips: int,
    kind: PoolKind,
    codec: str,
    block_size: int,
    tokens: int,
    block_ids: list[int],
) -> None:
    prefill = sides.prefill(geometry, fabric.factory())
    decode = sides.decode(
        geometry, fabric.factory(), device=device, chips=chips, kind=kind, codec=codec, block_size=block_size
    )
    running = prefill.run(Prompt(geometry, tokens, seed=tokens))
    report = decode.pull(prefill, running, block_ids)
    compared = decode.check(running.prompt, block_ids)
    # The bytes moved are the pages of these blocks; nothing else in the banks has changed.
    assert report.wire_bytes == compared == decode.touched()
    assert sum(n for _, _, n in report.bank_fill) == compared
    assert report.segments == segments_of(prefill, decode, block_ids)
    assert report.outcome == "completed"
    prefill.wait_released(running)
    wait_idle(prefill, decode)
    sent = sum(prefill.reports(rank)[0].wire_bytes for rank in range(geometry.ranks))
    assert sent == compared


@pytest.mark.parametrize(
    ("kind", "block_ids", "expected"),
    [
        # Design 4 where U % NB == 0: NB segments per block, chip and pool where ids are scattered ...
        ("cross_layer", SCATTERED, 8 * 3 * 2 * 2),
        ("cross_layer", DESCENDING, 8 * 3 * 2 * 2),
        ("per_layer", SCATTERED, 8 * 3 * 2 * 4),
        # ... and one per bank, chip and pool where they are consecutive.
        ("cross_layer", CONSECUTIVE, 8 * 2 * 2),
        ("per_layer", CONSECUTIVE, 8 * 2 * 4),
    ],
)
def test_segments_of_a_parcel(
    sides: Sides, fabric: MemoryFabric, kind: PoolKind, block_ids: list[int], expected: int
) -> None:
    geometry = Geometry()
    prefill = sides.prefill(geometry, fabric.factory())
    decode = sides.decode(geometry, fabric.factory(), chips=2, kind=kind, codec="bfp8")
    assert decode.layout.pages_per_unit % 8 == 0
    report = decode.pull(prefill, prefill.run(Prompt(geometry, 190, seed=1)), block_ids)
    assert report.segments == expected
    assert report.segments == scalar.expected_segments(oracle_pool(decode.pools), block_ids, chips=2)


@pytest.mark.parametrize("tokens", [1, 63, 64, 65])
def test_lengths_around_a_block(sides: Sides, fabric: MemoryFabric, tokens: int) -> None:
    geometry = Geometry("cpu", block_size=128, blocks=4)
    prefill = sides.prefill(geometry, fabric.factory())
    decode = sides.decode(geometry, fabric.factory(), codec="bfp8")
    block_ids = [11, 3][: -(-tokens // 64)]
    report = decode.pull(prefill, prefill.run(Prompt(geometry, tokens, seed=tokens)), block_ids)
    assert (report.blocks, report.wire_bytes) == (len(block_ids), decode.touched())


def test_blocks_that_decode_has_are_not_read(sides: Sides, fabric: MemoryFabric) -> None:
    geometry = Geometry()
    prefill = sides.prefill(geometry, fabric.factory(), parcel_tokens=128)
    decode = sides.decode(geometry, fabric.factory(), codec="bfp8")
    running = prefill.run(Prompt(geometry, 5 * 64 - 7, seed=3))
    everything = [3, 12, 7, 1, 10]
    request = decode.load(prefill.ticket(running), everything[3:], first_block=3)
    assert decode.wait(request).ok
    # Blocks 0 and 1 are a whole parcel that is skipped, block 2 is left out of one that is read.
    expected = decode.expected(running.prompt, everything)
    untouched = sides.decode(geometry, fabric.factory(), codec="bfp8")
    untouched.pull(prefill, prefill.run(running.prompt), everything)
    per_block = untouched.touched() // 5
    assert decode.touched() == decode.report(request).wire_bytes == 2 * per_block
    landed = 0
    for (chip, bank), pages in expected.items():
        for address, content in pages.items():
            start = address - decode.pools.device.table.bases[bank]
            found = decode.pools.device.bank(chip, bank)[start : start + len(content)].tobytes()
            landed += len(content) if found == content else 0
    assert landed == 2 * per_block
    wait_idle(prefill, decode, untouched)


def test_a_transfer_is_bound_to_its_tokens(sides: Sides, fabric: MemoryFabric) -> None:
    geometry = Geometry()
    prefill, decode = sides.prefill(geometry, fabric.factory()), sides.decode(geometry, fabric.factory())
    running = prefill.run(Prompt(geometry, 64, seed=1))
    other = decode.load(prefill.ticket(running, digest="0" * 64), [1])
    assert not decode.wait(other).ok
    assert decode.report(other).reason.endswith("gave the transfer up: digest")
    assert decode.touched() == 0
    decode.pull(prefill, running, [2])
    # The first claim stands: whoever comes later computes its own KV.
    late = decode.load(prefill.ticket(running), [3])
    assert not decode.wait(late).ok
    wait_idle(prefill, decode)


@pytest.mark.parametrize("change", ["kv_heads", "dtype", "model"])
def test_sides_that_do_not_fit_are_refused(sides: Sides, fabric: MemoryFabric, change: str) -> None:
    geometry = Geometry()
    other = {
        "kv_heads": replace(geometry, kv_heads=2),
        "dtype": replace(geometry, dtype=torch.bfloat16),
        "model": geometry,
    }[change]
    prefill = sides.prefill(geometry, fabric.factory())
    decode = sides.decode(other, fabric.factory(), **({"model": "another model"} if change == "model" else {}))
    running = prefill.run(Prompt(geometry, 64, seed=1))
    request = decode.load(prefill.ticket(running), [1])
    assert not decode.wait(request).ok
    reason = decode.report(request).reason
    values = {"kv_heads": ("4", "2"), "dtype": ("float32", "bfloat16"), "model": ("a model", "another model")}[change]
    assert f"{change}: prefill side has {values[0]}, decode side has {values[1]}" in reason
    assert decode.touched() == 0
    # Both sides show the verdict.
    for status in (decode.status, lambda: prefill.statuses()[0]):
        eventually(lambda status=status: [p.state for p in status().pairings] == ["refused"], "the refusal is shown")
