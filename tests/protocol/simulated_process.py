"""A process in virtual time: its lives, its own clock, and the time in which it is stopped."""

from __future__ import annotations

from collections.abc import Callable

from tests.protocol.world import World


class Process:
    """Events of an earlier life never happen; those that come due while the process is stopped happen when it goes on.

    ``skew``: seconds of its clock for each second of the world; ``jumped``: seconds that its clock has leapt ahead.
    Clocks of different processes also start anywhere.
    """

    def __init__(self, world: World, name: str, skew: float = 0.0) -> None:
        self.world = world
        self.name = name
        self.life = 0
        self.up = False
        self.paused = False
        self.paused_s = 0.0  # all of it, in this process's clock
        self._paused_at = 0.0
        self._rate = 1.0 + skew
        self._offset = world.between(0, 1e6)
        self._waiting: list[tuple[int, Callable[[], None]]] = []
        self.on_resume: list[Callable[[], None]] = []

    def clock(self) -> float:
        return self._offset + self.world.now * self._rate

    def jump(self, seconds: float) -> None:
        self._offset += seconds
        self.paused_s += seconds
        self.world.say(self.name, f"clock leaps {seconds:.1f} s")

    def pause(self) -> None:
        if self.up and not self.paused:
            self.paused, self._paused_at = True, self.clock()
            self.world.say(self.name, "is stopped")

    def resume(self) -> None:
        if not self.paused:
            return
        self.paused = False
        self.paused_s += self.clock() - self._paused_at
        self.world.say(self.name, "goes on")
        waiting, self._waiting = self._waiting, []
        thawed, self.on_resume = self.on_resume, []
        for work in thawed:
            work()
        for life, event in waiting:
            self._happen(life, event)

    def after(self, delay: float, event: Callable[[], None]) -> None:
        life = self.life
        self.world.after(delay, lambda: self._happen(life, event))

    def soon(self, event: Callable[[], None]) -> None:
        """Now, or when it goes on."""
        self._happen(self.life, event)

    def _happen(self, life: int, event: Callable[[], None]) -> None:
        if life != self.life or not self.up:
            return
        if self.paused:
            self._waiting.append((life, event))
        else:
            event()

    def born(self) -> None:
        self.life += 1
        self.up = True
        self.world.say(self.name, f"starts life {self.life}")

    def die(self) -> None:
        self.up = False
        self.paused = False
        self._waiting, self.on_resume = [], []
        self.world.say(self.name, "is killed")
