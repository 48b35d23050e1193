"""vLLM's platform plugin: offers an NPU, but only where it is asked for.

One environment serves both sides: without the variable vLLM keeps its own platform, so the prefill side needs nothing.
"""

from __future__ import annotations

import logging
import os
from importlib.metadata import entry_points
from importlib.util import find_spec

from hawk_connector.errors import ConfigError

__all__ = ["NPU_VARIABLE", "RefusedNpu", "register"]

_log = logging.getLogger(__name__)

NPU_VARIABLE = "HAWK_NPU"
_SIMULATED = "simulated"
_SILICON = "silicon"

# The names under which the plugins are installed: Tenstorrent's platform, its models, HAWK's connector and platform.
_THEIR_PLATFORM = "tt"
_PLUGINS = "hawk,hawk_npu,tt_model_registry"


def register() -> str | None:
    """The platform class for ``HAWK_NPU``: None when unset or empty, else what ``simulated`` or ``silicon`` names.

    vLLM swallows what a platform plugin raises and goes on without it, which would start a server on another device
    than was asked for.  So anything that cannot be had gives a class that refuses when vLLM makes the platform.
    """
    wanted = _wanted()
    if not wanted:
        return None
    if wanted == _SIMULATED:
        return "tt_plugin.vllm.platform.SimulatedNpuPlatform"
    obstacle = _obstacle(wanted)
    if obstacle is None:
        return "tt_plugin.vllm.silicon.platform.SiliconPlatform"
    # Beside a second platform vLLM stops with a text of its own before it makes any.
    _log.error("%s", obstacle)
    return "tt_plugin.vllm.plugin.RefusedNpu"


class RefusedNpu:
    """What stands in for a platform that cannot be had: raises ConfigError when it is made."""

    def __init__(self) -> None:
        obstacle = _obstacle(_wanted())
        if obstacle is not None:
            raise obstacle


def _obstacle(wanted: str) -> ConfigError | None:
    """Why the NPU ``wanted`` cannot be had, or None."""
    if wanted != _SILICON:
        return ConfigError(
            f"{NPU_VARIABLE} names no NPU",
            expected=f"'{_SIMULATED}' or '{_SILICON}'",
            got=repr(wanted),
            fix=f"Set it to '{_SIMULATED}' or '{_SILICON}', or unset it for vLLM's own device.",
        )
    missing = [name for name in ("vllm_tt_plugin", "ttnn") if find_spec(name) is None]
    if missing:
        return ConfigError(
            f"{NPU_VARIABLE}={_SILICON} needs Tenstorrent's vLLM plugin",
            expected="the Python packages vllm_tt_plugin and ttnn",
            got=f"no {' and no '.join(missing)}",
            fix="Install tt-metal (or the ttnn wheel), and from https://github.com/tenstorrent/vllm-tt-plugin the "
            "plugin with the vLLM that it names, in this environment; docs/tenstorrent.md has the steps.",
        )
    if _two_platforms():
        return ConfigError(
            "two platform plugins would serve the same device",
            expected=f"VLLM_PLUGINS={_PLUGINS}",
            got=f"VLLM_PLUGINS={os.environ.get('VLLM_PLUGINS', '(unset: all plugins)')}",
            fix=f"Set it: HAWK's platform is Tenstorrent's with a KV connector, and {_THEIR_PLATFORM!r} must not be "
            "loaded beside it.",
        )
    return None


def _wanted() -> str:
    return os.environ.get(NPU_VARIABLE, "").strip()


def _two_platforms() -> bool:
    """Whether vLLM would also load Tenstorrent's own platform; it refuses two, without saying what to do."""
    chosen = os.environ.get("VLLM_PLUGINS")
    if chosen is not None and _THEIR_PLATFORM not in chosen.split(","):
        return False
    return any(entry.name == _THEIR_PLATFORM for entry in entry_points(group="vllm.platform_plugins"))
