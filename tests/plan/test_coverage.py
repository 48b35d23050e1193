"""Any pairing, pool and block-id pattern: every byte that must be written is written once, in as few reads as can be.

Banks are counters: a read adds one to each byte on which it lands.  The oracle says which bytes those are.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from hawk_connector.layout.kv_pool import KVPoolLayout
from hawk_connector.layout.kv_shape import KVShape
from hawk_connector.plan.pairing import DecodeFacts, Pairing, PrefillFacts, pair
from hawk_connector.plan.segments import PoolPlacement, Segments, pool_segments, request_segments
from tests.layout.pools import KINDS, pool_of
from tests.oracle.scalar import PAGE_BYTES, Tensor, heads_of_chip

pytestmark = pytest.mark.slow

POOL_BLOCKS = 12
BASES = (0, 0x40000000)


@dataclass(frozen=True)
class Case:
    """A pairing and a request: ``ids`` are decode's blocks, ``each`` blocks make a parcel."""

    layout: KVPoolLayout
    kv_heads: int
    ranks: int
    ids: tuple[int, ...]
    each: int

    @property
    def bases(self) -> list[int]:
        """Unequal, as Wormhole's."""
        return [BASES[bank % 2] for bank in range(self.layout.banks)]

    @property
    def pool_bytes(self) -> int:
        return self.layout.rule.slots(self.layout.pool_pages(POOL_BLOCKS)) * self.layout.page_pitch

    @property
    def buffers(self) -> tuple[int, ...]:
        """Pools lie apart by one page, so that none can join the next."""
        return tuple(pool * (self.pool_bytes + self.layout.page_pitch) for pool in range(self.layout.pools))

    @property
    def bank_bytes(self) -> int:
        return self.buffers[-1] + self.pool_bytes

    @property
    def placement(self) -> PoolPlacement:
        """The first byte of every bank in one counter array; banks touch, in an order of their own."""
        count = self.layout.chips * self.layout.banks
        places = np.random.default_rng(count).permutation(count).astype(np.int64)
        origins = (places * self.bank_bytes).reshape(self.layout.chips, self.layout.banks)
        return PoolPlacement(origins, self.buffers, POOL_BLOCKS)

    def pairings(self) -> list[Pairing]:
        shape = KVShape(self.layout.layers, self.kv_heads, self.layout.head_dim, "bfloat16")
        found = []
        for rank in range(self.ranks):
            facts = PrefillFacts(shape, "m", self.ranks, rank, 16, 1 << 30)
            pairing = pair(facts, DecodeFacts(shape, "m", self.layout))
            assert isinstance(pairing, Pairing), [str(mismatch) for mismatch in pairing]
            found.append(pairing)
        return found


