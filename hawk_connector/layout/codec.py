"""How the elements of one page become bytes.

A plain codec stores each element by itself.  A block float (TTNN's bfp8_b, bfp4_b, bfp2_b) stores one shared 8-bit
exponent for each group of 16 neighbours, all exponents first, then sign-and-magnitude elements.  Formulas and their
proof against TTNN: TTNN's tile layout as measured by the project (1024-element tiles, groups are face rows).
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CODECS", "Codec", "codec_named"]


@dataclass(frozen=True, slots=True)
class Codec:
    """A page codec.

    ``bits``: stored bits per element, without shared exponents.
    ``group``: elements that share one exponent byte; 0 for plain codecs.
    ``magnitude_bits``: bits of a block float's magnitude, its leading one included; 0 for plain codecs.
    """

    name: str
    bits: int
    group: int = 0
    magnitude_bits: int = 0

    @property
    def is_block_float(self) -> bool:
        return self.group > 0

    def exponent_bytes(self, elements: int) -> int:
        """Bytes of shared exponents at the head of a page of ``elements``."""
        return elements // self.group if self.group else 0

    def element_bit(self, element: int, elements: int) -> int:
        """First bit of an element in a page of ``elements``, counted from the page's first byte, low bits first."""
        return 8 * self.exponent_bytes(elements) + element * self.bits

    def page_bytes(self, elements: int) -> int:
        """Bytes of a page of ``elements`` (1024 for a TTNN tile: 4096, 2048, 1088, 576 or 320)."""
        return self.exponent_bytes(elements) + elements * self.bits // 8

    def page_elements(self, nbytes: int) -> int:
        """Elements of a page of ``nbytes``: the inverse of ``page_bytes``.  ValueError where no page has this size."""
        group_bits = 8 + self.group * self.bits if self.group else self.bits
        groups, rest = divmod(nbytes * 8, group_bits)
        if rest:
            raise ValueError(f"no page of {self.name} has {nbytes} bytes")
        return groups * (self.group or 1)


CODECS: tuple[Codec, ...] = (
    Codec("float32", 32),
    Codec("bfloat16", 16),
    Codec("float16", 16),
    Codec("bfp8", 8, group=16, magnitude_bits=7),
    Codec("bfp4", 4, group=16, magnitude_bits=3),
    Codec("bfp2", 2, group=16, magnitude_bits=1),
)


def codec_named(name: str) -> Codec:
    """The codec called ``name``; ValueError names the known ones."""
    for codec in CODECS:
        if codec.name == name:
            return codec
    raise ValueError(f"codec must be one of {', '.join(c.name for c in CODECS)}; got {name!r}")
