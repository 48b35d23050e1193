"""A decode side that loads whole blocks only: a transfer's last block is offered and taken over, and not read."""

from __future__ import annotations

import pytest

from tests.protocol.table import T, Table
from tests.protocol.world import BLOCK


@pytest.mark.parametrize(
    ("first_block", "ids"),
    [
        # Parcels of two blocks: 0 1 | 2 3 | 4.  Block 4 is left out, and its parcel is all of it.
        (0, [(0, 1), (2, 3), ()]),
        # Block 0 is here already: the first parcel's first id is a placeholder.
        (1, [(0, 0), (1, 2), ()]),
    ],
)
def test_a_parcel_of_blocks_that_are_left_out_is_taken_without_a_read_of_it(
    first_block: int, ids: list[tuple[int, ...]]
) -> None:
    table = Table().pair()
    table.compute(T, 5 * BLOCK)
    table.pack()
    table.worker.load("r", table.ticket(tokens=5 * BLOCK), first_block, tuple(range(4 - first_block)), left_out=1)
    table.exchange()
    found = []
    while table.reads:
        found.append(table.reads[0].block_ids)
        table.read()
    assert found == ids
    assert [(report.request, report.ok, report.block_ids) for report in table.reports] == [
        ("r", True, tuple(range(4 - first_block)))
    ]
    table.wait(1.0)
    assert table.held() == {}


def test_a_block_left_out_of_a_parcel_leaves_the_others() -> None:
    table = Table().pair()
    table.compute(T, 4 * BLOCK)
    table.pack()
    table.worker.load("r", table.ticket(tokens=4 * BLOCK), 0, (7, 8, 9), left_out=1)
    table.exchange()
    assert [read.block_ids for read in table.reads] == [(7, 8), (9,)]


def test_other_blocks_than_the_transfers_are_refused() -> None:
    table = Table().pair()
    table.compute(T, 4 * BLOCK)
    table.worker.load("r", table.ticket(tokens=4 * BLOCK), 0, (7, 8), left_out=1)
    table.exchange()
    (report,) = table.reports
    assert not report.ok and "into 4 blocks, not 3" in report.reason
