"""The watchdog, the snapshots that it sees, and the status page that is made of them."""

from __future__ import annotations

import dataclasses
from itertools import islice

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hawk_connector.metrics import TransferReport
from hawk_connector.protocol.messages import MAX_MESSAGE_BYTES, PairingStatus, Status, decode_message, encode
from hawk_connector.protocol.snapshot import TransferSnapshot, clipped, describe
from hawk_connector.protocol.status_page import SHOWN_TRANSFERS, status_page
from hawk_connector.protocol.watchdog import Watchdog

EPOCH = "e" * 32


@dataclasses.dataclass
class Thing:
    """What is watched: ``moves`` is its state, ``asked`` changes without its moving."""

    moves: int = 0
    asked: int = 0


def view(name: str, thing: Thing) -> TransferSnapshot:
    return TransferSnapshot(
        transfer=name,
        phase="packing",
        age_s=float(thing.asked),
        detail=f"{thing.moves} moves",
        deadline_in_s=thing.asked,
    )


def told(dog: Watchdog, things: dict[str, Thing]) -> list[tuple[str, float, int]]:
    return [(s.snapshot.transfer, s.snapshot.still_s, s.times) for s in dog.turn(things, view)]


def test_what_stands_still_is_told_and_again_after_twice_as_long() -> None:
    now = [0.0]
    dog = Watchdog(8.0, lambda: now[0])
    things = {"a": Thing(), "b": Thing()}
    seen: list[tuple[float, str, float, int]] = []
    for second in range(0, 101):
        now[0] = float(second)
        things["a"].asked += 1  # it renews, and is asked about
        things["b"].moves += second % 6 == 0
        seen += [(now[0], *each) for each in told(dog, things)]
    # Every transfer is looked at every 2 s. Doubling: 8, 16, 32, 64.
    assert seen == [(8.0, "a", 8.0, 1), (16.0, "a", 16.0, 2), (32.0, "a", 32.0, 3), (64.0, "a", 64.0, 4)]


def test_what_moves_again_begins_anew_and_what_has_ended_is_forgotten() -> None:
    now = [0.0]
    dog = Watchdog(4.0, lambda: now[0])
    things = {"a": Thing()}
    told(dog, things)
    now[0] = 5.0
    assert told(dog, things) == [("a", 5.0, 1)]
    things["a"].moves += 1
    now[0] = 7.0
    assert told(dog, things) == []
    now[0] = 12.0
    assert told(dog, things) == [("a", 5.0, 1)]
    del things["a"]
    now[0] = 14.0
    assert told(dog, things) == []
    things["a"] = Thing(moves=1)  # another one under the same name, in the same state
    now[0] = 16.0
    assert told(dog, things) == []
    now[0] = 18.0
    assert told(dog, things) == []
    now[0] = 20.0
    assert told(dog, things) == [("a", 4.0, 1)]


def test_a_turn_is_bounded_and_a_round_takes_in_all() -> None:
    now = [0.0]
    dog = Watchdog(4.0, lambda: now[0])
    looks: list[str] = []

    def counting(name: str, thing: Thing) -> TransferSnapshot:
        looks.append(name)
        return view(name, thing)

    things = {f"{number}": Thing() for number in range(250)}
    sizes = []
    for _ in range(6):
        before = len(looks)
        dog.turn(things, counting)
        sizes.append(len(looks) - before)
    assert sizes == [64, 64, 64, 58, 0, 0]
    assert sorted(looks) == sorted(things)


def test_how_long_it_has_stood_still_is_shown_where_it_is_known() -> None:
    now = [10.0]
    dog = Watchdog(4.0, lambda: now[0])
    thing = Thing()
    assert dog.timed("a", view("a", thing)).still_s == 0.0
    told(dog, {"a": thing})
    now[0] = 13.0
    assert dog.timed("a", view("a", thing)).still_s == 3.0
    thing.moves += 1
    assert dog.timed("a", view("a", thing)).still_s == 0.0


