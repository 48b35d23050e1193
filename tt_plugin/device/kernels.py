"""The simulated NPU's kernels: they write, read and attend to KV tiles where these lie in the banks.

The element type of the ``memory`` argument chooses the codec, so that each kernel is written once and compiled once
for each: ``uint32`` for float32 pages, ``uint16`` for bfloat16, ``uint8`` for bfp8.  Addresses are in elements of that
type.  A token's 16 neighbouring dims are one row of a 16x16 face and, in bfp8, one exponent group, so a token is
written without reading its neighbours.

Formulas: TTNN's tile, page and codec layouts as measured by the project (tile of four row-major 16x16 faces; bfp8
page of 64 exponents then 1024 sign-and-magnitude bytes; the host packer's rounding).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit
from numba.extending import overload

__all__ = ["PoolGeometry", "attend", "read_tokens", "write_tokens"]

FACE = 16
TILE_ELEMENTS = 1024
FACE_ELEMENTS = 256
BFP8_EXPONENTS = 64  # bytes at the head of a page, one for each face row

# (banks, elements from bank to bank, elements from page to page, local heads, tile rows of a block, tile columns,
#  tokens of a block, layers that share a pool, this layer among them)
PoolGeometry = tuple[int, int, int, int, int, int, int, int, int]

# Sums may be reordered and multiplied-and-added in one go; NaN and infinity keep their meaning.
FAST: Any = {"reassoc", "contract", "nsz"}

# 2^(E - 127 - 6) for each shared exponent E: what one step of a bfp8 magnitude is worth.
BFP8_STEP = np.ldexp(np.float64(1.0), np.arange(256) - 133).astype(np.float32)
# Signed magnitude of each element byte.
BFP8_MAGNITUDE = np.where(np.arange(256) < 128, 1.0, -1.0).astype(np.float32) * (np.arange(256) & 127).astype(
    np.float32
)


def _store(memory: Any, page: int, row: int, bits: Any) -> None:
    """Encodes 16 fp32 bit patterns (uint32) into face row ``row`` (face * 16 + row in face) of a page."""
    raise NotImplementedError("compiled code only")


def _load(memory: Any, page: int, row: int, out: Any, at: int) -> None:
    """Decodes the 16 elements of a face row into ``out[at:at + 16]`` (fp32)."""
    raise NotImplementedError("compiled code only")


@njit(cache=True)
def _store_float32(memory, page, row, bits):  # type: ignore[no-untyped-def]
    start = page + row * FACE
    for i in range(FACE):
        memory[start + i] = bits[i]


@njit(cache=True)
def _store_bfloat16(memory, page, row, bits):  # type: ignore[no-untyped-def]
    start = page + row * FACE
    for i in range(FACE):
        u = np.uint32(bits[i])
        rounded = (u + np.uint32(0x7FFF) + ((u >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
        nan = (u & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
        memory[start + i] = np.uint16(0x7FC0 if nan else rounded)  # TTNN has one NaN


@njit(cache=True)
def _store_bfp8(memory, page, row, bits):  # type: ignore[no-untyped-def]
    shared = 0
    for i in range(FACE):
        shared = max(shared, (np.int64(bits[i]) >> 23) & 0xFF)
    memory[page + row] = np.uint8(shared)
    start = page + BFP8_EXPONENTS + row * FACE
    for i in range(FACE):
        u = np.int64(bits[i])
        exponent = (u >> 23) & 0xFF
        mantissa = 0 if exponent == 0 else ((u & 0x7FFFFF) | 0x800000)
        # What alignment shifts out is gone before rounding: it is not sticky.
        mantissa >>= min(shared - exponent, 32)
        magnitude = mantissa >> 17
        rest = mantissa & 0x1FFFF
        if rest > 0x10000 or (rest == 0x10000 and magnitude & 1):
            magnitude += 1
        magnitude = min(magnitude, 127)
        sign = (u >> 31) & 1 if magnitude else 0
        memory[start + i] = np.uint8((sign << 7) | magnitude)


@njit(cache=True)
def _load_float32(memory, page, row, out, at):  # type: ignore[no-untyped-def]
    start = page + row * FACE
    for i in range(FACE):
        out[at + i] = np.uint32(memory[start + i]).view(np.float32)


@njit(cache=True)
def _load_bfloat16(memory, page, row, out, at):  # type: ignore[no-untyped-def]
    start = page + row * FACE
    for i in range(FACE):
        out[at + i] = np.uint32(np.uint32(memory[start + i]) << np.uint32(16)).view(np.float32)


@njit(cache=True)
def _load_bfp8(memory, page, row, out, at):  # type: ignore[no-untyped-def]
    step = BFP8_STEP[memory[page + row]]
    start = page + BFP8_EXPONENTS + row * FACE
    for i in range(FACE):
        out[at + i] = BFP8_MAGNITUDE[memory[start + i]] * step


_STORES = {32: _store_float32, 16: _store_bfloat16, 8: _store_bfp8}
_LOADS = {32: _load_float32, 16: _load_bfloat16, 8: _load_bfp8}


@overload(_store, inline="always")
def _store_by_type(memory, page, row, bits):  # type: ignore[no-untyped-def]
    store = _STORES[memory.dtype.bitwidth]
    return lambda memory, page, row, bits: store(memory, page, row, bits)


@overload(_load, inline="always")
def _load_by_type(memory, page, row, out, at):  # type: ignore[no-untyped-def]
    load = _LOADS[memory.dtype.bitwidth]
    return lambda memory, page, row, out, at: load(memory, page, row, out, at)


@njit(cache=True)
def _tile(geometry, buffer, block, head, tile_row, tile_column):  # type: ignore[no-untyped-def]
    """Where the page of a tile starts."""
    banks, bank_span, pitch, heads, rows, columns, _, depth, layer = geometry
    page = ((block * depth + layer) * heads + head) * rows * columns + tile_row * columns + tile_column
    return page % banks * bank_span + buffer + page // banks * pitch


@njit(cache=True)
def _tile_row(geometry, buffer, block, head, tile_row, pages):  # type: ignore[no-untyped-def]
    """Where the pages of one row of tiles start: fills ``pages``, int64 ``[tile columns]``."""
    for column in range(len(pages)):
        pages[column] = _tile(geometry, buffer, block, head, tile_row, column)


@njit(cache=True)
def _load_token(memory, pages, in_tile, out):  # type: ignore[no-untyped-def]
    """One token's head_dim elements as fp32, in the order in which they are stored."""
    row = (in_tile >> 4) * 32 + (in_tile & 15)  # of the left face; the right one is 16 rows on
    for column in range(len(pages)):
        _load(memory, pages[column], row, out, column * 32)
        _load(memory, pages[column], row + FACE, out, column * 32 + FACE)


