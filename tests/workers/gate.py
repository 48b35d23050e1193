"""A slow cache: packs that read it stop at a gate, so that a test can act while one is half done."""

from __future__ import annotations

import threading

import torch

from hawk_connector.transform.reference import LayerSource
from tests.transport.waiting import eventually


class Gate:
    """Open until ``shut``; a pack that comes to a shut gate waits there."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._open.set()
        self._skip = 0
        self.waiting = False

    def shut(self, after: int = 0) -> None:
        """Shuts behind the next ``after`` looks at a layer's K or V."""
        self._skip = after
        self._open.clear()

    def open(self) -> None:
        self._open.set()

    def wait_for_a_pack(self) -> None:
        eventually(lambda: self.waiting, "a pack comes to the gate")

    def passed(self) -> None:
        if self._open.is_set():
            return
        if self._skip:
            self._skip -= 1
            return
        self.waiting = True
        assert self._open.wait(60), "the test did not open the gate"
        self.waiting = False

    def sources(self) -> type[LayerSource]:
        """A LayerSource whose tensors are looked at through this gate."""
        gate = self

        class GatedSource(LayerSource):
            def kind(self, kv: int) -> torch.Tensor:
                gate.passed()
                return super().kind(kv)

        return GatedSource
