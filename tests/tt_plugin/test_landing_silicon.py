"""The direct path for pools that TTNN allocated, over the stand-in driver: windows must show what TTNN writes."""

from __future__ import annotations

import ctypes
import errno
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from numpy.typing import NDArray

from hawk_connector.errors import ConfigError, LocalError
from hawk_connector.layout.kv_pool import KVPoolLayout
from hawk_connector.plan.parcel import ChipShare, ParcelPlan
from hawk_connector.plan.runs import BankCopies
from tests.tt_plugin.stand_in_driver import StandInChip, StandInDriver
from tests.tt_plugin.test_windows import NODES, P150
from tt_plugin.device.banks import BankTable, LockstepAllocator
from tt_plugin.device.interface import Written
from tt_plugin.landing.silicon import window_landing

BANK = 256 << 10
BLOCKS = 4
LAYOUT = KVPoolLayout("cross_layer", 2, 2, 1, 64, 64, "bfloat16", 8, 64)


class HostSide:
    """What TTNN is on a card: writes that reach a chip's memory without our windows.  ``order``: its order of nodes."""

    copies_inside = False

    def __init__(self, driver: StandInDriver, order: Sequence[str], tiles: Sequence[tuple[int, int]] = P150) -> None:
        self.table = BankTable("stand-in", (0,) * 8, BANK, 64, 0x8080)
        self.allocator = LockstepAllocator(self.table)
        self.tiles = tuple(tiles)
        self.chips = len(order)
        self._channels = [[driver.chips[node].channels[tile] for tile in P150] for node in order]

    def allocate(self, bytes_per_bank: int, what: str = "buffer") -> int:
        return self.allocator.allocate(bytes_per_bank, what)

    def free(self, address: int) -> None:
        self.allocator.free(address)

    def write(self, chip: int, bank: int, address: int, data: NDArray[np.uint8]) -> None:
        self._channels[chip][bank][address : address + len(data)] = data.tobytes()

    def read(self, chip: int, bank: int, address: int, nbytes: int) -> NDArray[np.uint8]:
        return np.frombuffer(bytes(self._channels[chip][bank][address : address + nbytes]), dtype=np.uint8)

    def copy(self, copies: BankCopies) -> None:
        raise AssertionError("nothing is copied on the direct path")

    def flush(self, written: Iterable[Written]) -> None:
        pass

    def health(self) -> Sequence[str]:
        return ()

    def close(self) -> None:
        pass


@dataclass
class TensorPools:
    device: HostSide
    layout: KVPoolLayout = LAYOUT
    num_blocks: int = BLOCKS
    buffer_addresses: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        # 4 blocks of 2 layers of 1 head of 2 x 2 tiles: 32 pages of 2,048 bytes, an eighth of them in each bank.
        self.buffer_addresses = tuple(self.device.allocate(4 * 2048) for _ in range(self.layout.pools))

    def zero_blocks(self, block_ids: Iterable[int]) -> None: ...

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None: ...

    def free(self) -> None: ...


def driver() -> StandInDriver:
    return StandInDriver({node: StandInChip({tile: bytearray(BANK) for tile in P150}) for node in NODES})


def test_a_parcel_lands_where_ttnn_reads_it() -> None:
    cards = driver()
    device = HostSide(cards, NODES)
    pools = TensorPools(device)
    windows, landing = window_landing(pools, NODES, cards)
    plan = ParcelPlan(LAYOUT, tuple(ChipShare(c, ((c, 0),)) for c in range(2)), 1)
    parcel = np.random.default_rng(0).integers(0, 256, plan.nbytes, dtype=np.uint8)
    segments = landing.segments(plan, parcel.ctypes.data, [2], 0)
    for remote, local, length in zip(segments.remote, segments.local, segments.length, strict=True):
        ctypes.memmove(int(local), int(remote), int(length))
    landing.landed(segments)
    # Block 2 has pages 16 to 23 of each pool, slot 2 of each bank.  A parcel is chip by chip, bank by bank, K then V.
    sent = parcel.reshape(2, 8, 2, 2048)
    for chip in range(2):
        for pool in range(2):
            for bank in range(8):
                found = device.read(chip, bank, pools.buffer_addresses[pool] + 2 * 2048, 2048)
                assert np.array_equal(found, sent[chip, bank, pool])
    landing.close()
    windows.close()
    assert (cards.taken, cards.open_nodes) == (0, 0)


def test_the_marks_buffer_is_given_back() -> None:
    cards = driver()
    pools = TensorPools(HostSide(cards, NODES))
    free = pools.device.allocator.free_bytes
    windows, landing = window_landing(pools, NODES, cards)
    assert pools.device.allocator.free_bytes == free
    landing.close()
    windows.close()


def test_nodes_in_another_order_than_ttnns_are_found_out() -> None:
    cards = driver()
    pools = TensorPools(HostSide(cards, NODES[::-1]))
    free = pools.device.allocator.free_bytes
    words = rf"bank 0 of chip 0 is not what its window on {NODES[0]} shows.*got it in bank 0 of {NODES[1]}"
    with pytest.raises(ConfigError, match=words):
        window_landing(pools, NODES, cards)
    assert (cards.taken, cards.open_nodes) == (0, 0)
    assert pools.device.allocator.free_bytes == free
    windows, landing = window_landing(pools, NODES[::-1], cards)
    landing.close()
    windows.close()


def test_tiles_in_another_order_are_found_out() -> None:
    cards = driver()
    swapped = (P150[0], P150[2], P150[1], *P150[3:])
    with pytest.raises(ConfigError, match=r"bank 1 of chip 0 .*got it in bank 2 of"):
        window_landing(TensorPools(HostSide(cards, NODES, swapped)), NODES, cards)


def test_another_card_is_found_out() -> None:
    """The node is of a card that TTNN does not have at all."""
    cards = driver()
    cards.chips["/dev/tenstorrent/9"] = StandInChip({tile: bytearray(BANK) for tile in P150})
    with pytest.raises(ConfigError, match=r"bank 0 of chip 1 .*got it nowhere"):
        window_landing(TensorPools(HostSide(cards, NODES)), (NODES[0], "/dev/tenstorrent/9"), cards)
    assert cards.open_nodes == 0


def test_each_chip_needs_a_node() -> None:
    cards = driver()
    with pytest.raises(ConfigError, match=r"expected 2 nodes, one for each chip in TTNN's order, got 1"):
        window_landing(TensorPools(HostSide(cards, NODES)), NODES[:1], cards)


def test_a_driver_that_refuses_leaves_nothing_behind() -> None:
    cards = driver()
    pools = TensorPools(HostSide(cards, NODES))
    free = pools.device.allocator.free_bytes
    cards.refuse[("mmap", 11)] = errno.ENOMEM
    with pytest.raises(LocalError, match="cannot map"):
        window_landing(pools, NODES, cards)
    assert (cards.taken, cards.open_nodes, pools.device.allocator.free_bytes) == (0, 0, free)
