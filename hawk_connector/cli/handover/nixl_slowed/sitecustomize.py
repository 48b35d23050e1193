"""Slows NIXL's progress thread down; Python runs this at the start of a process that has this directory on PYTHONPATH.

**It modifies the baseline.**  NIXL's Python API fixes the thread's pause at 0, and vLLM has no option for it: each
server then keeps one core busy from its first transfer on, though nothing moves.  Where there are no more cores than
servers that takes the time from the models themselves.  With a pause of DELAY_US it does not.
"""

from typing import Any

import nixl_cu12._bindings as _bindings  # type: ignore[import-not-found,unused-ignore]

DELAY_US = 1000

_Config: Any = _bindings.nixlAgentConfig


class _Slowed(_Config):
    @property
    def pthrDelay(self) -> int:  # the name is NIXL's
        return int(_Config.pthrDelay.__get__(self))

    @pthrDelay.setter
    def pthrDelay(self, microseconds: int) -> None:
        _Config.pthrDelay.__set__(self, max(DELAY_US, microseconds))


_bindings.nixlAgentConfig = _Slowed
