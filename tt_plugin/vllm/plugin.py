"""vLLM's platform plugin: offers the simulated NPU, but only where it is asked for.

One environment serves both sides: without the variable vLLM keeps its own platform, so the prefill side needs nothing.
"""

from __future__ import annotations

import os

from hawk_connector.errors import ConfigError

__all__ = ["NPU_VARIABLE", "RefusedNpu", "register"]

NPU_VARIABLE = "HAWK_NPU"
_SIMULATED = "simulated"


def register() -> str | None:
    """The platform class for ``HAWK_NPU``: None when unset or empty, the simulated NPU for ``simulated``.

    vLLM swallows what a platform plugin raises and goes on without it, which would start a server on another device
    than was asked for.  So any other value gives a class that refuses when vLLM makes the platform.
    """
    wanted = os.environ.get(NPU_VARIABLE, "").strip()
    if not wanted:
        return None
    if wanted == _SIMULATED:
        return "tt_plugin.vllm.platform.SimulatedNpuPlatform"
    return "tt_plugin.vllm.plugin.RefusedNpu"


class RefusedNpu:
    """What stands in for a platform that does not exist: raises ConfigError when it is made."""

    def __init__(self) -> None:
        wanted = os.environ.get(NPU_VARIABLE, "").strip()
        fix = "Set it to 'simulated', or unset it for vLLM's own device."
        if wanted == "silicon":
            fix = (
                "A real device is served by Tenstorrent's vLLM plugin with HAWK's silicon overlay, which this "
                "version does not have. " + fix
            )
        raise ConfigError(f"{NPU_VARIABLE} names no NPU", expected=f"'{_SIMULATED}'", got=repr(wanted), fix=fix)
