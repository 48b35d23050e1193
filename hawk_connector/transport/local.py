"""The transfer engine between processes of one machine: process_vm_readv(2).

One copy in the kernel, from the peer's pages into ours, on the calling thread: no connection, no thread, no waiting in
a loop.  Python's global lock is free meanwhile.  What it adds to the call:

* a peer is a :class:`~.process_name.ProcessName`, which is compared with /proc before and after each batch, so that a
  later process of the same number is never taken for it;
* batches are cut into calls of at most IOV_MAX pieces and ``_CALL_BYTES`` bytes, so that :meth:`TransferEngine.close`
  need not wait for a long one;
* a call that ends early is taken up where it ended.

The kernel lets a process read another that it may trace: of the same user, not hardened, and not forbidden by Yama.  It
knows nothing of registered ranges: *every* byte of such a process can be read, whether or not it ever heard of HAWK.
A peer that is stopped can still be read.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..config import MAX_SEGMENTS_IN_FLIGHT
from ..errors import ConfigError, TransferFailed
from .engine import EngineFactory, Segments, TransferEngine
from .process_name import PROC, ProcessName

__all__ = ["IOV_MAX", "LocalEngine", "local_factory", "local_session"]

# UIO_MAXIOV of <linux/uio.h>: vectors that one call takes.
IOV_MAX = 1024
# A few milliseconds of copying.  The kernel's own limit of one call is 2 GiB less a page.
_CALL_BYTES = 32 * 1024**2

# <linux/prctl.h>
_PR_SET_PTRACER = 0x59616D61
_PR_SET_PTRACER_ANY = 2**64 - 1

_YAMA = Path("sys/kernel/yama/ptrace_scope")

ReadCall = Callable[[int, NDArray[np.uint64], NDArray[np.uint64]], int]
"""(pid, local vectors, remote vectors), uint64 ``[n, 2]`` of address and length -> bytes read; raises OSError."""


class LocalEngine(TransferEngine):
    """Reads from processes of this machine.

    ``close`` is a fence by nature: a read is one system call that copies on the thread that made it, so after the
    last one has returned nobody is left who could write.
    """

    def __init__(
        self,
        *,
        timeout_s: float,
        max_segments_per_batch: int = MAX_SEGMENTS_IN_FLIGHT,
        readable: bool = False,
        call: ReadCall | None = None,
        proc: Path = PROC,
    ) -> None:
        """``readable``: peers are to read from this process, which under Yama's ptrace_scope 1 takes its consent.
        ``call`` and ``proc``: the system call and where proc(5) is mounted.

        Raises ConfigError where this kernel, or what confines this process, refuses the call altogether.
        """
        super().__init__(timeout_s=timeout_s, max_segments_per_batch=max_segments_per_batch)
        self._call = process_vm_readv if call is None else call
        self._proc = proc
        self._own = ProcessName.own(proc)
        self._probe()
        if readable and _yama_scope(proc) == 1:
            _admit_readers()

    @property
    def session(self) -> str:
        return str(self._own)

    def _register(self, address: int, length: int) -> None:
        pass  # the kernel keeps no list

    def _unregister(self, address: int) -> None:
        pass

    def _read_batch(self, session: str, segments: Segments) -> None:
        peer = self._peer(session)
        self._refuse_unless_alive(peer)
        local, remote = _vectors(segments.local, segments.length), _vectors(segments.remote, segments.length)
        ends = np.cumsum(segments.length)
        done, whole = 0, int(ends[-1]) if segments.count else 0
        while done < whole:
            self._refuse_if_closing()
            first = int(np.searchsorted(ends, done, side="right"))
            limit = done + _CALL_BYTES
            last = min(int(np.searchsorted(ends, limit, side="left")), first + IOV_MAX - 1, segments.count - 1)
            skip = done - int(ends[first] - segments.length[first])
            cut = max(0, int(ends[last]) - limit)
            try:
                got = self._call(
                    peer.pid,
                    _window(local[first : last + 1], skip, cut),
                    _window(remote[first : last + 1], skip, cut),
                )
            except OSError as error:
                raise self._failure(peer, segments, done, error) from None
            if got < 1:
                raise TransferFailed(f"reading from {_named(peer)} came to a stop after {done} of {whole} bytes")
            done += got
        # Another process of that number may have come between; what was read is then not the peer's.
        self._refuse_unless_alive(peer)

    def _close(self) -> None:
        pass  # no read is in flight, and nothing else could write

    def _probe(self) -> None:
        """A word of this very process, which needs no permission but the call's own."""
        word = np.zeros(2, dtype=np.int64)
        source, target = (np.array([[word[i:].ctypes.data, 8]], dtype=np.uint64) for i in (0, 1))
        try:
            self._call(os.getpid(), target, source)
        except OSError as error:
            raise ConfigError(
                f"protocol 'local' cannot be used: process_vm_readv is refused ({error.strerror})",
                fix="A container's seccomp profile must allow process_vm_readv and the kernel must have "
                "CONFIG_CROSS_MEMORY_ATTACH; else set protocol 'tcp'.",
            ) from None

    def _peer(self, session: str) -> ProcessName:
        peer = ProcessName.parse(session)
        if peer is None:
            raise TransferFailed(
                f"the session {session[:120]!r} names no process of this machine",
                fix="The prefill side may be older than protocol 'local', or keep its send buffer in GPU memory: set "
                "protocol 'tcp' or 'rdma' on this side.",
            )
        for kind, theirs, ours in (
            ("machine", peer.boot, self._own.boot),
            ("pid namespace", str(peer.namespace), str(self._own.namespace)),
        ):
            if theirs != ours:
                raise TransferFailed(
                    f"pid {peer.pid} is a process of another {kind}",
                    expected=ours,
                    got=theirs,
                    fix="Protocol 'local' reads between processes of one machine and one pid namespace (containers: "
                    "share it, as Kubernetes' shareProcessNamespace does): else set protocol 'tcp' or 'rdma'.",
                )
        return peer

    def _refuse_unless_alive(self, peer: ProcessName) -> None:
        if not peer.lives(self._proc):
            raise TransferFailed(f"{_named(peer)} is gone")

    def _failure(self, peer: ProcessName, segments: Segments, done: int, error: OSError) -> TransferFailed:
        if error.errno == errno.ESRCH:
            return TransferFailed(f"{_named(peer)} is gone (it ended while it was read)")
        if error.errno == errno.EPERM:
            return TransferFailed(
                f"reading from {_named(peer)} is not permitted", fix=_permission_hint(peer, self._proc)
            )
        ends = np.cumsum(segments.length)
        at = min(int(np.searchsorted(ends, done, side="right")), segments.count - 1)
        address, length = int(segments.remote[at]), int(segments.length[at])
        return TransferFailed(
            f"reading segment {at} of {segments.count}, {length} bytes at {address:#x}, from {_named(peer)} failed: "
            f"{error.strerror or error}",
            fix="That process has no such host memory (GPU memory cannot be read so): its plan and this side's differ."
            if error.errno == errno.EFAULT
            else None,
        )


