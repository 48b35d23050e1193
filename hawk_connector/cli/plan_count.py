"""What moving one request's KV will take, counted with the same plan that runs: the figures of `hawk plan`.

The prefill ranks are paired with the decode side, the request is cut into parcels as the prefill protocol cuts it, and
each parcel's reads are made for decode's block ids.  Nothing here estimates but the link model.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from hawk_connector.errors import PairingRefused
from hawk_connector.layout.catalog import DeviceEntry, LayoutEntry
from hawk_connector.layout.kv_pool import KVPoolLayout, PoolKind
from hawk_connector.plan.pairing import DecodeFacts, Pairing, PrefillFacts, pair
from hawk_connector.plan.placement import PlacementCosts, PlacementCounts, count_placements
from hawk_connector.plan.runs import bank_runs
from hawk_connector.plan.segments import PoolPlacement, pool_segments
from hawk_connector.protocol.regions import RegionAllocator

from .catalog_pool import model_pool
from .named_models import ModelKV
from .plan_options import Blocks, Dtype, LinkModel

__all__ = ["ParcelCount", "PlacementReport", "PlanReport", "PlanRequest", "RankReport", "plan_report"]

# Host addresses of banks that nobody has: far enough apart that no two of them touch.
_BANK_SPAN = 1 << 44


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """One request from one prefill side to one decode side.

    ``ranks``: prefill's tensor parallel size.  ``devices``: the chips of the decode side to plan for; more where the
    prefill side is paired with others too, which decides whether it can pack before it is asked.  ``entry``: how
    all of them store KV.
    """

    model: ModelKV
    ranks: int
    chips: int
    tokens: int
    dtype: Dtype
    pool: PoolKind
    blocks: Blocks
    entry: LayoutEntry
    devices: tuple[DeviceEntry, ...]
    block_size: int
    parcel_tokens: int
    parcel_bytes: int
    send_buffer_bytes: int
    link: LinkModel

    @property
    def block_ids(self) -> NDArray[np.int64]:
        """Decode's blocks of the request.  They begin at 1: block 0 is vLLM's null block and no request's."""
        count = self.block_count
        if self.blocks is Blocks.scattered:
            return np.arange(count, dtype=np.int64) * 2 + 1
        ids = np.arange(count, dtype=np.int64) + 1
        return ids[::-1].copy() if self.blocks is Blocks.descending else ids

    @property
    def pool_blocks(self) -> int:
        """Blocks of a pool that is just large enough."""
        return int(self.block_ids.max()) + 1

    @property
    def block_count(self) -> int:
        return -(-self.tokens // self.block_size)

    def layout(self, device: DeviceEntry) -> KVPoolLayout:
        """The pool that every chip of the decode side has."""
        return model_pool(
            self.entry,
            device,
            self.model.shape,
            kind=self.pool,
            chips=self.chips,
            block_size=self.block_size,
            num_blocks=self.pool_blocks,
            codec=self.dtype.codec,
        )

    def pairing(self, device: DeviceEntry, rank: int) -> Pairing:
        """Raises PairingRefused with every field that does not fit."""
        shape, name = self.model.shape, self.model.name
        # vLLM's block size on the prefill side plays no part: parcels are cut into decode's blocks.
        prefill = PrefillFacts(shape, name, self.ranks, rank, 16, self.send_buffer_bytes)
        verdict = pair(prefill, DecodeFacts(shape, name, self.layout(device)))
        if isinstance(verdict, tuple):
            raise PairingRefused(verdict)
        assert isinstance(verdict, Pairing)  # the facts are of pools
        return verdict


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


class PlacementReport(msgspec.Struct, frozen=True):
    """Where reads should end, each parcel decided for itself: in the pools, or in stages that are copied on.

    ``choice``: `pool`, `staged`, or `mixed`.  ``reads``: of the whole request, as chosen.  ``pool_reads``,
    ``staged_reads``: if all parcels were placed alike.  ``copies``: copies inside the device that staging all would
    add.
    """

    choice: str
    reads: int
    pool_reads: int
    staged_reads: int
    copies: int


class PlanReport(msgspec.Struct, frozen=True):
    """The figures of a plan; `hawk plan --json` prints them under these names.

    ``bytes_per_segment``: the length of every segment where all are equal, else the mean; ``smallest_segment`` and
    ``largest_segment`` say which.  ``streams``, ``segments`` and ``wire_bytes`` are the whole request's: all ranks, all
    parcels; ``segments`` are those of reads that end in the pools.  ``placement`` is None where memory is one region.
    ``bf16_wire_bytes``: the same blocks in bf16, without padding.  ``predicted_s`` is ``bytes_s + reads_s``.
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
    layout: str
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
    placement: PlacementReport | None
    parcels: tuple[ParcelCount, ...]
    ranks: tuple[RankReport, ...]


def plan_report(request: PlanRequest) -> PlanReport:
    """Counts the plan of ``request``.  Raises PairingRefused where its sides cannot be paired."""
    device = request.devices[0]
    pairings = [request.pairing(device, rank) for rank in range(request.ranks)]
    layout = request.layout(device)
    ids = request.block_ids
    placement = _placement(layout, device, request.pool_blocks)
    parcels: dict[int, list[int]] = {}  # index: blocks, streams, segments, bytes
    ranks, lengths, counts = [], [], []
    for rank, pairing in enumerate(pairings):
        streams, of_rank = 0, []
        for index, mine in enumerate(_cut(request, pairing, ids)):
            plan = pairing.plan(len(mine))
            length = pool_segments(plan, 0, mine.tolist(), placement).length
            of_rank.append(length)
            if layout.banks > 1:
                runs = bank_runs(plan, mine.tolist(), placement.buffer_addresses, request.pool_blocks)
                counts.append(count_placements(plan, runs))
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
        layout=request.entry.name,
        device=device.name if request.entry.needs_device else "one region",
        tp=request.ranks,
        chips=request.chips,
        banks=layout.banks,
        heads_per_chip=layout.heads,
        pages_per_unit=layout.pages_per_unit,
        page_bytes=layout.page_pitch,
        wire_bytes=nbytes,
        bf16_wire_bytes=_bf16_bytes(request, layout),
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
        placement=_placements(counts) if counts else None,
        parcels=tuple(ParcelCount(index, *count) for index, count in sorted(parcels.items())),
        ranks=tuple(ranks),
    )


def _placements(counts: list[PlacementCounts]) -> PlacementReport:
    costs = PlacementCosts()
    choices = [count.choice(costs) for count in counts]
    chosen = [
        count.pool_reads if choice == "pool" else count.staged_reads
        for count, choice in zip(counts, choices, strict=True)
    ]
    return PlacementReport(
        choice=choices[0] if len(set(choices)) == 1 else "mixed",
        reads=sum(chosen),
        pool_reads=sum(count.pool_reads for count in counts),
        staged_reads=sum(count.staged_reads for count in counts),
        copies=sum(count.copies for count in counts),
    )


def _cut(request: PlanRequest, pairing: Pairing, ids: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Block ids of each parcel of a rank, cut as the prefill protocol cuts a transfer."""
    block_bytes = pairing.plan(1).nbytes
    if not block_bytes:
        return []  # another rank holds the same heads and sends them
    fitting = RegionAllocator(request.send_buffer_bytes).capacity // block_bytes
    each = max(1, min(request.parcel_tokens // request.block_size, request.parcel_bytes // block_bytes, fitting))
    return [ids[first : first + each] for first in range(0, len(ids), each)]


def _placement(layout: KVPoolLayout, device: DeviceEntry, num_blocks: int) -> PoolPlacement:
    """Pools one after another, as an allocator that is asked for nothing else lays them, in banks of no real host."""
    bytes_per_bank = layout.rule.slots(layout.pool_pages(num_blocks)) * layout.page_pitch
    first = -(-device.first_address // device.alignment) * device.alignment
    buffers = tuple(first + index * bytes_per_bank for index in range(layout.pools))
    banks = np.arange(layout.chips * layout.banks, dtype=np.int64).reshape(layout.chips, layout.banks)
    return PoolPlacement(banks * _BANK_SPAN, buffers, num_blocks)


def _bf16_bytes(request: PlanRequest, layout: KVPoolLayout) -> int:
    """What a connector moves that leaves K and V in bf16: whole blocks without padding, to every chip."""
    tokens = request.block_count * request.block_size
    return 2 * layout.layers * layout.chips * layout.heads * tokens * layout.head_dim * 2


def _eager(request: PlanRequest) -> tuple[bool, str]:
    """Whether prefill packs before decode asks, and why.  All paired decode sides must share one pairing."""
    if len({request.pairing(device, 0) for device in request.devices}) == 1:
        return True, (
            "streams are ordered by page class, so packing needs none of decode's block ids, "
            "and all paired decode sides share one layout"
        )
    names = ", ".join(dict.fromkeys(device.name for device in request.devices))
    return False, f"the paired decode sides ({names}) have different layouts: prefill packs when one of them asks"
