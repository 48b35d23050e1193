"""Which memory channel (bank) a page lies in, and where in it."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["InterleavedRule"]


@dataclass(frozen=True, slots=True)
class InterleavedRule:
    """TTNN's DRAM interleaving: page ``p`` lies in bank ``p % banks``, slot ``p // banks``.

    Source: tt-metal ``dataflow_api_addrgen.h`` (interleaved address generator).
    ``page_pitch``: bytes from one slot to the next, the page size rounded up to the DRAM alignment.
    """

    banks: int
    page_pitch: int

    def __post_init__(self) -> None:
        if self.banks < 1:
            raise ValueError(f"an interleaved rule needs at least one bank; got {self.banks}")
        if self.page_pitch < 1:
            raise ValueError(f"page pitch must be positive; got {self.page_pitch} bytes")

    def bank(self, page: int) -> int:
        return page % self.banks

    def offset(self, page: int) -> int:
        """Bytes from the buffer's address to the page, in the page's bank."""
        return page // self.banks * self.page_pitch

    def slots(self, pages: int) -> int:
        """Slots that every bank must hold for a buffer of ``pages``."""
        return -(-pages // self.banks)