def test_a_snapshot_in_words() -> None:
    snapshot = TransferSnapshot(
        transfer="t",
        phase="queued",
        age_s=12.34,
        waits_for="space in the send buffer",
        detail="64 of 64 tokens computed",
        parcels=3,
        parcels_done=1,
        deadline="buffer_wait_s",
        deadline_in_s=41.0,
    )
    assert describe(snapshot) == (
        "queued, begun 12.3 s ago, waits for space in the send buffer, 1 of 3 parcels done, "
        "64 of 64 tokens computed, buffer_wait_s ends it in 41.0 s"
    )


def page(transfers: int = 0, reports: int = 0, pairings: int = 0, text: str = "x") -> Status:
    made = (
        TransferSnapshot(transfer=f"{n}", phase="p", age_s=1.0, detail=clipped(text, 1024)) for n in range(transfers)
    )
    return status_page(
        epoch=EPOCH,
        role="decode",
        held={"loads": transfers},
        pairings=[PairingStatus(f"{n}", "paired", clipped(text, 1024)) for n in range(pairings)],
        transfers=made,
        live=transfers,
        reports=[
            TransferReport(
                transfer_id=f"{n}",
                request_id=text,
                outcome="failed",
                reason=text,
                bank_fill=tuple((chip, bank, 10**9) for chip in range(32) for bank in range(12)),
            )
            for n in range(reports)
        ],
        unready=[text] * 1000,
    )


@settings(max_examples=20, deadline=None)
@given(
    st.integers(0, 2000),
    st.integers(0, 600),
    st.integers(0, 600),
    st.sampled_from(["short", "x" * 70_000, "\U0001f600" * 2000, "\ud800 alone", "\n" * 3000]),
)
def test_a_status_always_fits_a_message_and_counts_what_is_left_out(
    transfers: int, reports: int, pairings: int, text: str
) -> None:
    status = page(transfers, reports, pairings, text)
    data = encode(status)
    assert len(data) <= MAX_MESSAGE_BYTES
    back = decode_message(data, (Status,))
    assert isinstance(back, Status)
    assert len(back.transfers) + back.left_out.get("transfers", 0) == transfers
    assert len(back.reports) + back.left_out.get("reports", 0) == reports
    assert len(back.pairings) + back.left_out.get("pairings", 0) == pairings
    # The oldest transfers and the newest reports are what people look for.
    assert [t.transfer for t in back.transfers] == [f"{n}" for n in range(len(back.transfers))]
    assert [r.transfer_id for r in back.reports] == [f"{n}" for n in range(reports - len(back.reports), reports)]


def test_a_status_of_thousands_is_made_of_a_few() -> None:
    made: list[int] = []

    def transfers() -> object:
        for number in range(100_000):
            made.append(number)
            yield TransferSnapshot(transfer=f"{number}", phase="p", age_s=1.0)

    status = status_page(
        epoch=EPOCH,
        role="prefill",
        held={},
        pairings=[],
        transfers=transfers(),
        live=100_000,
        reports=[],  # type: ignore[arg-type]
    )
    assert len(made) == len(status.transfers) == SHOWN_TRANSFERS
    assert status.left_out == {"transfers": 100_000 - SHOWN_TRANSFERS}


def test_an_ordinary_status_leaves_nothing_out() -> None:
    status = page(transfers=100, reports=40, pairings=64)
    assert status.left_out == {}
    assert list(islice((t.transfer for t in status.transfers), 3)) == ["0", "1", "2"]


@pytest.mark.parametrize("limit", [4, 256])
def test_clipped_texts_are_valid_and_short(limit: int) -> None:
    for text in ("", "abc", "x" * 1000, "\ud800" * 300):
        short = clipped(text, limit)
        assert len(short) <= limit
        msgspec.msgpack.encode(short)
