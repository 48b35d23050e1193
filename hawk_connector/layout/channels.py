"""Channel rules: which memory channel (bank) a page lies in, and where in it.

A closed set of four.  All of them deal pages out in shards, round robin over the banks, and differ only in how many
pages a shard has: one (interleaved), a given number (ND shards), so many that every bank has one shard (HEIGHT
shards), or all there are (linear).  Every method takes a page or an int64 array of pages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "ChannelRule",
    "HeightShardedRule",
    "InterleavedRule",
    "LinearRule",
    "RoundRobinShardsRule",
]

Pages = TypeVar("Pages", int, NDArray[np.int64])


@dataclass(frozen=True, slots=True)
class ChannelRule:
    """What the four rules have in common; use one of them.

    ``banks``: banks of a chip.  ``page_pitch``: bytes from one page of a bank to the next, the page size rounded up
    to the alignment.  ``shard_pages``: pages that lie one after another in one bank before the next bank's turn.
    """

    banks: int
    page_pitch: int
    shard_pages: int = 1

    def __post_init__(self) -> None:
        if self.banks < 1:
            raise ValueError(f"a channel rule needs at least one bank; got {self.banks}")
        if self.page_pitch < 1:
            raise ValueError(f"page pitch must be positive; got {self.page_pitch} bytes")
        if self.shard_pages < 1:
            raise ValueError(f"a shard has at least one page; got {self.shard_pages}")

    def bank(self, page: Pages) -> Pages:
        """Bank in which the page lies."""
        return page // self.shard_pages % self.banks

    def offset(self, page: Pages) -> Pages:
        """Bytes from the buffer's address to the page, in the page's bank."""
        turn = page // (self.shard_pages * self.banks)
        return (turn * self.shard_pages + page % self.shard_pages) * self.page_pitch

    def place(self, page: Pages) -> tuple[Pages, Pages]:
        """``bank`` and ``offset`` of the page, in fewer steps."""
        if self.shard_pages > 1:
            return self.bank(page), self.offset(page)
        slot, bank = divmod(page, self.banks)
        return bank, slot * self.page_pitch

    def page_at(self, bank: int, offset: int) -> tuple[int, int]:
        """(page, byte inside the page's pitch) at ``offset`` bytes from the buffer's address in ``bank``.

        ValueError where there is no such bank, or the offset is negative.
        """
        if not 0 <= bank < self.banks:
            raise ValueError(f"bank must lie in 0..{self.banks - 1}; got {bank}")
        if offset < 0:
            raise ValueError(f"the address lies {-offset} bytes before the buffer")
        slot, byte = divmod(offset, self.page_pitch)
        turn, inside = divmod(slot, self.shard_pages)
        return (turn * self.banks + bank) * self.shard_pages + inside, byte

    def slots(self, pages: int) -> int:
        """Page slots that every bank must hold for a buffer of ``pages``: whole shards, as many for each bank."""
        shards = -(-pages // self.shard_pages)
        return -(-shards // self.banks) * self.shard_pages


@dataclass(frozen=True, slots=True, init=False)
class InterleavedRule(ChannelRule):
    """TTNN's DRAM interleaving: page ``p`` lies in bank ``p % banks``, slot ``p // banks``.

    Source: tt-metal ``dataflow_api_addrgen.h`` (interleaved address generator).
    """

    def __init__(self, banks: int, page_pitch: int) -> None:
        ChannelRule.__init__(self, banks, page_pitch, 1)


@dataclass(frozen=True, slots=True)
class RoundRobinShardsRule(ChannelRule):
    """TTNN's ND shards (ROUND_ROBIN_1D): shard ``s`` lies in bank ``s % banks``, slot ``s // banks``.

    The pages of a shard lie one after another.  With shards ``[1, H, BS, D]`` a KV block is one run in one bank.
    Source: tt-metal ``NdShardSpec``; checked against TTNN by the project.
    """


@dataclass(frozen=True, slots=True, init=False)
class HeightShardedRule(ChannelRule):
    """TTNN's HEIGHT_SHARDED: the buffer's ``pages`` are cut into one shard for each bank, shard ``i`` in bank ``i``."""

    def __init__(self, banks: int, page_pitch: int, pages: int) -> None:
        if banks >= 1 and pages % banks:
            raise ValueError(f"{pages} pages do not divide into {banks} equal shards, one for each bank")
        ChannelRule.__init__(self, banks, page_pitch, pages // max(banks, 1))


@dataclass(frozen=True, slots=True, init=False)
class LinearRule(ChannelRule):
    """One region: page ``p`` lies ``p * page_pitch`` bytes after the buffer's address."""

    def __init__(self, page_pitch: int) -> None:
        ChannelRule.__init__(self, 1, page_pitch, 1)
