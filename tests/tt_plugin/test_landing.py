"""The landing on a simulated device."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import numpy as np
import pytest

from hawk_connector.decode.landing import landing_provider
from hawk_connector.errors import ConfigError, LocalError
from hawk_connector.layout.kv_pool import PoolKind
from hawk_connector.plan.parcel import ChipShare, ParcelPlan
from hawk_connector.plan.segments import Segments
from tests.oracle.scalar import expected_segments, stream_pages
from tests.tt_plugin.pools import device_bytes, make_pools, oracle_pool
from tt_plugin.landing import PoolLanding, from_kv_caches


@pytest.mark.parametrize("banks", [7, 8, 12])
@pytest.mark.parametrize("kind", ["cross_layer", "per_layer"])
@pytest.mark.parametrize("block_ids", [[4, 0, 2], [6, 5, 4], [2, 3, 4]])
def test_streams_land_where_the_oracle_says(banks: int, kind: PoolKind, block_ids: list[int]) -> None:
    pools = make_pools(banks=banks, kind=kind, chips=2, kv_heads=4, codec="bfp8", layers=3)
    landing = PoolLanding(pools)
    shares = tuple(ChipShare(chip, ((2 * chip, 0), (2 * chip + 1, 1))) for chip in range(2))
    plan = ParcelPlan(landing.layout, shares, len(block_ids))
    parcel = np.random.default_rng(0).integers(0, 256, plan.nbytes, dtype=np.uint8)
    segments = landing.segments(plan, parcel.ctypes.data, block_ids, 0)
    assert segments.count == expected_segments(oracle_pool(pools), block_ids, chips=2)
    regions = landing.regions()
    for remote, local, length in zip(segments.remote, segments.local, segments.length, strict=True):
        assert any(start <= local and local + length <= start + size for start, size in regions)
        ctypes.memmove(int(local), int(remote), int(length))

    page_bytes = pools.layout.page_pitch
    sent = iter(parcel.reshape(-1, page_bytes))
    counts = [[0] * banks for _ in range(2)]
    for chip in range(2):
        for stream in stream_pages(oracle_pool(pools), block_ids):
            for bank, address in stream:
                assert device_bytes(pools, chip, bank, address, page_bytes) == next(sent).tobytes()
                counts[chip][bank] += page_bytes
    assert next(sent, None) is None

    landed = landing.landed(segments)
    assert sorted(landed) == [(c, b, n) for c in range(2) for b, n in enumerate(counts[c]) if n]
    assert landing.fill() == tuple(counts[0] + counts[1])
    landing.landed(segments)
    assert landing.fill() == tuple(2 * n for n in counts[0] + counts[1])


def test_segments_outside_the_banks_are_not_counted() -> None:
    pools = make_pools()
    landing = PoolLanding(pools)
    start = int(pools.device.origins[0, 0]) + pools.device.table.bank_bytes
    outside = Segments(*(np.array([n], dtype=np.int64) for n in (0, start - 16, 32)))
    with pytest.raises(LocalError, match="outside the device's banks"):
        landing.landed(outside)
    assert set(landing.fill()) == {0}


def test_a_parcel_for_other_pools_is_refused() -> None:
    landing = PoolLanding(make_pools(banks=8))
    other = make_pools(banks=7).layout
    with pytest.raises(LocalError, match="packed for other pools"):
        landing.segments(ParcelPlan(other, (ChipShare(0, ((0, 0), (1, 1))),), 1), 0, [0], 0)


def test_the_entry_point_finds_the_pools_behind_the_handles() -> None:
    pools = make_pools()
    provider = landing_provider("tt_plugin")
    landing = provider({f"layers.{i}": SimpleNamespace(pools=pools) for i in range(2)})
    assert (landing.layout, landing.num_blocks) == (pools.layout, pools.num_blocks)


def test_caches_that_are_no_handles_are_refused() -> None:
    for caches in ({}, {"a": np.zeros(1)}, {"a": SimpleNamespace(pools=make_pools()), "b": np.zeros(1)}):
        with pytest.raises(ConfigError, match="Start the decode side with HAWK_NPU=simulated"):
            from_kv_caches(caches)
