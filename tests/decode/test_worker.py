"""The decode worker's edges: loads that were refused before they began, and what it says of itself."""

from __future__ import annotations

from hawk_connector.decode.metadata import DecodeStep, RefusedLoad
from hawk_connector.decode.worker import LoadEnd
from hawk_connector.transport.memory import MemoryFabric
from tests.workers.sides import DecodeSide
from tests.workers.source import Geometry


def test_a_refused_load_is_reported_at_once_and_once() -> None:
    side = DecodeSide(Geometry(), MemoryFabric().factory())
    try:
        side.worker.step(DecodeStep(refused=[RefusedLoad("r", (4, 5), "no_answer", "no answer")]))
        assert side.worker.take_ended() == [LoadEnd("r", False, (4, 5))]
        assert side.worker.take_ended() == []
        # Nothing was moved, so there is nothing to report of a transfer.
        assert side.worker.log.recent() == ()
    finally:
        side.close()


def test_idle_it_holds_nothing_and_shows_the_admissions_of_its_scheduler() -> None:
    side = DecodeSide(Geometry(), MemoryFabric().factory())
    try:
        assert not any(side.status().held.values())
        side.worker.step(DecodeStep(admissions=3))
        assert side.status().held["admissions"] == 3
        assert side.status().role == "decode"
    finally:
        side.close()


def test_a_configured_peer_that_is_down_is_shown_so() -> None:
    side = DecodeSide(
        Geometry(), MemoryFabric().factory(), peers=["127.0.0.1:1"], hello_deadline_s=0.5, admission_deadline_s=1.0
    )
    try:
        states = {side.status().pairings[0].state}
        while states == {"connecting"}:
            states = {side.status().pairings[0].state}
        assert states == {"down"}
        assert side.status().pairings[0].detail == "no answer within 0.5 s"
    finally:
        side.close()
