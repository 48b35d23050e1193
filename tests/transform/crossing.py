"""One request's KV from synthetic prefill caches into synthetic banks, by the product; and by the oracle.

The product's way: ``layer_source`` views, ``pair``, ``parcel_packer`` (and ``pack_parcel``, which must write the same),
``pool_segments``, each segment copied with ``memmove``.  The oracle's way: ``read_source`` and ``expected_banks``.  All
cache rows that are not the request's hold poison, and all bank memory a pattern, so a byte that should not have been
read or written shows.
"""

from __future__ import annotations

import ctypes
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from hawk_connector.layout.kv_pool import KVPoolLayout
from hawk_connector.layout.kv_shape import KVShape
from hawk_connector.plan.pairing import DecodeFacts, Pairing, PrefillFacts, pair
from hawk_connector.plan.segments import PoolPlacement, Segments, pool_segments
from hawk_connector.prefill.kv_source import CPU_BACKEND, layer_source
from hawk_connector.transform.packing import parcel_packer
from hawk_connector.transform.reference import LayerSource, pack_parcel
from tests.layout.pools import pool_of
from tests.oracle.scalar import PAGE_BYTES, Codec, Pool, Source, Tensor, expected_banks, heads_of_chip, read_source

Family = Literal["LBHNC", "LBNHC", "cpu"]
Order = Literal["scattered", "consecutive", "descending"]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
GUARD = 256
"""Bytes of pattern before the first pool and after every pool."""
PACKER = parcel_packer(torch.device("cpu"))


@dataclass(frozen=True)
class Crossing:
    """What crosses: a request, the prefill side's caches, the decode side's pools."""

    tokens: int = 65
    kind: Literal["per_layer", "cross_layer"] = "cross_layer"
    layers: int = 1
    kv_heads: int = 1
    head_dim: int = 64
    family: Family = "LBHNC"
    dtype: str = "float32"
    source_block: int = 16
    ranks: int = 1
    chips: int = 1
    block_size: int = 64
    codec: Codec = "float32"
    bases: Sequence[int] = (0,) * 8
    alignment: int = 64
    order: Order = "scattered"
    rope_interleaved: bool = True
    rotary_dim: int | None = None
    channels: Literal["interleaved", "nd_sharded", "height_sharded"] = "interleaved"
    shard_rows: int = 1
    poison: float = math.nan
    seed: int = 0

    @property
    def blocks(self) -> int:
        """Decode blocks of the request."""
        return math.ceil(self.tokens / self.block_size)

    @property
    def layout(self) -> KVPoolLayout:
        return KVPoolLayout(
            kind=self.kind,
            layers=self.layers,
            chips=self.chips,
            heads=len(heads_of_chip(0, self.chips, self.kv_heads)),
            block_size=self.block_size,
            head_dim=self.head_dim,
            codec=self.codec,
            banks=len(self.bases),
            alignment=self.alignment,
            rope_interleaved=self.rope_interleaved,
            rotary_dim=self.rotary_dim,
            channels=self.channels,
            shard_rows=self.shard_rows,
        )

    @property
    def stored_dims(self) -> int:
        """head_dim as the pool has it: whole tiles."""
        return -(-self.head_dim // 32) * 32

    def block_ids(self) -> list[int]:
        """Decode's block for each block of the request, in a pool of ``pool_blocks``."""
        if self.order == "scattered":
            return random.Random(self.seed).sample(range(self.pool_blocks), self.blocks)
        ids = list(range(2, 2 + self.blocks))
        return ids if self.order == "consecutive" else ids[::-1]

    @property
    def pool_blocks(self) -> int:
        return self.blocks + 4


@dataclass(frozen=True)
class Prefill:
    """Every rank's cache: ``flat[rank]`` in memory order, as ``source`` says, and the request's blocks in it."""

    source: Source
    flat: tuple[torch.Tensor, ...]
    table: tuple[int, ...]
    heads: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, crossing: Crossing) -> Prefill:
        c = crossing
        rng = random.Random(c.seed + 1)
        needed = math.ceil(c.tokens / c.source_block)
        blocks = needed + 2
        table = tuple(rng.sample(range(blocks), needed))
        heads = tuple(tuple(heads_of_chip(rank, c.ranks, c.kv_heads)) for rank in range(c.ranks))
        source = Source(c.family, blocks, len(heads[0]), c.source_block, c.head_dim, c.layers)
        made = torch.Generator().manual_seed(c.seed)
        shape = (c.layers, 2, c.kv_heads, c.tokens, c.head_dim)
        # Neighbours of very different size, so that shared exponents matter.
        sizes = torch.randint(-6, 7, shape, generator=made)
        logical = torch.ldexp(torch.randn(shape, generator=made), sizes).to(DTYPES[c.dtype])
        flat = []
        for mine in heads:
            cache = torch.full((c.layers, blocks, len(mine) * c.source_block * 2 * c.head_dim), c.poison)
            cache = cache.to(DTYPES[c.dtype])
            for index, block in enumerate(table):
                tokens = logical[:, :, list(mine), index * c.source_block : (index + 1) * c.source_block]
                _fill(cache[:, block], tokens, c)
            flat.append(cache.reshape(-1))
        return cls(source, tuple(flat), table, heads)

    def layers(self, rank: int, crossing: Crossing) -> list[LayerSource]:
        """The rank's layers as the product sees them in vLLM's tensors."""
        s = self.source
        shape = (s.layers, s.blocks, s.heads, s.block_size, 2 * s.head_dim)
        if s.family == "LBNHC":
            caches = self.flat[rank].view(s.layers, s.blocks, s.block_size, s.heads, -1).transpose(2, 3)
        else:
            caches = self.flat[rank].view(shape)
        backend = CPU_BACKEND if s.family == "cpu" else "FLASH_ATTN"
        return [layer_source(f"layer{i}", cache, backend, s.heads, s.head_dim) for i, cache in enumerate(caches)]

    def kv(self) -> Any:
        """The oracle's reading of the caches."""
        plain = [flat.tolist() for flat in self.flat]

        def read(layer: int, tensor: Tensor, head: int, token: int) -> list[float]:
            rank = next(r for r, mine in enumerate(self.heads) if head in mine)
            place = self.heads[rank].index(head)
            row = read_source(plain[rank], self.source, self.table, layer=layer, tensor=tensor, head=place, token=token)
            assert all(abs(value) < 1e6 for value in row), "the test's own cache has poison where it needs values"
            return row

        return read


