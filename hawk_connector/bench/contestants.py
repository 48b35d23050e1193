"""Who takes part in `hawk bench transfer`, and what runs on each side for them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from hawk_connector.layout.codec import codec_named
from hawk_connector.layout.kv_pool import PoolKind
from hawk_connector.layout.tensor_layout import TILE
from hawk_connector.plan.facts import Mode

from .cache import CacheShape, Family
from .carriers import Protocol
from .decode_process import DecoderSpec
from .device import PoolRequest
from .prefill_process import WorkerSpec

__all__ = ["CODECS", "FACE_ROWS", "MODES", "Contestant", "Packing", "Room", "TransferOptions", "contestants"]

Packing = Literal["cold", "eager"]
ContestantMode = Literal["direct", "hawk", "host", "face-rows"]
CODECS = {"fp32": "float32", "bf16": "bfloat16", "bfp8": "bfp8", "bfp4": "bfp4"}
FACE_ROWS: Literal["face-rows"] = "face-rows"
MODES: tuple[ContestantMode, ...] = ("direct", "hawk", "host", FACE_ROWS)
MIB = 2**20
TILE_ELEMENTS = TILE * TILE
# Reading a row at a time takes seconds for 10 MB, so neither often nor at larger sizes.
FACE_ROWS_MB = 10
FACE_ROWS_RUNS = 3
_PRODUCT_BUFFER = 1 << 30
_TINY = "tiny"


@dataclass(frozen=True)
class TransferOptions:
    """``sizes_mb``: in 2^20 bytes, counted in bfloat16 whatever the dtypes are, as the paper does.

    ``source_*``: the prefill side's cache; its blocks are shuffled, and so are the decode side's.
    """

    protocol: Protocol = "tcp"
    modes: tuple[ContestantMode, ...] = MODES
    dtypes: tuple[str, ...] = ("fp32", "bf16", "bfp8")
    packings: tuple[Packing, ...] = ("cold", "eager")
    sizes_mb: tuple[int, ...] = (10, 20, 40, 80, 160, 320, 640, 1280)
    parcel_tokens: tuple[int, ...] = (512,)
    runs: int = 7
    layers: int = 80
    kv_heads: int = 8
    head_dim: int = 128
    source: Family = "gpu-nhd"
    source_dtype: str = "bf16"
    source_block: int = 16
    block_size: int = 32
    chips: int = 4
    device: str = "blackhole-p150"
    pool: PoolKind = "cross_layer"
    pack_threads: int = 1
    seed: int = 1

    def cache(self, tokens: int) -> CacheShape:
        """A cache in which ``tokens`` tokens leave a quarter free."""
        blocks = -(-tokens // self.source_block)
        return CacheShape(
            self.source,
            self.layers,
            self.kv_heads,
            self.head_dim,
            self.source_block,
            blocks + -(-blocks // 4),
            self.source_dtype,
        )

    def tokens(self, size_mb: int) -> int:
        """Tokens whose KV takes ``size_mb`` in bfloat16, at least one."""
        return max(1, size_mb * MIB // self.cache(1).bf16_token_bytes)

    def pools(self, dtype: str, tokens: int, *, rope: bool = True) -> PoolRequest:
        """Pools in which ``tokens`` tokens leave a quarter free."""
        blocks = self.blocks(tokens)
        return PoolRequest(
            device=self.device,
            chips=self.chips,
            kind=self.pool,
            layers=self.layers,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            block_size=self.block_size,
            codec=CODECS[dtype],
            num_blocks=blocks + -(-blocks // 4),
            rope_interleaved=rope,
        )

    def blocks(self, tokens: int) -> int:
        """The decode side's blocks."""
        return -(-tokens // self.block_size)

    def block_bytes(self, codec: str, block_size: int | None = None) -> int:
        """Bytes of one block of the decode side on all chips, as tiles in ``codec``."""
        elements = 2 * self.layers * self.kv_heads * self.head_dim * (block_size or self.block_size)
        return elements * codec_named(codec).page_bytes(TILE_ELEMENTS) // TILE_ELEMENTS


@dataclass(frozen=True)
class Contestant:
    """``packing``: whether parcels are packed when they are asked for, or wait already."""

    mode: ContestantMode
    dtype: str
    packing: Packing
    parcel_tokens: int

    @property
    def name(self) -> str:
        words = [self.mode, self.dtype]
        if self.mode not in ("direct", FACE_ROWS):
            words += [self.packing, f"p{self.parcel_tokens}"]
        return " ".join(words)

    @property
    def decoder(self) -> str:
        return f"{self.mode} {self.dtype}"

    @property
    def rank(self) -> str:
        """The prefill worker that feeds it.  One for all that is packed on demand, since sides that differ in layout
        are what makes the product do that; one for each eager contestant, which is all that it is paired with."""
        return f"cold p{self.parcel_tokens}" if self.packing == "cold" else self.name

    def runs_at(self, size_mb: int) -> bool:
        return self.mode != FACE_ROWS or size_mb <= FACE_ROWS_MB


def contestants(options: TransferOptions) -> list[Contestant]:
    """Everyone that ``options`` ask for."""
    found: list[Contestant] = []
    for mode in options.modes:
        if mode == FACE_ROWS:
            found.append(Contestant(mode, "bf16", "eager", options.parcel_tokens[0]))
        elif mode == "direct":
            found.append(Contestant(mode, options.source_dtype, "eager", options.parcel_tokens[0]))
        else:
            found += [
                Contestant(mode, dtype, packing, parcel_tokens)
                for dtype in options.dtypes
                for packing in options.packings
                for parcel_tokens in options.parcel_tokens
            ]
    return found


@dataclass(frozen=True)
class Room:
    """What the two processes hold for transfers of at most ``tokens`` tokens."""

    options: TransferOptions
    field: tuple[Contestant, ...]
    tokens: int

    @property
    def cache(self) -> CacheShape:
        return self.options.cache(self.tokens)

    @property
    def workers(self) -> tuple[WorkerSpec, ...]:
        found: dict[str, WorkerSpec] = {}
        for each in self.field:
            if each.mode == FACE_ROWS:
                continue
            nbytes = self._buffer_bytes(each)
            if each.packing == "cold":
                earlier = found[each.rank].send_buffer_bytes if each.rank in found else 0
                nbytes = max(min(nbytes, _PRODUCT_BUFFER), earlier)
            found[each.rank] = WorkerSpec(each.rank, nbytes, each.parcel_tokens, self.options.pack_threads)
        return tuple(found.values())

    @property
    def decoders(self) -> tuple[DecoderSpec, ...]:
        """The workers on decode, each paired with all prefill workers that feed it; and a tiny one whose layout is
        nobody else's, so that no prefill worker that packs on demand is paired with equal layouts alone."""
        peers: dict[tuple[Mode, str], list[str]] = {}
        for each in self.field:
            if each.mode != FACE_ROWS:
                ranks = peers.setdefault((each.mode, each.dtype), [])
                ranks += [each.rank] if each.rank not in ranks else []
        found = [DecoderSpec(f"{mode} {dtype}", mode, dtype, tuple(ranks)) for (mode, dtype), ranks in peers.items()]
        cold = dict.fromkeys(each.rank for each in self.field if each.packing == "cold")
        if cold:
            found.append(DecoderSpec(_TINY, "hawk", _TINY, tuple(cold)))
        return tuple(found)

    @property
    def pools(self) -> dict[str, PoolRequest]:
        """Pools by name: modes that land in one dtype share them, since only one transfer runs at a time."""
        options = self.options
        landing = dict.fromkeys(each.dtype for each in self.field if each.mode not in (FACE_ROWS, "direct"))
        found = {dtype: options.pools(dtype, self.tokens) for dtype in landing}
        if any(each.mode == FACE_ROWS for each in self.field):
            found[FACE_ROWS] = options.pools("bf16", options.tokens(FACE_ROWS_MB), rope=False)
        if any(each.packing == "cold" for each in self.field):
            found[_TINY] = replace(options, block_size=2 * options.block_size).pools("bf16", 1)
        return found

    def peers_of(self, rank: str) -> int:
        """How many decode sides pair with a prefill worker."""
        return sum(rank in decoder.peers for decoder in self.decoders)

    @property
    def nbytes(self) -> int:
        """Memory that is touched on both sides: caches, send buffers, pools."""
        pools = sum(
            request.num_blocks * self.options.block_bytes(request.codec, request.block_size)
            for request in self.pools.values()
        )
        buffers = sum(worker.send_buffer_bytes for worker in self.workers)
        direct = self.cache.nbytes if any(each.mode == "direct" for each in self.field) else 0
        return self.cache.nbytes + buffers + pools + direct

    def _buffer_bytes(self, each: Contestant) -> int:
        """The whole transfer, packed for its pools or raw, whichever is more, and one parcel beside it."""
        options = self.options
        block = max(options.block_bytes(CODECS[each.dtype]), options.block_bytes(CODECS[options.source_dtype]))
        return block * (options.blocks(self.tokens) + options.blocks(each.parcel_tokens))
