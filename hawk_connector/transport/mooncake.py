"""The transfer engine over Mooncake: RDMA where there is an RDMA device, TCP elsewhere.

What Mooncake (0.3.13) does not do itself and this module or its base class adds:

* it falls back from RDMA to TCP without a word: here ``rdma`` without a device is an error;
* over TCP it reads into unregistered memory: the base class checks every local range;
* a failed read may still write, and a peer that restarted on its old port can never be read again through
  the same object: both are mended by dropping the object, so there is one engine per peer epoch;
* dropping the object holds Python's global lock until its hand-shake thread next looks up, up to a second
  in which no other Python thread runs: :func:`shorten_accept_wait` makes that 50 ms.

What nothing here can change: Mooncake listens on every interface, whatever host it is given, and serves
registered memory to whoever connects. CURVE guards the side channel, not the KV; a firewall must guard the
ports of Mooncake (15000-17000, or MC_MIN_RPC_PORT..MC_MAX_RPC_PORT).
"""

from __future__ import annotations

import importlib
import os
import socket
import stat
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from ..address import bracketed
from ..config import MAX_SEGMENTS_IN_FLIGHT
from ..errors import ConfigError, LocalError, TransferFailed
from .engine import EngineFactory, Segments, TransferEngine, describe_range
from .pace import Pace

__all__ = ["MooncakeEngine", "mooncake_factory", "shorten_accept_wait"]

RDMA_DEVICES = Path("/sys/class/infiniband")

_ACCEPT_WAIT_US = 50_000

_REGISTER_HINTS = {
    "tcp": "Mooncake refuses a range that overlaps one it already has.",
    "rdma": "Usual causes: the locked-memory limit (ulimit -l unlimited, or CAP_IPC_LOCK in a container), "
    "an RDMA device without its user-space driver (ibverbs-providers), device memory without peer-memory "
    "support (nvidia-peermem, hawk_peermem).",
}


