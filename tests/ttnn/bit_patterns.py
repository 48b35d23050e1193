"""Numbers that packers disagree about, as fp32 bit patterns in groups of 16 (the elements that share an exponent)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["GROUP", "numbers_for_bfloat16", "numbers_for_block_float", "ties"]

GROUP = 16
Bits = NDArray[np.uint32]


def numbers_for_block_float(magnitude_bits: int, seed: int) -> NDArray[np.float32]:
    """2,228,224 numbers for a block float with ``magnitude_bits``, whole tiles of 1024."""
    rng = np.random.default_rng(seed)
    every_shift = [ties(magnitude_bits, shift, 8192, rng) for shift in range(magnitude_bits + 1)]
    tie_groups = np.concatenate(every_shift)
    kinds = [
        _wild(1 << 14, rng),
        _neighbours(1 << 15, rng),
        tie_groups[rng.integers(0, len(tie_groups), 1 << 16)],
        _full_fractions(1 << 13, rng),
        _specials(1 << 13, rng),
        _tiny(1 << 13, rng),
    ]
    return _as_floats(np.concatenate(kinds))


def numbers_for_bfloat16(seed: int) -> NDArray[np.float32]:
    """2,359,296 numbers, whole tiles of 1024."""
    rng = np.random.default_rng(seed)
    halves = _wild(1 << 16, rng) & np.uint32(0xFFFF0000)
    halves += rng.choice(np.array([0x7FFF, 0x8000, 0x8001], dtype=np.uint32), halves.shape)
    return _as_floats(np.concatenate([_wild(1 << 16, rng), halves, _specials(1 << 13, rng), _tiny(1 << 13, rng)]))


def ties(magnitude_bits: int, shift: int, groups: int, rng: np.random.Generator) -> Bits:
    """Groups whose elements lie ``shift`` below the shared exponent, halfway between two codes or next to it.

    The first element sets the exponent.  Aligned to it, another has ``q`` codes and then exactly a half, or one unit
    of the aligned 24 bits more or less; and bits that the alignment shifts out, which TTNN's packer does not look at.
    """
    size = (groups, GROUP)
    dropped = 24 - magnitude_bits
    leading = magnitude_bits - 1 - shift
    if leading >= 0:
        codes = (1 << leading) + rng.integers(0, 1 << leading, size)
        nudge = rng.integers(-1, 2, size)
    else:
        codes = np.zeros(size, dtype=np.int64)  # the leading one is the half
        nudge = rng.integers(0, 2, size)
    aligned = (codes << dropped) + (1 << dropped - 1) + nudge
    lost = rng.integers(0, 1 << shift, size) * rng.integers(0, 2, size)
    magnitude = (aligned << shift) + lost
    top = rng.integers(shift + 1, 255, (groups, 1))
    exponent = np.broadcast_to(top - shift, size).copy()
    exponent[:, 0] = top[:, 0]
    sign = rng.integers(0, 2, size)
    bits: Bits = (sign << 31 | exponent << 23 | magnitude & 0x7FFFFF).astype(np.uint32)
    return bits


def _wild(groups: int, rng: np.random.Generator) -> Bits:
    """Any bits at all."""
    return rng.integers(0, 1 << 32, (groups, GROUP), dtype=np.uint32)


def _neighbours(groups: int, rng: np.random.Generator) -> Bits:
    """Exponents close enough that most elements keep some bits."""
    exponent = rng.integers(1, 255, (groups, 1)) - rng.integers(0, 10, (groups, GROUP))
    bits = _wild(groups, rng) & np.uint32(0x807FFFFF)
    return bits | (np.clip(exponent, 0, 254) << 23).astype(np.uint32)


def _full_fractions(groups: int, rng: np.random.Generator) -> Bits:
    """Fractions of nearly all ones: rounding up would need one bit more, and saturates."""
    exponent = np.broadcast_to(rng.integers(1, 255, (groups, 1)), (groups, GROUP)) - rng.integers(0, 2, (groups, GROUP))
    fraction = 0x7FFFFF - (rng.integers(0, 1 << 23, (groups, GROUP)) >> rng.integers(1, 24, (groups, GROUP)))
    sign = rng.integers(0, 2, (groups, GROUP))
    return (sign << 31 | exponent << 23 | fraction).astype(np.uint32)


def _specials(groups: int, rng: np.random.Generator) -> Bits:
    """Zeros, denormals, the smallest and largest normals, infinities and NaNs side by side."""
    chosen = np.array([0, 1, 0x7FFFFF, 0x800000, 0x3F800000, 0x7F7FFFFF, 0x7F800000, 0x7FC00000], dtype=np.uint32)
    bits = chosen[rng.integers(0, len(chosen), (groups, GROUP))]
    payload = rng.integers(1, 1 << 23, (groups, GROUP), dtype=np.uint32)
    bits = np.where(rng.random((groups, GROUP)) < 0.1, 0x7F800000 | payload, bits)
    # In half of the groups nothing is infinite, so that the others show.
    calm = rng.random((groups, 1)) < 0.5
    bits = np.where(calm & (bits >= 0x7F800000), bits & np.uint32(0xFFFFFF), bits)
    sign = rng.integers(0, 2, (groups, GROUP), dtype=np.uint32)
    return bits.astype(np.uint32) | sign << np.uint32(31)


def _tiny(groups: int, rng: np.random.Generator) -> Bits:
    """Groups of nothing but denormals and zeros of both signs, and a few of zeros alone."""
    bits = _wild(groups, rng) & np.uint32(0x807FFFFF)
    bits[::4] &= np.uint32(0x80000000)
    return bits


def _as_floats(groups: Bits) -> NDArray[np.float32]:
    return np.ascontiguousarray(groups).reshape(-1).view(np.float32)