def _fill(block: torch.Tensor, tokens: torch.Tensor, c: Crossing) -> None:
    """Writes ``[layers, 2, heads, n, head_dim]`` into the first n tokens of one block of every layer."""
    layers, _, heads, n, dims = tokens.shape
    if c.family == "cpu":
        pages = block.view(layers, heads, 2, c.source_block * dims)
        pages[:, :, 0].view(layers, heads, dims, c.source_block)[..., :n] = tokens[:, 0].transpose(2, 3)
        pages[:, :, 1].view(layers, heads, c.source_block, dims)[:, :, :n] = tokens[:, 1]
        return
    rows = tokens.permute(0, 2, 3, 1, 4)  # layers, heads, n, K and V, head_dim
    if c.family == "LBHNC":
        block.view(layers, heads, c.source_block, 2, dims)[:, :, :n] = rows
    else:
        block.view(layers, c.source_block, heads, 2, dims)[:, :n] = rows.transpose(1, 2)


@dataclass(frozen=True)
class Banks:
    """Memory of all banks, filled with a pattern; the banks lie scattered in it, and apart from each other."""

    crossing: Crossing
    buffers: tuple[int, ...] = field(init=False)
    bank_bytes: int = field(init=False)
    memory: NDArray[np.uint8] = field(init=False)
    first: NDArray[np.int64] = field(init=False)
    """Index in ``memory`` of each bank's first byte: ``[chips, banks]``."""

    def __post_init__(self) -> None:
        layout = self.crossing.layout
        size = layout.rule.slots(layout.pool_pages(self.crossing.pool_blocks)) * layout.page_pitch
        buffers = tuple(GUARD + index * (size + GUARD) for index in range(layout.pools))
        bank_bytes = buffers[-1] + size + GUARD
        places = list(range(layout.chips * layout.banks))
        random.Random(self.crossing.seed + 2).shuffle(places)
        count = len(places) * bank_bytes
        memory = (np.arange(count, dtype=np.uint32) * 2654435761 >> 13).astype(np.uint8)
        first = np.array(places, dtype=np.int64).reshape(layout.chips, layout.banks) * bank_bytes
        for name, value in (("buffers", buffers), ("bank_bytes", bank_bytes), ("memory", memory), ("first", first)):
            object.__setattr__(self, name, value)

    @property
    def placement(self) -> PoolPlacement:
        return PoolPlacement(self.memory.ctypes.data + self.first, self.buffers, self.crossing.pool_blocks)

    @property
    def pool(self) -> Pool:
        return pool_of(self.crossing.layout, self.crossing.bases, self.buffers)

    def land(self, segments: Segments, parcel: torch.Tensor) -> None:
        """Copies as the RDMA reads do; refuses a read that leaves the parcel or crosses from bank to bank."""
        region, start = parcel.data_ptr(), self.memory.ctypes.data
        reads = zip(segments.remote.tolist(), segments.local.tolist(), segments.length.tolist(), strict=True)
        for remote, local, length in reads:
            assert length > 0 and region <= remote and remote + length <= region + parcel.numel()
            assert start <= local and local + length <= start + len(self.memory)
            assert (local - start) // self.bank_bytes == (local - start + length - 1) // self.bank_bytes
            ctypes.memmove(local, remote, length)

    def with_pages(self, found: dict[tuple[int, int], dict[int, bytes]]) -> NDArray[np.uint8]:
        """The memory as the oracle wants it: ``found`` from ``expected_banks`` written over this memory."""
        wanted = self.memory.copy()
        for (chip, bank), pages in found.items():
            for address, page in pages.items():
                at = int(self.first[chip, bank]) + address - self.crossing.bases[bank]
                wanted[at : at + len(page)] = np.frombuffer(page, dtype=np.uint8)
        return wanted