@st.composite
def cases(draw: st.DrawFn) -> Case:
    kv_heads = draw(st.sampled_from([1, 2, 3, 4, 8]))
    fits = [n for n in (1, 2, 4, 8) if kv_heads % n == 0 or n % kv_heads == 0]
    chips, ranks = draw(st.sampled_from(fits)), draw(st.sampled_from(fits))
    layers, kind = draw(st.integers(1, 3)), draw(st.sampled_from(KINDS))
    channels: Any = draw(st.sampled_from(["interleaved", "nd_sharded", "height_sharded"]))
    banks = draw(st.sampled_from([1, 7, 8, 12]))
    rows = layers if kind == "cross_layer" else 1
    shard_rows = 1
    if channels == "nd_sharded":
        shard_rows = draw(st.sampled_from(sorted({1, rows, 2 * rows, 5 * rows})))
    elif channels == "height_sharded":
        shard_rows = -(-POOL_BLOCKS // banks) * rows  # a shard for each bank holds the whole pool
    layout = KVPoolLayout(
        kind=kind,  # type: ignore[arg-type]
        layers=layers,
        chips=chips,
        heads=len(heads_of_chip(0, chips, kv_heads)),
        block_size=draw(st.sampled_from([16, 32, 64, 128])),
        head_dim=draw(st.sampled_from([32, 64, 80])),
        codec=draw(st.sampled_from(sorted(PAGE_BYTES))),
        banks=banks,
        alignment=draw(st.sampled_from([32, 64])),
        channels=channels,
        shard_rows=shard_rows,
    )
    count = draw(st.integers(1, 6))
    pattern = draw(st.sampled_from(["scattered", "consecutive", "descending", "pairs"]))
    if pattern == "scattered":
        ids = draw(st.permutations(range(POOL_BLOCKS)))[:count]
    else:
        first = draw(st.integers(0, POOL_BLOCKS - count))
        ids = list(range(first, first + count))
        if pattern == "descending":
            ids.reverse()
        elif pattern == "pairs":  # 1 0 3 2 5 4 ...
            ids = [ids[i ^ 1] if i ^ 1 < count else ids[i] for i in range(count)]
    return Case(layout, kv_heads, ranks, tuple(ids), draw(st.integers(1, count)))


def parcels(case: Case) -> list[tuple[int, Segments]]:
    """(bytes of the parcel, its reads) of every rank, parcels at address 0 of their own."""
    placement, found = case.placement, []
    for pairing in case.pairings():
        for first in range(0, len(case.ids), case.each):
            ids = case.ids[first : first + case.each]
            plan = pairing.plan(len(ids))
            found.append((plan.nbytes, pool_segments(plan, 0, ids, placement)))
    return found


def wanted_bytes(case: Case) -> NDArray[np.int8]:
    """The oracle's pages of the request's blocks on every chip: ones in an array of all banks."""
    layout = case.layout
    pool = pool_of(layout, case.bases, case.buffers)
    counters = np.zeros(layout.chips * layout.banks * case.bank_bytes, dtype=np.int8)
    tensors: tuple[Tensor, ...] = ("k", "v")
    columns = range(0, pool.head_dim, 32)
    for tensor, block, layer, head in itertools.product(tensors, case.ids, range(pool.layers), range(pool.heads)):
        for token, dim in itertools.product(range(0, pool.tile_rows() * 32, 32), columns):
            bank, address, _ = pool.address(tensor, block, layer, head, token, dim)
            for chip in range(layout.chips):
                at = int(case.placement.origins[chip, bank]) + address - case.bases[bank]
                counters[at : at + PAGE_BYTES[layout.codec]] += 1
    return counters


@given(cases())
@settings(max_examples=150, deadline=None)
def test_every_byte_once(case: Case) -> None:
    """No byte of the destination is missed, hit twice, or hit though it is another's; nor any byte of a parcel."""
    landed = np.zeros(case.layout.chips * case.layout.banks * case.bank_bytes, dtype=np.int8)
    for nbytes, reads in parcels(case):
        sent = np.zeros(nbytes, dtype=np.int8)
        for remote, local, length in zip(
            reads.remote.tolist(), reads.local.tolist(), reads.length.tolist(), strict=True
        ):
            assert length > 0 and remote >= 0 and local >= 0
            assert local // case.bank_bytes == (local + length - 1) // case.bank_bytes  # in one bank
            inside = local % case.bank_bytes
            assert any(start <= inside and inside + length <= start + case.pool_bytes for start in case.buffers)
            sent[remote : remote + length] += 1
            landed[local : local + length] += 1
        assert (sent == 1).all()
    assert (landed == wanted_bytes(case)).all()


@given(cases())
@settings(max_examples=150, deadline=None)
def test_no_two_reads_could_be_one(case: Case) -> None:
    """Of one parcel, no read begins on both sides where another one ends, in the same bank."""
    for _, reads in parcels(case):
        ends = {
            (remote + length, local + length, local // case.bank_bytes)
            for remote, local, length in zip(
                reads.remote.tolist(), reads.local.tolist(), reads.length.tolist(), strict=True
            )
        }
        starts = zip(reads.remote.tolist(), reads.local.tolist(), strict=True)
        assert not ends & {(remote, local, local // case.bank_bytes) for remote, local in starts}


@given(cases())
@settings(max_examples=60, deadline=None)
def test_a_request_at_once_is_its_parcels_one_by_one(case: Case) -> None:
    whole = len(case.ids) // case.each
    table = np.array(case.ids[: whole * case.each], dtype=np.int64).reshape(whole, case.each)
    regions = [0x1000_0000 * (index + 1) for index in range(whole)]
    for pairing in case.pairings():
        plan = pairing.plan(case.each)
        at_once = request_segments(plan, regions, table, case.placement)
        assert len(at_once) == whole
        for found, region, ids in zip(at_once, regions, table.tolist(), strict=True):
            alone = pool_segments(plan, region, ids, case.placement)
            assert found.remote.tolist() == alone.remote.tolist()
            assert found.local.tolist() == alone.local.tolist()
            assert found.length.tolist() == alone.length.tolist()


@pytest.mark.parametrize("chips", [1, 2, 4, 8])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("kv_heads", [2, 8])
@pytest.mark.parametrize("channels", ["interleaved", "nd_sharded"])
def test_all_tensor_parallelisms(channels: Any, kv_heads: int, ranks: int, chips: int) -> None:
    heads = len(heads_of_chip(0, chips, kv_heads))
    layout = KVPoolLayout("cross_layer", 2, chips, heads, 32, 64, "bfp8", 7, 64, channels=channels)
    case = Case(layout, kv_heads, ranks, (3, 4, 1), 2)
    landed = np.zeros(chips * 7 * case.bank_bytes, dtype=np.int8)
    for _, reads in parcels(case):
        for local, length in zip(reads.local.tolist(), reads.length.tolist(), strict=True):
            landed[local : local + length] += 1
    assert (landed == wanted_bytes(case)).all()


@pytest.mark.parametrize("rows", [1, 80])
def test_llama_70b_in_nd_shards(rows: int) -> None:
    """A shard for each layer: a read a layer, as 80 layers are dealt out to 8 banks; or the whole depth in one bank."""
    layout = KVPoolLayout("cross_layer", 80, 4, 2, 64, 128, "bfp8", 8, 64, channels="nd_sharded", shard_rows=rows)
    case = Case(layout, 8, 4, (5, 2, 9), 3)
    (_, first), *_ = parcels(case)
    if rows == 80:
        assert first.length.tolist() == [80 * 16 * 1088] * 2 * 3
    else:
        # Ten of a block's layers lie one after another in each bank.
        assert first.length.tolist() == [10 * 16 * 1088] * 2 * 8 * 3


def test_shards_that_cut_units_have_no_plan() -> None:
    layout = KVPoolLayout("cross_layer", 2, 1, 2, 64, 64, "bfp8", 8, 64, channels="nd_sharded", shard_rows=3)
    pairing = Case(msgspec.structs.replace(layout, shard_rows=1), 2, 1, (0,), 1).pairings()[0]
    with pytest.raises(ValueError, match="a moved unit of 16 pages must be whole shards of 24 pages, or a shard whole"):
        Pairing(layout, pairing.shares).plan(1).nbytes  # noqa: B018


def test_height_shards_hold_no_more_blocks_than_they_have_rows() -> None:
    layout = KVPoolLayout("per_layer", 1, 1, 2, 32, 64, "bfp8", 8, 64, channels="height_sharded")
    case = Case(layout, 2, 1, (0,), 1)
    with pytest.raises(ValueError, match="8 shards hold 8 blocks; the pool has 12"):
        parcels(case)


def test_parcels_and_their_block_ids_go_together() -> None:
    case = Case(KVPoolLayout("per_layer", 1, 1, 2, 32, 64, "bfp8", 8, 64), 2, 1, (0, 1), 2)
    with pytest.raises(ValueError, match=r"1 parcels of 2 blocks need as many block ids; got shape \(1, 3\)"):
        request_segments(case.pairings()[0].plan(2), [0], np.zeros((1, 3), dtype=np.int64), case.placement)