def local_factory(*, timeout_s: float, max_segments_per_batch: int, readable: bool = False) -> EngineFactory:
    """A factory of local engines; ``readable`` as there: peers read from this process."""

    def make() -> TransferEngine:
        return LocalEngine(timeout_s=timeout_s, max_segments_per_batch=max_segments_per_batch, readable=readable)

    return make


def local_session() -> str:
    """The session under which a local engine of a peer reads from this process, whatever engine it has itself.

    To be asked for in the process that owns the memory.  Raises LocalError where /proc does not tell.
    """
    return str(ProcessName.own())


def process_vm_readv(pid: int, local: NDArray[np.uint64], remote: NDArray[np.uint64]) -> int:
    """The system call; ``local`` and ``remote``: C-contiguous uint64 ``[n, 2]``.  Raises OSError."""
    got: int = _libc.process_vm_readv(pid, local.ctypes.data, len(local), remote.ctypes.data, len(remote), 0)
    if got < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return got


# CDLL, not PyDLL: its calls let go of Python's global lock.
_libc = ctypes.CDLL(None, use_errno=True)
_libc.process_vm_readv.argtypes = (
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_ulong,
    ctypes.c_void_p,
    ctypes.c_ulong,
    ctypes.c_ulong,
)
_libc.process_vm_readv.restype = ctypes.c_ssize_t


def _vectors(address: NDArray[np.int64], length: NDArray[np.int64]) -> NDArray[np.uint64]:
    vectors = np.empty((len(address), 2), dtype=np.uint64)
    vectors[:, 0], vectors[:, 1] = address, length
    return vectors


def _window(vectors: NDArray[np.uint64], skip: int, cut: int) -> NDArray[np.uint64]:
    """A copy without the first ``skip`` bytes of the first vector and the last ``cut`` of the last."""
    window: NDArray[np.uint64] = vectors.copy()
    window[0, 0] += np.uint64(skip)
    window[0, 1] -= np.uint64(skip)
    window[-1, 1] -= np.uint64(cut)
    return window


def _named(peer: ProcessName) -> str:
    return f"the process {peer.pid} of this machine"


def _yama_scope(proc: Path) -> int | None:
    try:
        return int((proc / _YAMA).read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None  # a kernel without Yama


def _admit_readers() -> None:
    """Any process that may trace this one by user and capabilities may, as it could without Yama.

    Which process will read is not known here before it asks; the consent costs what ptrace_scope 0 costs, for this
    process alone.  That it fails changes nothing but what the reader is told.
    """
    _libc.prctl(ctypes.c_int(_PR_SET_PTRACER), ctypes.c_ulong(_PR_SET_PTRACER_ANY), 0, 0, 0)


def _permission_hint(peer: ProcessName, proc: Path) -> str:
    try:
        owner = os.stat(proc / str(peer.pid)).st_uid
    except OSError:
        owner = None
    if owner is not None and owner != os.geteuid():
        return f"It runs as user {owner}, this one as user {os.geteuid()}: run both sides as one user."
    scope = _yama_scope(proc)
    if scope == 1:
        return (
            "kernel.yama.ptrace_scope is 1: set protocol 'local' on the prefill side too, which makes it consent, or "
            "give this process CAP_SYS_PTRACE."
        )
    if scope is not None and scope > 1:
        capable = "give this process CAP_SYS_PTRACE, or " if scope == 2 else ""
        return f"kernel.yama.ptrace_scope is {scope}: {capable}set protocol 'tcp'."
    return (
        "Run both sides as one user and group, with the same capabilities, under a security module's profile that lets "
        "them trace each other; or set protocol 'tcp'."
    )
