"""Mode host with real workers: the oracle's bytes in the banks, by one read of raw blocks for each parcel."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hawk_connector.layout.kv_pool import PoolKind
from hawk_connector.transport.memory import Corrupt, Fail, MemoryFabric
from tests.transport.waiting import eventually
from tests.workers.sides import Sides, wait_idle
from tests.workers.source import Geometry, Prompt
from tt_plugin.landing import LandingChoice

pytestmark = pytest.mark.slow

CPU = Geometry("cpu", block_size=128, blocks=6)


@pytest.mark.parametrize(
    ("geometry", "chips", "kind", "codec", "block_size", "tokens", "block_ids"),
    [
        (Geometry("LBHNC"), 1, "cross_layer", "float32", 64, 129, [9, 2, 13]),
        (Geometry("LBNHC", dtype=torch.bfloat16), 1, "cross_layer", "bfp8", 64, 150, [4, 5, 6]),
        (Geometry("LBNHC", block_size=128, blocks=6), 1, "per_layer", "bfp8", 32, 70, [7, 6, 5]),
        (CPU, 1, "cross_layer", "bfloat16", 64, 130, [9, 2, 13]),
        (replace(CPU, dtype=torch.bfloat16), 2, "per_layer", "bfp8", 64, 180, [4, 5, 6]),
        (Geometry("LBHNC", ranks=2), 1, "cross_layer", "bfp8", 64, 150, [9, 2, 13]),
        (Geometry("LBNHC", ranks=4), 2, "cross_layer", "float32", 64, 150, [9, 2, 13]),
        (Geometry("LBHNC", kv_heads=2, ranks=4), 4, "cross_layer", "bfp8", 64, 150, [9, 2, 13]),
    ],
)
def test_banks_hold_the_oracles_bytes(
    sides: Sides,
    fabric: MemoryFabric,
    geometry: Geometry,
    chips: int,
    kind: PoolKind,
    codec: str,
    block_size: int,
    tokens: int,
    block_ids: list[int],
) -> None:
    prefill = sides.prefill(geometry, fabric.factory())
    decode = sides.decode(
        geometry, fabric.factory(), chips=chips, kind=kind, codec=codec, block_size=block_size, mode="host"
    )
    running = prefill.run(Prompt(geometry, tokens, seed=tokens))
    report = decode.pull(prefill, running, block_ids)
    assert sum(n for _, _, n in report.bank_fill) == decode.touched() == decode.check(running.prompt, block_ids)
    # What moved is the source's blocks, each once, in one read a rank.
    senders = min(geometry.ranks, geometry.kv_heads)
    heads = len(geometry.heads_of_rank(0))
    block = 2 * heads * geometry.block_size * geometry.head_dim * geometry.dtype.itemsize
    assert report.segments == senders
    assert report.wire_bytes == senders * geometry.layers * -(-tokens // geometry.block_size) * block
    prefill.wait_released(running)
    wait_idle(prefill, decode)
    assert decode.landing.held_bytes == 0


def test_parcels_begin_where_source_blocks_do(sides: Sides, fabric: MemoryFabric) -> None:
    """Parcels of 64 tokens are asked for, and blocks of 128 are what there is."""
    prefill = sides.prefill(CPU, fabric.factory(), parcel_tokens=64)
    decode = sides.decode(CPU, fabric.factory(), codec="bfp8", mode="host")
    report = decode.pull(prefill, prefill.run(Prompt(CPU, 300, seed=1)), [3, 8, 1, 12, 6])
    assert (report.parcels, report.segments) == (3, 3)


def test_blocks_that_decode_has_are_neither_read_nor_written(sides: Sides, fabric: MemoryFabric) -> None:
    geometry = Geometry()
    prefill = sides.prefill(geometry, fabric.factory(), parcel_tokens=128)
    decode = sides.decode(geometry, fabric.factory(), codec="bfp8", mode="host")
    running = prefill.run(Prompt(geometry, 5 * 64 - 7, seed=3))
    request = decode.load(prefill.ticket(running), [1, 10], first_block=3)
    assert decode.wait(request).ok
    # Tokens 192 up to 313 are 8 of the source's blocks of 16.
    block = 2 * geometry.kv_heads * 16 * geometry.head_dim * 4
    assert decode.report(request).wire_bytes == 8 * geometry.layers * block
    assert decode.touched() == sum(n for _, _, n in decode.report(request).bank_fill)
    whole, other = sides.decode(geometry, fabric.factory(), codec="bfp8"), sides.prefill(geometry, fabric.factory())
    whole.pull(other, other.run(running.prompt), [0, 4, 2, 1, 10])
    per_unit = decode.layout.pages_per_unit
    for pool in range(decode.layout.pools):
        for block_id in (1, 10):
            for page in range(block_id * per_unit, (block_id + 1) * per_unit):
                bank, slot = page % decode.layout.banks, page // decode.layout.banks
                assert (decode.pools.pages(0, pool)[bank, slot] == whole.pools.pages(0, pool)[bank, slot]).all()


def test_a_digest_is_of_the_raw_bytes(sides: Sides, fabric: MemoryFabric) -> None:
    geometry = Geometry()
    prefill = sides.prefill(geometry, fabric.factory())
    decode = sides.decode(geometry, fabric.factory(), codec="bfp8", mode="host", parcel_digest=True)
    running = [prefill.run(Prompt(geometry, 100, seed=n)) for n in range(2)]
    fabric.inject(Corrupt())
    request = decode.load(prefill.ticket(running[0]), [1, 2])
    assert not decode.wait(request).ok
    assert decode.report(request).failure == "corrupt" and decode.touched() == 0
    decode.pull(prefill, running[1], [3, 4])


def test_memory_of_a_failed_read_is_given_back_after_the_fence(sides: Sides, fabric: MemoryFabric) -> None:
    geometry = Geometry()
    prefill = sides.prefill(geometry, fabric.factory())
    choice = LandingChoice(bounce_buffer_bytes=1 << 20)
    decode = sides.decode(geometry, fabric.factory(), codec="bfp8", mode="host", landing=choice)
    fabric.inject(Fail(late=True))
    request = decode.load(prefill.ticket(prefill.run(Prompt(geometry, 100, seed=1))), [1, 2])
    assert not decode.wait(request).ok
    eventually(lambda: decode.landing.held_bytes == 0, "the memory is free")
    assert fabric.release_late() == 0 and decode.touched() == 0
    decode.pull(prefill, prefill.run(Prompt(geometry, 100, seed=2)), [1, 2])