@njit(cache=True, nogil=True)
def write_tokens(memory, geometry, buffer, slots, values, first_head, dim_order):  # type: ignore[no-untyped-def]
    """Writes tokens into their tiles.

    ``memory``: a chip's bytes as the codec's element type.  ``buffer``: the pool's address in such elements.
    ``slots``: int64 ``[tokens]``, block * block size + token; negative ones are skipped.  ``values``: uint32
    ``[tokens, kv_heads, head_dim]``, fp32 bit patterns of all the model's heads, of which the chip holds those from
    ``first_head`` on.  ``dim_order``: int64 ``[head_dim]``, the dim stored at each place.
    """
    heads, columns, block_size = geometry[3], geometry[5], geometry[6]
    bits = np.empty(FACE, np.uint32)
    for n in range(len(slots)):
        slot = slots[n]
        if slot < 0:
            continue
        block, token = slot // block_size, slot % block_size
        in_tile = token & 31
        row = (in_tile >> 4) * 32 + (in_tile & 15)
        for head in range(heads):
            for column in range(columns):
                page = _tile(geometry, buffer, block, head, token >> 5, column)
                for face in range(2):
                    for i in range(FACE):
                        bits[i] = values[n, first_head + head, dim_order[column * 32 + face * FACE + i]]
                    _store(memory, page, row + face * FACE, bits)