class MooncakeEngine(TransferEngine):
    """One ``mooncake.engine.TransferEngine``, in peer-to-peer mode (no metadata server)."""

    def __init__(
        self,
        host: str,
        *,
        protocol: Literal["tcp", "rdma"],
        timeout_s: int,
        max_segments_per_batch: int = MAX_SEGMENTS_IN_FLIGHT,
        rdma_devices: Path = RDMA_DEVICES,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """``host``: the name or address under which peers reach this process.  ``clock``, ``sleep``: seconds.

        Raises ConfigError when Mooncake is not installed, cannot start, or ``rdma`` has no device.
        """
        super().__init__(timeout_s=timeout_s, max_segments_per_batch=max_segments_per_batch)
        self._protocol = protocol
        self._clock = clock
        self._sleep = sleep
        self._pace = Pace()
        _prepare_environment(protocol, timeout_s, rdma_devices)
        self._engine: Any = _load_mooncake().TransferEngine()
        if self._engine.initialize(bracketed(host), "P2PHANDSHAKE", protocol, "") != 0:
            raise ConfigError(
                f"Mooncake could not start on host {host!r} over {protocol}",
                fix="Check that the host (advertise_host, else side_channel_host) is an address of this "
                "machine, and set MC_LOG_LEVEL=INFO to see Mooncake's own reason.",
            )
        port = self._engine.get_rpc_port()
        shorten_accept_wait(port)
        self._session = f"{bracketed(host)}:{port}"

    @property
    def session(self) -> str:
        return self._session

    def _register(self, address: int, length: int) -> None:
        code = self._engine.register_memory(address, length)
        if code != 0:
            raise LocalError(
                f"Mooncake could not register {describe_range(address, length)} over {self._protocol}",
                expected="code 0",
                got=f"code {code}",
                fix=_REGISTER_HINTS[self._protocol],
            )

    def _unregister(self, address: int) -> None:
        code = self._engine.unregister_memory(address)
        if code != 0:
            raise LocalError(
                f"Mooncake could not unregister the memory at {address:#x}",
                expected="code 0",
                got=f"code {code}",
            )

    def _read_batch(self, session: str, segments: Segments) -> None:
        # The array calls of later versions would save about 50 us of 20 ms for 1024 segments.
        start = self._clock()
        batch = self._engine.batch_transfer_async_read(
            session, segments.local.tolist(), segments.remote.tolist(), segments.length.tolist()
        )
        # Mooncake's wait releases the global lock but turns in a loop until the batch ends: on a machine with few cores
        # it takes one from who sends.  It is called when the batch is nearly there.
        if batch != 0 and (pause := self._pace.sleep_s(segments)) > 0:
            self._sleep(pause)
        code = self._engine.get_batch_transfer_status([batch]) if batch != 0 else -1
        if code != 0:
            raise TransferFailed(
                f"reading {segments.count} segments ({segments.nbytes} bytes) from {session} failed, or gave "
                f"no sign for {self._timeout_s:g} s (Mooncake code {code})"
            )
        self._pace.took(segments, self._clock() - start)

    def _close(self) -> None:
        # Nothing short of destroying the object stops late writes; unregistering does not.
        self._engine = None


def mooncake_factory(
    host: str, *, protocol: Literal["tcp", "rdma"], timeout_s: int, max_segments_per_batch: int
) -> EngineFactory:
    """A factory of engines that differ in nothing but their ports."""

    def make() -> TransferEngine:
        return MooncakeEngine(
            host, protocol=protocol, timeout_s=timeout_s, max_segments_per_batch=max_segments_per_batch
        )

    return make


def shorten_accept_wait(port: int) -> bool:
    """Make this process's thread that accepts on ``port`` look up every 50 ms instead of every second.

    Mooncake's destructor joins that thread while it holds Python's global lock. The wait is the receive
    time-out of the listening socket, which any holder of the descriptor may set. Returns whether the socket
    was found; if not, only the stall at close is longer.
    """
    for name in os.listdir("/proc/self/fd"):
        try:
            if not stat.S_ISSOCK(os.stat(f"/proc/self/fd/{name}").st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as copy:
                if copy.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                listens = copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                if listens and copy.getsockname()[1] == port:
                    wait = struct.pack("ll", 0, _ACCEPT_WAIT_US)
                    copy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, wait)
                    return True
        except OSError:
            continue  # another thread closed that descriptor meanwhile
    return False


def _prepare_environment(protocol: str, timeout_s: int, rdma_devices: Path) -> None:
    """Mooncake takes these only from the environment, and reads them when an engine starts."""
    if protocol == "tcp":
        # Without it Mooncake takes any RDMA device that it finds, whatever it is told.
        os.environ["MC_FORCE_TCP"] = "1"
    else:
        if os.environ.get("MC_FORCE_TCP"):
            raise ConfigError(
                "protocol 'rdma' with MC_FORCE_TCP in the environment would run over TCP",
                fix="Unset MC_FORCE_TCP, or set protocol 'tcp'.",
            )
        if not rdma_devices.is_dir() or not any(rdma_devices.iterdir()):
            raise ConfigError(
                "protocol 'rdma' but this machine has no RDMA device",
                expected=f"at least one entry in {rdma_devices}",
                got="none",
                fix="Load the device's driver (ibv_devices must list it), or set protocol 'tcp'.",
            )
    os.environ["MC_TRANSFER_TIMEOUT"] = str(timeout_s)
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")


def _load_mooncake() -> Any:
    try:
        return importlib.import_module("mooncake.engine")
    except ModuleNotFoundError:
        raise ConfigError(
            "Mooncake is not installed",
            fix="Install one of its wheels: mooncake-transfer-engine-non-cuda (no GPU), "
            "mooncake-transfer-engine (CUDA 12), mooncake-transfer-engine-cuda13 (CUDA 13).",
        ) from None
    except ImportError as error:
        raise ConfigError(
            f"Mooncake cannot be loaded: {error}",
            fix="It needs the system libraries libibverbs1, libnuma1 and libcurl4, and its CUDA wheels the "
            "NVIDIA driver's libcuda.so.1.",
        ) from error