def pairing_of(crossing: Crossing, rank: int) -> Pairing:
    c = crossing
    shape = KVShape(c.layers, c.kv_heads, c.head_dim, c.dtype)
    found = pair(
        PrefillFacts(shape, "model", c.ranks, rank, c.source_block, 1 << 30), DecodeFacts(shape, "model", c.layout)
    )
    assert isinstance(found, Pairing), [str(mismatch) for mismatch in found]
    return found


def carry(
    crossing: Crossing, prefill: Prefill, banks: Banks, *, blocks_per_parcel: int | None = None, skip: int = 0
) -> list[Segments]:
    """Moves the request into ``banks`` by the product alone; ``skip``: leading blocks that decode already has.

    Returns the segments of each (rank, parcel).
    """
    ids, placement = crossing.block_ids(), banks.placement
    done = []
    for rank in range(crossing.ranks):
        pairing = pairing_of(crossing, rank)
        layers = prefill.layers(rank, crossing)
        for first, blocks in parcels(crossing.blocks, blocks_per_parcel):
            plan = pairing.plan(blocks)
            # What earlier parcels left in a region must not show: rows are all written.
            parcel = torch.full((plan.nbytes,), 0xA5, dtype=torch.uint8)
            table = torch.tensor(prefill.table)
            PACKER.pack(layers, table, plan, first, crossing.tokens, parcel)
            again = torch.full_like(parcel, 0x5A)
            pack_parcel(layers, table, plan, first, crossing.tokens, again)
            assert torch.equal(parcel, again), "the product's packer and the reference differ"
            skipped = min(max(skip - first, 0), blocks)
            # Decode has no ids for what it skips.
            mine = [-1] * skipped + ids[first + skipped : first + blocks]
            segments = pool_segments(plan, parcel.data_ptr(), mine, placement, skipped)
            banks.land(segments, parcel)
            done.append(segments)
    return done


def parcels(blocks: int, each: int | None) -> Iterator[tuple[int, int]]:
    """(first block, blocks) of each parcel."""
    step = blocks if each is None else each
    for first in range(0, blocks, step):
        yield first, min(step, blocks - first)


def oracle_banks(
    crossing: Crossing, prefill: Prefill, banks: Banks, skip: int = 0
) -> dict[tuple[int, int], dict[int, bytes]]:
    """``expected_banks`` of the crossing, without the pages of the first ``skip`` blocks."""
    kv, padding = prefill.kv(), [0.0] * (crossing.stored_dims - crossing.head_dim)

    def padded(layer: int, tensor: Tensor, head: int, token: int) -> list[float]:
        values: list[float] = kv(layer, tensor, head, token) + padding
        return values

    found = expected_banks(
        padded,
        banks.pool,
        num_tokens=crossing.tokens,
        block_ids=crossing.block_ids(),
        kv_heads=crossing.kv_heads,
        chips=crossing.chips,
        rotary_dim=(crossing.rotary_dim or crossing.head_dim) if crossing.rope_interleaved else 0,
    )
    if skip:
        pool = banks.pool
        tensors: tuple[Tensor, ...] = ("k", "v")
        for block in crossing.block_ids()[:skip]:
            for tensor in tensors:
                for layer in range(pool.layers):
                    for head in range(pool.heads):
                        for token in range(0, pool.tile_rows() * 32, 32):
                            for dim in range(0, pool.head_dim, 32):
                                bank, address, _ = pool.address(tensor, block, layer, head, token, dim)
                                for chip in range(crossing.chips):
                                    del found[chip, bank][address]
    return found


def assert_crossing(crossing: Crossing, *, blocks_per_parcel: int | None = None, skip: int = 0) -> list[Segments]:
    """Carries, and asserts that all bank memory is, byte for byte, the oracle's pages in the pattern."""
    prefill, banks = Prefill.of(crossing), Banks(crossing)
    found = oracle_banks(crossing, prefill, banks, skip)
    wanted = banks.with_pages(found)
    segments = carry(crossing, prefill, banks, blocks_per_parcel=blocks_per_parcel, skip=skip)
    wrong = np.flatnonzero(banks.memory != wanted)
    assert not len(wrong), f"{len(wrong)} of {len(wanted)} bytes differ, the first at {wrong[0]}; {crossing}"
    pages = sum(len(pages) for pages in found.values())
    # Nothing is sent twice, and no replica of a head by two ranks.
    assert sum(part.nbytes for part in segments) == pages * PAGE_BYTES[crossing.codec]
    return segments
