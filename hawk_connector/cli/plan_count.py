"""What moving one request's KV will take, counted with the same plan that runs: the figures of `hawk plan`.

The prefill ranks are paired with the decode side, the request is cut into parcels as the prefill protocol cuts it, and
each parcel's reads are made for decode's block ids.  Nothing here estimates but the link model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np
from numpy.typing import NDArray

from hawk_connector.errors import ConfigError, PairingRefused
from hawk_connector.layout.catalog import DEVICES, DeviceEntry
from hawk_connector.layout.kv_pool import KVPoolLayout, PoolKind
from hawk_connector.plan.pairing import DecodeFacts, Pairing, PrefillFacts, chip_heads, pair
from hawk_connector.plan.segments import PoolPlacement, pool_segments
from hawk_connector.protocol.regions import RegionAllocator

from .named_models import ModelKV, nearest
from .plan_options import Blocks, Dtype, LinkModel

__all__ = ["ParcelCount", "PlanReport", "PlanRequest", "RankReport", "block_ids", "devices_named", "plan_report"]

# Host addresses of banks that nobody has: far enough apart that no two of them touch.
_BANK_SPAN = 1 << 44


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """One request from one prefill side to one decode side.

    ``ranks``: prefill's tensor parallel size.  ``devices``: the chips of the decode side to plan for; more where the
    prefill side is paired with others too, which decides whether it can pack before it is asked.
    """

    model: ModelKV
    ranks: int
    chips: int
    tokens: int
    dtype: Dtype
    pool: PoolKind
    blocks: Blocks
    devices: tuple[DeviceEntry, ...]
    block_size: int
    parcel_tokens: int
    send_buffer_bytes: int
    link: LinkModel

    @property
    def block_count(self) -> int:
        return -(-self.tokens // self.block_size)

    def layout(self, device: DeviceEntry) -> KVPoolLayout:
        """The pool that every chip of the decode side has."""
        shape = self.model.shape
        split = chip_heads(shape.kv_heads, self.chips)
        return KVPoolLayout(
            kind=self.pool,
            layers=shape.layers,
            chips=self.chips,
            heads=len(split[0]) if split else max(1, shape.kv_heads // self.chips),
            block_size=self.block_size,
            head_dim=shape.head_dim,
            codec=self.dtype.codec,
            banks=device.banks,
            alignment=device.alignment,
        )

    def pairing(self, device: DeviceEntry, rank: int) -> Pairing:
        """Raises PairingRefused with every field that does not fit."""
        shape, name = self.model.shape, self.model.name
        # vLLM's block size on the prefill side plays no part: parcels are cut into decode's blocks.
        prefill = PrefillFacts(shape, name, self.ranks, rank, 16, self.send_buffer_bytes)
        verdict = pair(prefill, DecodeFacts(shape, name, self.layout(device)))
        if isinstance(verdict, Pairing):
            return verdict
        raise PairingRefused(verdict)


class ParcelCount(msgspec.Struct, frozen=True):
    """One parcel over all ranks: its blocks, its streams, its reads and their bytes."""

    index: int
    blocks: int
    streams: int
    segments: int
    wire_bytes: int


class RankReport(msgspec.Struct, frozen=True):
    """What one prefill rank sends. ``chips``: chips that it feeds; ``heads``: pairs (its head, chip)."""

    rank: int
    chips: tuple[int, ...]
    heads: tuple[tuple[int, int], ...]
    streams: int
    segments: int
    wire_bytes: int
    predicted_s: float


class PlanReport(msgspec.Struct, frozen=True):
    """The figures of a plan; `hawk plan --json` prints them under these names.

    ``bytes_per_segment``: the length of every segment where all are equal, else the mean; ``smallest_segment`` and
    ``largest_segment`` say which.  ``streams``, ``segments`` and ``wire_bytes`` are the whole request's: all ranks, all
    parcels.  ``bf16_wire_bytes``: what the same blocks take in bf16.  ``predicted_s`` is ``bytes_s + reads_s``.
    """

    model: str
    layers: int
    kv_heads: int
    head_dim: int
    tokens: int
    blocks: int
    block_size: int
    dtype: str
    pool: str
    block_ids: str
    device: str
    tp: int
    chips: int
    banks: int
    heads_per_chip: int
    pages_per_unit: int
    page_bytes: int
    wire_bytes: int
    bf16_wire_bytes: int
    streams: int
    segments: int
    bytes_per_segment: float | int
    smallest_segment: int
    largest_segment: int
    eager: bool
    why: str
    link_gbps: float
    read_us: float
    bytes_s: float
    reads_s: float
    predicted_s: float
    parcels: tuple[ParcelCount, ...]
    ranks: tuple[RankReport, ...]


def devices_named(names: Sequence[str]) -> tuple[DeviceEntry, ...]:
    """The catalog's entries; ConfigError names the nearest for one that it does not have."""
    known = {entry.name: entry for entry in DEVICES}
    for name in names:
        if name not in known:
            raise ConfigError(f"device {name!r} is not in the catalog", fix=nearest(name, list(known)))
    return tuple(known[name] for name in names)


