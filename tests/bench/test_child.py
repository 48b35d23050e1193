"""A child process: what it answers, what it raises, and what is said when it ends."""

from __future__ import annotations

import os
import sys

import pytest

from hawk_connector.bench.child import Child
from hawk_connector.errors import CapacityError, LocalError

pytestmark = pytest.mark.slow


class Served:
    def __init__(self, number: int) -> None:
        self.number = number

    def add(self, more: int) -> tuple[int, int]:
        return os.getpid(), self.number + more

    def ours(self) -> None:
        raise CapacityError("it is full", expected="room", got="none")

    def bug(self) -> None:
        raise KeyError("nothing there")

    def vanish(self) -> None:
        print("out of luck", file=sys.stderr, flush=True)
        os._exit(7)


def test_methods_are_called_there_and_errors_come_back() -> None:
    with Child("test", Served, 40) as child:
        assert child.call("add", 2) == (child.pid, 42)
        with pytest.raises(CapacityError) as full:
            child.call("ours")
        assert (full.value.expected, full.value.got) == ("room", "none")
        with pytest.raises(LocalError, match="KeyError: 'nothing there'"):
            child.call("bug")
        assert child.call("add", 3)[1] == 43
    with pytest.raises(ProcessLookupError):
        os.kill(child.pid, 0)


def test_a_child_that_ends_is_an_error_with_its_last_words() -> None:
    with (
        Child("test", Served, 1) as child,
        pytest.raises(LocalError, match=r"(?s)ended during vanish: got exit code 7 .*out of luck") as ended,
    ):
        child.call("vanish")
    assert "-9" in str(ended.value)
