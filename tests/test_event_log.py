"""Log lines that clients and peers have a hand in: one line each, bounded, with the ids."""

from __future__ import annotations

import logging

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hawk_connector.event_log import EventLog, escaped

LOGGER = logging.getLogger("tests.event_log")


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


def test_a_line_says_what_it_is_about(caplog: pytest.LogCaptureFixture) -> None:
    log = EventLog(LOGGER, lambda: 0.0)
    with caplog.at_level(logging.INFO):
        log.warning("read", "load failed: no route", peer="10.0.0.7:18550", transfer="0f" * 16, request="cmpl-1")
        log.info("begun", "nothing to say of it")
    assert lines(caplog) == [
        f"load failed: no route [event=read transfer={'0f' * 16} request=cmpl-1 peer=10.0.0.7:18550]",
        "nothing to say of it [event=begun]",
    ]


def test_a_request_id_cannot_forge_a_line_or_a_word(caplog: pytest.LogCaptureFixture) -> None:
    log = EventLog(LOGGER, lambda: 0.0)
    with caplog.at_level(logging.WARNING):
        log.warning("read", "bad\nERROR all is lost\x1b[31m", request='x" peer=10.0.0.9] \u202e\n')
    (line,) = lines(caplog)
    assert line == (
        r"bad\nERROR all is lost\x1b[31m [event=read "
        r"request=x\x22\x20peer\x3d10.0.0.9\x5d\x20\u202e\n]"
    )


@given(st.text(max_size=600))
def test_whatever_the_text_it_is_one_printable_bounded_line(text: str) -> None:
    line = escaped(text, 100)
    assert line.isprintable()
    assert len(line) <= 100 * len(r"\U0010ffff") + len("... (600 characters)")
    line.encode("utf-8")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(max_size=60))
def test_what_is_plain_stays(text: str) -> None:
    plain = "".join(c for c in text if c.isprintable())
    assert escaped(plain) == plain


def test_repetition_is_counted_and_not_written(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    log = EventLog(LOGGER, lambda: now[0], per_s=1.0)
    with caplog.at_level(logging.WARNING):
        for number in range(30):
            log.warning("read", f"number {number}", peer="a")
        log.warning("read", "of another peer", peer="b")
        log.warning("gone", "another event", peer="a")
        now[0] = 1.0
        log.warning("read", "later", peer="a")
    assert lines(caplog) == [
        *(f"number {number} [event=read peer=a]" for number in range(10)),
        "of another peer [event=read peer=b]",
        "another event [event=gone peer=a]",
        "later (20 more like this were not logged) [event=read peer=a]",
    ]


def test_new_names_do_not_get_round_the_limit(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    log = EventLog(LOGGER, lambda: now[0])
    with caplog.at_level(logging.WARNING):
        for number in range(5000):
            log.warning("message", "malformed", peer=f"{number:010x}")
        assert len(lines(caplog)) == 100
        now[0] = 1.0
        log.warning("message", "malformed", peer="new")
    assert lines(caplog)[100:] == ["malformed (4900 more like this were not logged) [event=message peer=new]"]


def test_an_exception_comes_with_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    log = EventLog(LOGGER, lambda: 0.0)
    with caplog.at_level(logging.ERROR):
        try:
            raise RuntimeError("inside")
        except RuntimeError:
            log.exception("turn", "it goes on")
    (record,) = caplog.records
    assert record.getMessage() == "it goes on [event=turn]"
    assert record.exc_info is not None and record.exc_info[0] is RuntimeError