def block_ids(pattern: Blocks, count: int) -> NDArray[np.int64]:
    """Ids of ``count`` blocks.  They begin at 1: block 0 is vLLM's null block and no request's."""
    if pattern is Blocks.scattered:
        return np.arange(count, dtype=np.int64) * 2 + 1
    ids = np.arange(count, dtype=np.int64) + 1
    return ids[::-1].copy() if pattern is Blocks.descending else ids


def plan_report(request: PlanRequest) -> PlanReport:
    """Counts the plan of ``request``.  Raises PairingRefused where its sides cannot be paired."""
    device = request.devices[0]
    pairings = [request.pairing(device, rank) for rank in range(request.ranks)]
    layout = request.layout(device)
    ids = block_ids(request.blocks, request.block_count)
    placement = _placement(layout, device, int(ids.max()) + 1)
    parcels: dict[int, list[int]] = {}  # index: blocks, streams, segments, bytes
    ranks, lengths = [], []
    for rank, pairing in enumerate(pairings):
        streams, of_rank = 0, []
        for index, mine in enumerate(_cut(request, pairing, ids)):
            plan = pairing.plan(len(mine))
            length = pool_segments(plan, 0, mine.tolist(), placement).length
            of_rank.append(length)
            count = parcels.setdefault(index, [len(mine), 0, 0, 0])
            for position, more in enumerate((len(plan.streams()), len(length), int(length.sum())), 1):
                count[position] += more
            streams += len(plan.streams())
        lengths += of_rank
        segments, nbytes = sum(len(x) for x in of_rank), sum(int(x.sum()) for x in of_rank)
        ranks.append(
            RankReport(
                rank=rank,
                chips=tuple(share.chip for share in pairing.shares),
                heads=tuple((head, share.chip) for share in pairing.shares for head, _ in share.heads),
                streams=streams,
                segments=segments,
                wire_bytes=nbytes,
                predicted_s=request.link.total_s(nbytes, segments),
            )
        )
    length = np.concatenate(lengths)
    smallest, largest = int(length.min()), int(length.max())
    nbytes, segments = int(length.sum()), len(length)
    eager, why = _eager(request)
    return PlanReport(
        model=request.model.name,
        layers=layout.layers,
        kv_heads=request.model.shape.kv_heads,
        head_dim=layout.head_dim,
        tokens=request.tokens,
        blocks=request.block_count,
        block_size=request.block_size,
        dtype=request.dtype.value,
        pool=request.pool,
        block_ids=request.blocks.value,
        device=device.name,
        tp=request.ranks,
        chips=request.chips,
        banks=device.banks,
        heads_per_chip=layout.heads,
        pages_per_unit=layout.pages_per_unit,
        page_bytes=layout.page_pitch,
        wire_bytes=nbytes,
        bf16_wire_bytes=_bf16_bytes(request, pairings),
        streams=sum(rank.streams for rank in ranks),
        segments=segments,
        bytes_per_segment=smallest if smallest == largest else nbytes / segments,
        smallest_segment=smallest,
        largest_segment=largest,
        eager=eager,
        why=why,
        link_gbps=request.link.gbps,
        read_us=request.link.read_us,
        bytes_s=request.link.bytes_s(nbytes),
        reads_s=request.link.reads_s(segments),
        predicted_s=request.link.total_s(nbytes, segments),
        parcels=tuple(ParcelCount(index, *count) for index, count in sorted(parcels.items())),
        ranks=tuple(ranks),
    )


def _cut(request: PlanRequest, pairing: Pairing, ids: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Block ids of each parcel of a rank, cut as the prefill protocol cuts a transfer."""
    block_bytes = pairing.plan(1).nbytes
    if not block_bytes:
        return []  # another rank holds the same heads and sends them
    fitting = RegionAllocator(request.send_buffer_bytes).capacity // block_bytes
    each = max(1, min(request.parcel_tokens // request.block_size, fitting))
    return [ids[first : first + each] for first in range(0, len(ids), each)]


def _placement(layout: KVPoolLayout, device: DeviceEntry, num_blocks: int) -> PoolPlacement:
    """Pools one after another, as an allocator that is asked for nothing else lays them, in banks of no real host."""
    bytes_per_bank = layout.rule.slots(layout.pool_pages(num_blocks)) * layout.page_pitch
    first = -(-device.first_address // device.alignment) * device.alignment
    buffers = tuple(first + index * bytes_per_bank for index in range(layout.pools))
    banks = np.arange(layout.chips * layout.banks, dtype=np.int64).reshape(layout.chips, layout.banks)
    return PoolPlacement(banks * _BANK_SPAN, buffers, num_blocks)


def _bf16_bytes(request: PlanRequest, pairings: Sequence[Pairing]) -> int:
    total = 0
    for pairing in pairings:
        wide = msgspec.structs.replace(pairing.layout, codec="bfloat16")
        total += replace(pairing, layout=wide).plan(request.block_count).nbytes
    return total


def _eager(request: PlanRequest) -> tuple[bool, str]:
    """Whether prefill packs before decode asks, and why.  All paired decode sides must share one pairing."""
    if len({request.pairing(device, 0) for device in request.devices}) == 1:
        return True, (
            "streams are ordered by page class, so packing needs none of decode's block ids, "
            "and all paired decode sides share one layout"
        )
    names = ", ".join(dict.fromkeys(device.name for device in request.devices))
    return False, f"the paired decode sides ({names}) have different layouts: prefill packs when one of them asks"
