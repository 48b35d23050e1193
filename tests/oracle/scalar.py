"""The scalar oracle: what bytes must lie where, one element at a time.

It judges ``hawk_connector`` and ``tt_plugin`` and therefore imports neither, nor numpy or torch: plain loops,
integers and ``struct``. Buffers of any library are accepted where they can be indexed by an integer.

Where the formulas come from:

* tile, face and page order, block-float codecs, DRAM interleaving and the paged KV cache: TTNN 0.81.1, as
  observed on simulated Wormhole and Blackhole devices (host packers ``pack_bfp8/4/2``, raw DRAM reads,
  ``paged_fill_cache``);
* the order of K's dimensions: tt-metal ``tt_transformers`` (``reverse_permute`` of the K projection's rows);
* source caches: vLLM 0.32 (``v1/kv_cache_layout.py``, ``csrc/cpu/cpu_attn_vec.hpp``).

Words: a *page* is one 32x32 tile as it is stored; *dim* counts inside a head; *token* counts inside a block
for ``Pool`` and inside the request elsewhere; "k" and "v" name the two tensors.

Numbers: an input value is first made fp32 (IEEE round to nearest even); a finite value beyond fp32's range
raises ``OverflowError``. A signalling NaN may be quieted by Python's own float before it gets here.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Codec = Literal["float32", "bfloat16", "bfp8", "bfp4", "bfp2"]
Tensor = Literal["k", "v"]
Kv = Callable[[int, Tensor, int, int], Sequence[float]]
"""``kv(layer, "k" | "v", head, token)``: one token's head_dim values, in the model's (HF) order of dims."""

PAGE_BYTES: Mapping[str, int] = {
    "float32": 4096,  # 1024 * 4
    "bfloat16": 2048,  # 1024 * 2
    "bfp8": 1088,  # 64 exponents + 1024 * 1
    "bfp4": 576,  # 64 exponents + 1024 / 2
    "bfp2": 320,  # 64 exponents + 1024 / 4
}
MAGNITUDE_BITS: Mapping[str, int] = {"bfp8": 7, "bfp4": 3, "bfp2": 1}


# ---- one tile ------------------------------------------------------------------------------------------


def tile_position(r: int, c: int) -> int:
    """Index e (0..1023) of row r, column c of a 32x32 tile: four 16x16 faces, each row-major."""
    if not (0 <= r < 32 and 0 <= c < 32):
        raise ValueError(f"a tile has rows and columns 0..31, got ({r}, {c})")
    face = 2 * (r // 16) + c // 16
    return face * 256 + (r % 16) * 16 + c % 16


def fp32_bits(value: float) -> int:
    """The 32 bits of ``value`` as fp32."""
    bits: int = struct.unpack("<I", struct.pack("<f", value))[0]
    return bits


def bf16_bits(value: float) -> int:
    """The 16 bits of ``value`` as bf16: round to nearest, ties to even, denormals kept, overflow to infinity.

    Every NaN becomes 0x7FC0, sign and payload gone, as in TTNN.
    """
    if math.isnan(value):
        return 0x7FC0
    bits = fp32_bits(value)
    upper, lower = bits >> 16, bits & 0xFFFF
    if lower > 0x8000 or (lower == 0x8000 and upper % 2 == 1):
        return upper + 1  # a carry out of the fraction raises the exponent, as it should
    return upper


def bf16_value(bits: int) -> float:
    """The value of 16 bf16 bits."""
    value: float = struct.unpack("<f", struct.pack("<I", bits << 16))[0]
    return value


def encode_face_row(values: Sequence[float], magnitude_bits: int) -> tuple[int, list[int]]:
    """(shared exponent, 16 codes) of 16 elements that share an exponent, as TTNN's host packer rounds them.

    A code is ``sign << magnitude_bits | magnitude``; its value is ``(-1)^sign * magnitude * 2^(E - 127 -
    (magnitude_bits - 1))``. E is the largest biased fp32 exponent of the 16. Infinity and NaN are not
    special: they are mantissas with exponent 255.
    """
    if len(values) != 16:
        raise ValueError(f"16 elements share an exponent, got {len(values)}")
    fields = [(bits >> 31, bits >> 23 & 0xFF, bits & 0x7FFFFF) for bits in map(fp32_bits, values)]
    shared = max(exponent for _, exponent, _ in fields)
    dropped_bits = 24 - magnitude_bits
    half = 1 << (dropped_bits - 1)
    codes = []
    for sign, exponent, fraction in fields:
        # A denormal (and zero) counts as zero; everything else has its hidden leading one.
        mantissa = 0 if exponent == 0 else 1 << 23 | fraction
        # Aligning cuts bits off for good: they do not make a tie "more than a tie" below.
        mantissa >>= shared - exponent
        magnitude, rest = mantissa >> dropped_bits, mantissa % (1 << dropped_bits)
        if rest > half or (rest == half and magnitude % 2 == 1):
            magnitude += 1
        magnitude = min(magnitude, (1 << magnitude_bits) - 1)
        codes.append(sign << magnitude_bits | magnitude if magnitude else 0)
    return shared, codes


def _check_tile(values: Sequence[Sequence[float]]) -> None:
    if len(values) != 32 or any(len(row) != 32 for row in values):
        raise ValueError("a page holds 32 rows of 32 values")


def encode_page(values: Sequence[Sequence[float]], codec: Codec) -> bytes:
    """The bytes of the page that holds ``values[row][column]`` (32 x 32)."""
    _check_tile(values)
    page = bytearray(PAGE_BYTES[codec])
    if codec in ("float32", "bfloat16"):
        for r in range(32):
            for c in range(32):
                e = tile_position(r, c)
                if codec == "float32":
                    struct.pack_into("<f", page, 4 * e, values[r][c])
                else:
                    struct.pack_into("<H", page, 2 * e, bf16_bits(values[r][c]))
        return bytes(page)
    magnitude_bits = MAGNITUDE_BITS[codec]
    code_bits = magnitude_bits + 1
    for r in range(32):
        for left in (0, 16):
            exponent, codes = encode_face_row([values[r][left + i] for i in range(16)], magnitude_bits)
            first = tile_position(r, left)
            page[first // 16] = exponent  # the 64 face rows in the order of their elements
            for i in range(16):
                bit = (first + i) * code_bits  # low bits of a byte belong to the lower element
                page[64 + bit // 8] |= codes[i] << bit % 8
    return bytes(page)


def decode_page(page: bytes, codec: Codec) -> list[list[float]]:
    """The 32 x 32 values of a page.

    Block floats are decoded by the formula in ``encode_face_row`` in double precision; rows whose shared
    exponent is 255 (they held an infinity or NaN) give that formula's finite number, which lies beyond
    fp32's range.
    """
    if len(page) != PAGE_BYTES[codec]:
        raise ValueError(f"a {codec} page has {PAGE_BYTES[codec]} bytes, got {len(page)}")
    return [[_decode_element(page, codec, tile_position(r, c)) for c in range(32)] for r in range(32)]


def _decode_element(page: bytes, codec: Codec, e: int) -> float:
    if codec == "float32":
        value: float = struct.unpack_from("<f", page, 4 * e)[0]
        return value
    if codec == "bfloat16":
        return bf16_value(struct.unpack_from("<H", page, 2 * e)[0])
    magnitude_bits = MAGNITUDE_BITS[codec]
    bit = e * (magnitude_bits + 1)
    code = page[64 + bit // 8] >> bit % 8
    magnitude = code % (1 << magnitude_bits)
    value = math.ldexp(magnitude, page[e // 16] - 127 - (magnitude_bits - 1))
    return -value if code >> magnitude_bits & 1 else value


# ---- the paged KV cache --------------------------------------------------------------------------------


def k_order(dim: int, head_dim: int, rotary_dim: int) -> int:
    """Which HF dim of K stands at TTNN's dim ``dim``.

    HF pairs dim i with i + rotary_dim/2 (half-split), Meta 2i with 2i+1 (interleaved): ``K_tt[2i+k] =
    K_hf[k*rotary_dim/2 + i]`` for dims below ``rotary_dim``; the others stay. ``rotary_dim`` 0 is HF's own
    order.
    """
    if not 0 <= dim < head_dim:
        raise ValueError(f"dim {dim} is not in 0..{head_dim - 1}")
    if rotary_dim % 2 or not 0 <= rotary_dim <= head_dim:
        raise ValueError(f"rotary_dim must be even and in 0..{head_dim}, got {rotary_dim}")
    if dim >= rotary_dim:
        return dim
    i, k = dim // 2, dim % 2
    return k * (rotary_dim // 2) + i


@dataclass(frozen=True, slots=True)
class Pool:
    """The KV cache of one chip; every chip has the same shapes and addresses (TTNN allocates in lockstep).

    ``kind`` "per_layer": a tensor [num_blocks, heads, block_size, head_dim] for each layer and each of K
    and V, its address in ``buffer_address[layer]["k" | "v"]``. "cross_layer": one K and one V tensor
    [num_blocks * layers, heads, block_size, head_dim], layer l of block b at row ``b * layers + l``,
    addresses in ``buffer_address["k" | "v"]``. ``heads`` are one chip's. ``banks`` are the base addresses
    of the DRAM banks (bytes).
    """

    kind: Literal["per_layer", "cross_layer"]
    layers: int
    heads: int
    block_size: int
    head_dim: int
    banks: Sequence[int]
    buffer_address: Any  # see above
    codec: Codec
    alignment: int

    def __post_init__(self) -> None:
        if self.kind not in ("per_layer", "cross_layer"):
            raise ValueError(f'kind must be "per_layer" or "cross_layer", got {self.kind!r}')
        if self.head_dim % 32 or self.head_dim < 32:
            raise ValueError(f"head_dim must be a multiple of 32 (a tile's width), got {self.head_dim}")
        if min(self.layers, self.heads, self.block_size, self.alignment, len(self.banks)) < 1:
            raise ValueError("layers, heads, block_size, alignment and the number of banks must be positive")

    def tile_rows(self) -> int:
        """Tile rows of one head's part of a block; a block shorter than 32 tokens is padded to one tile."""
        return math.ceil(self.block_size / 32)

    def tiles_per_block(self) -> int:
        """Pages of one block in one layer of K or of V."""
        return self.heads * self.tile_rows() * (self.head_dim // 32)

    def address(
        self, tensor: Tensor, block: int, layer: int, head: int, token: int, dim: int
    ) -> tuple[int, int, int]:
        """(bank, address of the page, index of the element in it). ``dim`` is TTNN's (for K see ``k_order``).

        ``token`` counts in the block and may name a padding row (up to the end of the last tile).
        """
        for name, index, end in (
            ("layer", layer, self.layers),
            ("head", head, self.heads),
            ("token", token, self.tile_rows() * 32),
            ("dim", dim, self.head_dim),
        ):
            if not 0 <= index < end:
                raise ValueError(f"{name} {index} is not in 0..{end - 1}")
        if block < 0:
            raise ValueError(f"block {block} is negative")
        if self.kind == "per_layer":
            row, buffer = block, self.buffer_address[layer][tensor]
        else:
            row, buffer = block * self.layers + layer, self.buffer_address[tensor]
        tile_columns = self.head_dim // 32
        page = row * self.tiles_per_block()
        page += head * self.tile_rows() * tile_columns
        page += token // 32 * tile_columns
        page += dim // 32
        stride = math.ceil(PAGE_BYTES[self.codec] / self.alignment) * self.alignment
        bank, slot = page % len(self.banks), page // len(self.banks)
        return bank, self.banks[bank] + buffer + slot * stride, tile_position(token % 32, dim % 32)


def heads_of_chip(chip: int, chips: int, kv_heads: int) -> list[int]:
    """The model's KV heads on ``chip``: its contiguous share; one, replicated, where chips outnumber them."""
    if kv_heads >= chips:
        if kv_heads % chips:
            raise ValueError(f"{kv_heads} KV heads do not divide among {chips} chips")
        share = kv_heads // chips
        return [chip * share + i for i in range(share)]
    if chips % kv_heads:
        raise ValueError(f"{chips} chips do not divide among {kv_heads} KV heads")
    return [chip * kv_heads // chips]


def expected_banks(
    kv: Kv,
    pool: Pool,
    *,
    num_tokens: int,
    block_ids: Sequence[int],
    kv_heads: int,
    chips: int = 1,
    rotary_dim: int,
) -> dict[tuple[int, int], dict[int, bytes]]:
    """``{(chip, bank): {page address: page}}`` for every page of a request's blocks, and no other.

    Token t lies in block ``block_ids[t // block_size]`` at row ``t % block_size``; rows past the last
    token, and the rows that pad a tile, are zeros. K is stored in ``k_order`` of ``rotary_dim`` (0: the
    model keeps HF's order).
    """
    needed = math.ceil(num_tokens / pool.block_size)
    if num_tokens < 1 or len(block_ids) != needed:
        raise ValueError(
            f"{num_tokens} tokens in blocks of {pool.block_size} need {needed} blocks, got {len(block_ids)}"
        )
    if len(set(block_ids)) != len(block_ids):
        raise ValueError(f"block ids repeat: {list(block_ids)}")
    banks: dict[tuple[int, int], dict[int, bytes]] = {
        (chip, bank): {} for chip in range(chips) for bank in range(len(pool.banks))
    }
    for chip in range(chips):
        heads = heads_of_chip(chip, chips, kv_heads)
        if len(heads) != pool.heads:
            raise ValueError(
                f"{kv_heads} heads on {chips} chips are {len(heads)} per chip; the pool has {pool.heads}"
            )
        for tensor, layer, local_head, index, tile_row in _tile_rows(pool, len(block_ids)):
            rows = []
            for token in range(tile_row * 32, tile_row * 32 + 32):  # in the block
                position = index * pool.block_size + token  # in the request
                if token >= pool.block_size or position >= num_tokens:
                    rows.append([0.0] * pool.head_dim)
                    continue
                row = kv(layer, tensor, heads[local_head], position)
                if len(row) != pool.head_dim:
                    raise ValueError(f"kv() must give {pool.head_dim} values, gave {len(row)}")
                order = rotary_dim if tensor == "k" else 0
                rows.append([float(row[k_order(d, pool.head_dim, order)]) for d in range(pool.head_dim)])
            for left in range(0, pool.head_dim, 32):
                block = block_ids[index]
                bank, address, _ = pool.address(tensor, block, layer, local_head, tile_row * 32, left)
                page = encode_page([row[left : left + 32] for row in rows], pool.codec)
                banks[chip, bank][address] = page
    return banks


def _tile_rows(pool: Pool, blocks: int) -> Iterator[tuple[Tensor, int, int, int, int]]:
    """(tensor, layer, local head, index of the block in the request, tile row): all there are."""
    tensors: tuple[Tensor, ...] = ("k", "v")
    for tensor in tensors:
        for layer in range(pool.layers):
            for head in range(pool.heads):
                for index in range(blocks):
                    for tile_row in range(pool.tile_rows()):
                        yield tensor, layer, head, index, tile_row


# ---- what is sent --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Run:
    """Bytes that lie one after another in a stream of the send buffer and in one bank."""

    page_class: int
    bank: int
    address: int
    length: int


def stream_pages(pool: Pool, block_ids: Sequence[int]) -> list[list[tuple[int, int]]]:
    """For each page class, the (bank, page address) of its pages in the order of the stream, for one chip.

    A unit is what one block has in one pool: K or V of all layers (cross_layer), or of one layer
    (per_layer); its page i has class ``i % banks``. A stream holds its pages by pool, then block in the
    request's order, then page. The pools of a per_layer cache follow each other as K and V of layer 0, K
    and V of layer 1, and so on.
    """
    tensors: tuple[Tensor, ...] = ("k", "v")
    all_layers = list(range(pool.layers))
    pools: list[tuple[Tensor, list[int]]]
    if pool.kind == "cross_layer":
        pools = [(tensor, all_layers) for tensor in tensors]
    else:
        pools = [(tensor, [layer]) for layer in all_layers for tensor in tensors]
    streams: list[list[tuple[int, int]]] = [[] for _ in pool.banks]
    for tensor, layers in pools:
        for block in block_ids:
            i = 0
            for layer in layers:
                for head in range(pool.heads):
                    for token in range(0, pool.tile_rows() * 32, 32):
                        for dim in range(0, pool.head_dim, 32):
                            bank, address, _ = pool.address(tensor, block, layer, head, token, dim)
                            streams[i % len(pool.banks)].append((bank, address))
                            i += 1
    return streams


def expected_runs(pool: Pool, block_ids: Sequence[int]) -> list[Run]:
    """The fewest runs that carry a parcel's blocks to one chip, cut only where the stream or the bank jumps.

    Bytes alone count, so two pools merge should the end of one touch the start of the next in a bank.
    """
    size = PAGE_BYTES[pool.codec]
    runs: list[Run] = []
    for page_class, stream in enumerate(stream_pages(pool, block_ids)):
        start = len(runs)
        for bank, address in stream:
            last = runs[-1] if len(runs) > start else None
            if last is not None and last.bank == bank and last.address + last.length == address:
                runs[-1] = Run(page_class, bank, last.address, last.length + size)
            else:
                runs.append(Run(page_class, bank, address, size))
    return runs


def expected_segments(
    pool: Pool, block_ids: Sequence[int], *, chips: int = 1, blocks_per_parcel: int | None = None
) -> int:
    """How many reads move a request's blocks: the runs of each parcel to each chip (never merged)"""
    step = len(block_ids) if blocks_per_parcel is None else blocks_per_parcel
    count = 0
    for first in range(0, len(block_ids), step):
        count += len(expected_runs(pool, block_ids[first : first + step]))
    return count * chips


# ---- source caches -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Source:
    """A vLLM cache as one flat buffer of elements, one layer after another (or one layer's).

    ``family``, the memory order inside one layer (N: token in block, D: head_dim):

    * "LBHNC": block, head, token, then 2D values: K's D, then V's D (vLLM's GPU backends, "HND");
    * "LBNHC": block, token, head, then 2D values: K's D, then V's D ("NHD");
    * "cpu": block, head, then 2*N*D values: K column-major [D, N], then V row-major [N, D] (CPU_ATTN).
    """

    family: Literal["LBHNC", "LBNHC", "cpu"]
    blocks: int
    heads: int
    block_size: int
    head_dim: int
    layers: int = 1

    def index(self, tensor: Tensor, block: int, layer: int, head: int, token: int, dim: int) -> int:
        """Where one element lies in the flat buffer; ``token`` counts in the block, ``dim`` is HF's."""
        for name, value, end in (
            ("block", block, self.blocks),
            ("layer", layer, self.layers),
            ("head", head, self.heads),
            ("token", token, self.block_size),
            ("dim", dim, self.head_dim),
        ):
            if not 0 <= value < end:
                raise ValueError(f"{name} {value} is not in 0..{end - 1}")
        heads, n, d = self.heads, self.block_size, self.head_dim
        start = layer * self.blocks * heads * n * 2 * d
        value_half = 1 if tensor == "v" else 0
        if self.family == "LBHNC":
            return start + ((block * heads + head) * n + token) * 2 * d + value_half * d + dim
        if self.family == "LBNHC":
            return start + ((block * n + token) * heads + head) * 2 * d + value_half * d + dim
        if self.family == "cpu":
            page = start + (block * heads + head) * 2 * n * d
            return page + n * d + token * d + dim if tensor == "v" else page + dim * n + token
        raise ValueError(f'family must be "LBHNC", "LBNHC" or "cpu", got {self.family!r}')


def read_source(
    buffer: Any,
    source: Source,
    block_table: Sequence[int],
    *,
    layer: int,
    tensor: Tensor,
    head: int,
    token: int,
) -> list[float]:
    """The head_dim values of one token of a request whose blocks are ``block_table``, in HF's order of dims.

    ``buffer`` is flat, in memory order, as long as ``source`` says, and gives numbers when indexed by an
    integer.
    """
    elements = source.layers * source.blocks * source.heads * source.block_size * 2 * source.head_dim
    if len(buffer) != elements:
        raise ValueError(f"the flat buffer of {source} has {elements} elements, got {len(buffer)}")
    if not 0 <= token < len(block_table) * source.block_size:
        raise ValueError(
            f"token {token} is not in the {len(block_table)} blocks of {source.block_size} tokens given"
        )
    block, row = block_table[token // source.block_size], token % source.block_size
    return [float(buffer[source.index(tensor, block, layer, head, row, d)]) for d in range(source.head_dim)]