@njit(cache=True, nogil=True)
def read_tokens(memory, geometry, buffer, blocks, out):  # type: ignore[no-untyped-def]
    """Reads the first tokens of a request: fills ``out``, fp32 ``[local heads, tokens, head_dim]``.

    ``blocks``: int32, the request's blocks in order.  Dims are in stored order.
    """
    block_size = geometry[6]
    pages = np.empty(geometry[5], np.int64)
    for head in range(out.shape[0]):
        for token in range(out.shape[1]):
            in_block = token % block_size
            if in_block & 31 == 0:
                block = np.int64(blocks[token // block_size])
                _tile_row(geometry, buffer, block, head, in_block >> 5, pages)
            _load_token(memory, pages, in_block & 31, out[head, token])


@njit(cache=True, nogil=True, fastmath=FAST)
def attend(  # type: ignore[no-untyped-def]
    memory,
    geometry,
    k_buffer,
    v_buffer,
    queries,
    query_start,
    seq_lens,
    tables,
    requests,
    query_heads,
    dim_order,
    scale,
    out,
):
    """Causal attention of a few query tokens for each request, straight from the tiles.

    ``queries``, ``out``: fp32 ``[tokens, query heads, head_dim]``; dims of ``queries`` in the model's order.
    ``query_start``: int32 ``[requests + 1]``.  ``seq_lens``: int32 ``[requests]``, tokens that each request has, its
    queries included.  ``tables``: int32 ``[requests, blocks]``.  ``requests``: int64, those to compute.
    ``query_heads``: int64 ``[local heads, 2]``, first query head and how many of them the chip computes for each of
    its KV heads.  ``dim_order``: int64 ``[head_dim]``, the dim of K stored at each place.
    """
    block_size = geometry[6]
    dims = queries.shape[2]
    row = np.empty(dims, np.float32)
    pages = np.empty(geometry[5], np.int64)
    for request in requests:
        first_query, end_query = np.int64(query_start[request]), np.int64(query_start[request + 1])
        length = np.int64(seq_lens[request])
        count = end_query - first_query
        for head in range(query_heads.shape[0]):
            first_head, group = query_heads[head, 0], query_heads[head, 1]
            rows = count * group
            if rows == 0:
                continue
            q = np.empty((rows, dims), np.float32)
            for i in range(count):
                for g in range(group):
                    for d in range(dims):
                        q[i * group + g, d] = queries[first_query + i, first_head + g, dim_order[d]] * scale
            scores = np.empty((rows, length), np.float32)
            for token in range(length):
                in_block = token % block_size
                if in_block & 31 == 0:
                    block = np.int64(tables[request, token // block_size])
                    _tile_row(geometry, k_buffer, block, head, in_block >> 5, pages)
                _load_token(memory, pages, in_block & 31, row)
                for r in range(rows):
                    total = np.float32(0.0)
                    for d in range(dims):
                        total += q[r, d] * row[d]
                    scores[r, token] = total
            for r in range(rows):
                visible = length - count + r // group + 1
                top = np.float32(-np.inf)
                for token in range(visible):
                    top = max(top, scores[r, token])
                total = np.float64(0.0)
                for token in range(visible):
                    weight = np.float32(math.exp(scores[r, token] - top))
                    scores[r, token] = weight
                    total += weight
                inverse = np.float32(1.0 / total)
                for token in range(visible):
                    scores[r, token] *= inverse
                for token in range(visible, length):
                    scores[r, token] = np.float32(0.0)
            result = np.zeros((rows, dims), np.float32)
            for token in range(length):
                in_block = token % block_size
                if in_block & 31 == 0:
                    block = np.int64(tables[request, token // block_size])
                    _tile_row(geometry, v_buffer, block, head, in_block >> 5, pages)
                _load_token(memory, pages, in_block & 31, row)
                for r in range(rows):
                    weight = scores[r, token]
                    for d in range(dims):
                        result[r, d] += weight * row[d]
            for i in range(count):
                for g in range(group):
                    for d in range(dims):
                        out[first_query + i, first_head + g, d] = result[i * group + g, d]
