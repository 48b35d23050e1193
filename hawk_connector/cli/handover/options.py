"""What is measured, and which systems there are."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["AGGREGATED", "SYSTEMS", "HandoverOptions", "System"]


@dataclass(frozen=True, slots=True)
class System:
    """A way from a prompt to its answer.

    ``connector``: of the pair, None where one instance does both.  ``note`` belongs beside its figures.
    """

    name: str
    connector: str | None
    note: str
    mode: str = ""
    protocol: str = ""
    npu: bool = False
    slowed: bool = False
    alone: bool = False


_SPINS = "stock NIXL: from its first transfer on each of its servers keeps one core busy, also when idle"

AGGREGATED = System("aggregated", None, "one vLLM instance; its hand-over is its first token to its second")
SYSTEMS: dict[str, System] = {
    system.name: system
    for system in (
        AGGREGATED,
        System("direct", "hawk", "HAWK between two stock instances, read by `local`", "direct", "local"),
        System(
            "nixl-slowed",
            "nixl",
            "NIXL modified: its progress thread pauses for 1,000 us, so that it leaves cores to the models",
            slowed=True,
        ),
        System("direct-tcp", "hawk", "HAWK between two stock instances, Mooncake over TCP", "direct", "tcp"),
        System("hawk", "hawk", "HAWK into the simulated NPU, read by `local`", "hawk", "local", npu=True),
        System("hawk-tcp", "hawk", "HAWK into the simulated NPU, Mooncake over TCP", "hawk", "tcp", npu=True),
        # Its threads take cores from whatever is measured beside it.
        System("nixl", "nixl", _SPINS, alone=True),
    )
}


@dataclass(frozen=True)
class HandoverOptions:
    """One run.  ``requests``: of each system at each concurrency.  ``threads``: of each server."""

    systems: tuple[str, ...]
    concurrency: tuple[int, ...]
    requests: int
    prompt_tokens: int
    new_tokens: int
    model: str
    threads: int = 1
    idle_s: float = 10.0
    seed: int = 1

    @property
    def chosen(self) -> tuple[System, ...]:
        """In the order of SYSTEMS; one instance is always there, since its answers are the right ones."""
        names = {AGGREGATED.name, *self.systems}
        return tuple(system for name, system in SYSTEMS.items() if name in names)

    def waves(self, concurrency: int) -> int:
        """How often so many requests are sent at once."""
        return -(-self.requests // concurrency)

    @property
    def prompts(self) -> int:
        """Different prompts that are needed: no two of one wave are equal, nor are neighbours."""
        return max(self.waves(count) * count for count in self.concurrency)
