"""The four channel rules against shards dealt out one by one, and base tables."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hawk_connector.layout.bases import BaseTable
from hawk_connector.layout.channels import HeightShardedRule, InterleavedRule, LinearRule, RoundRobinShardsRule
from tests.oracle.sharded import deal

PITCH = 1088


def rule_of(name: str, banks: int, shard: int) -> tuple[Any, int, int]:
    """The rule, and the banks and pages of a shard that the dealer must use."""
    if name == "interleaved":
        return InterleavedRule(banks, PITCH), banks, 1
    if name == "nd":
        return RoundRobinShardsRule(banks, PITCH, shard), banks, shard
    if name == "height":
        return HeightShardedRule(banks, PITCH, shard * banks), banks, shard
    return LinearRule(PITCH), 1, 1 << 20


@given(st.sampled_from(["interleaved", "nd", "height", "linear"]), st.integers(1, 12), st.integers(1, 9), st.data())
@settings(deadline=None, max_examples=150)
def test_pages_lie_where_they_are_dealt(name: str, banks: int, shard: int, data: st.DataObject) -> None:
    rule, dealt_banks, dealt_shard = rule_of(name, banks, shard)
    last = shard * banks - 1 if name == "height" else 400
    pages = data.draw(st.lists(st.integers(0, last), min_size=1, max_size=8))
    wanted = [deal(page, dealt_banks, dealt_shard) for page in pages]
    assert [(rule.bank(page), rule.offset(page)) for page in pages] == [(bank, slot * PITCH) for bank, slot in wanted]
    assert [rule.place(page) for page in pages] == [(bank, slot * PITCH) for bank, slot in wanted]
    many = np.array(pages, dtype=np.int64)
    assert rule.bank(many).tolist() == [bank for bank, _ in wanted]
    assert rule.offset(many).tolist() == [slot * PITCH for _, slot in wanted]
    assert [row.tolist() for row in rule.place(many)] == [[bank for bank, _ in wanted], rule.offset(many).tolist()]
    byte = data.draw(st.integers(0, PITCH - 1))
    assert [rule.page_at(bank, slot * PITCH + byte) for bank, slot in wanted] == [(page, byte) for page in pages]


@given(st.integers(1, 12), st.integers(1, 9), st.integers(1, 300))
@settings(deadline=None)
def test_slots_hold_all_shards(banks: int, shard: int, pages: int) -> None:
    """Every bank holds as many shards as the fullest one, whole."""
    most = max(deal(page, banks, shard)[1] for page in range(-(-pages // shard) * shard))
    assert RoundRobinShardsRule(banks, PITCH, shard).slots(pages) == most + 1


def test_rules_say_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match="30 pages do not divide into 8 equal shards"):
        HeightShardedRule(8, PITCH, 30)
    with pytest.raises(ValueError, match="a shard has at least one page; got 0"):
        RoundRobinShardsRule(8, PITCH, 0)
    with pytest.raises(ValueError, match=r"bank must lie in 0\.\.7; got 8"):
        InterleavedRule(8, PITCH).page_at(8, 0)
    with pytest.raises(ValueError, match="lies 64 bytes before the buffer"):
        InterleavedRule(8, PITCH).page_at(0, -64)


def test_a_base_table_comes_from_a_devices_rows() -> None:
    assert BaseTable.of_device([(1, 0x40000000), (0, 0), (2, 7)]).bases == (0, 0x40000000, 7)
    with pytest.raises(ValueError, match=r"banks 0\.\.1, each once; got ids \[0, 2\]"):
        BaseTable.of_device([(0, 0), (2, 0)])
    with pytest.raises(ValueError, match="at least one bank"):
        BaseTable(())
    with pytest.raises(ValueError, match="must not be negative; got -1"):
        BaseTable((0, -1))
