"""vLLM's block pool in small: reference counts, the prefix cache, and reuse of what is free at once."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence


class BlockPool:
    """``wiped(block)`` is called whenever a block loses its content: it has a new owner, or vLLM writes to it.

    A free block that is cached keeps its content until it is taken, as in vLLM.  Free blocks are taken in no order that
    the tests' subject could rely on; one that has just become free is the next one to be taken half of the time.
    """

    def __init__(self, blocks: int, rng: random.Random, wiped: Callable[[int], None]) -> None:
        self.size = blocks
        self.refs = [0] * blocks
        self._free = list(range(blocks))
        self._rng = rng
        self._wiped = wiped
        self._block_of: dict[str, int] = {}
        self._key_of: dict[int, str] = {}

    @property
    def free(self) -> int:
        return len(self._free)

    def hits(self, keys: Sequence[str]) -> list[int]:
        """The cached blocks of the longest cached prefix."""
        found = []
        for key in keys:
            block = self._block_of.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def take(self, hits: Sequence[int], count: int) -> list[int] | None:
        """``hits`` and ``count`` new blocks, one more reference each; None where there are not enough."""
        idle = [block for block in hits if self.refs[block] == 0]
        if len(self._free) - len(idle) < count:
            return None
        for block in idle:
            self._free.remove(block)
        for block in hits:
            self.refs[block] += 1
        new = []
        for _ in range(count):
            at = -1 if self._rng.random() < 0.5 else self._rng.randrange(len(self._free))
            block = self._free.pop(at)
            self._forget(block)
            self.refs[block] = 1
            new.append(block)
        return [*hits, *new]

    def cache(self, block: int, key: str) -> None:
        """The block is full and computed: others with the same tokens may share it."""
        if key not in self._block_of:
            self._forget_key(block)
            self._block_of[key], self._key_of[block] = block, key

    def give(self, blocks: Sequence[int]) -> None:
        """One reference less each; some of those without any are written to at once."""
        for block in blocks:
            self.refs[block] -= 1
            assert self.refs[block] >= 0, f"block {block} is given back once too often"
            if self.refs[block] == 0:
                self._free.append(block)
                if block not in self._key_of or self._rng.random() < 0.3:
                    self._forget(block)

    def reset(self) -> None:
        """No block is to be found any more; those in use stay with their users."""
        for block in list(self._key_of):
            self._forget_key(block)

    def _forget(self, block: int) -> None:
        self._forget_key(block)
        self._wiped(block)

    def _forget_key(self, block: int) -> None:
        key = self._key_of.pop(block, None)
        if key is not None:
            del self._block_of[key]
