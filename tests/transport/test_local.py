"""The local engine between real processes: what it reads, and what it says when it cannot."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hawk_connector.errors import ConfigError, LocalError, TransferFailed
from hawk_connector.transport.engine import Segments
from hawk_connector.transport.local import LocalEngine, local_factory, local_session, process_vm_readv
from hawk_connector.transport.process_name import ProcessName, start_time
from tests.transport.local_peer import content
from tests.transport.peer import ROOT, Peer

pytestmark = pytest.mark.slow

MIB = 1024 * 1024
NOBODY = 65534


def serving(nbytes: int, *options: str) -> Peer:
    """A process with a region of ``nbytes``."""
    return Peer("tests.transport.local_peer", "serve", str(nbytes), *options)


@pytest.fixture(scope="module")
def peer() -> Iterator[Peer]:
    peer = serving(80 * MIB)
    yield peer
    peer.end()


@pytest.fixture
def mortal() -> Iterator[Peer]:
    """A peer that the test may kill."""
    peer = serving(80 * MIB)
    yield peer
    peer.end()


def columns(*values: object) -> Segments:
    return Segments(*(np.array(value, dtype=np.int64).reshape(-1) for value in values))


def engine_with(nbytes: int, **options: object) -> tuple[LocalEngine, np.ndarray]:
    engine = LocalEngine(timeout_s=5, **options)  # type: ignore[arg-type]
    target = np.zeros(nbytes, dtype=np.uint8)
    engine.register(target.ctypes.data, nbytes)
    return engine, target


def test_reads_what_the_peer_has(peer: Peer) -> None:
    """80 MiB are several calls."""
    engine, target = engine_with(80 * MIB)
    engine.read(peer.session, columns(peer.address, target.ctypes.data, 80 * MIB))
    assert np.array_equal(target, content(0, 80 * MIB))
    engine.close()
    with pytest.raises(TransferFailed, match="was closed"):
        engine.read(peer.session, columns(peer.address, target.ctypes.data, 1))


def test_scattered_pieces_end_where_they_belong(peer: Peer) -> None:
    """More of them than one call takes vectors, also in one batch; sizes that no page divides."""
    rng = np.random.default_rng(3)
    count, size = 3000, 1217
    froms, tos = rng.integers(0, 80 * MIB - size, count), rng.permutation(count) * size
    for by_batches in (True, False):
        engine, target = engine_with(count * size)
        segments = columns(peer.address + froms, target.ctypes.data + tos, np.full(count, size))
        if by_batches:
            engine.read(peer.session, segments)
        else:
            engine._read_batch(peer.session, segments)
        for start, end in zip(froms.tolist(), tos.tolist(), strict=True):
            assert np.array_equal(target[end : end + size], content(start, size))


def test_a_stopped_peer_can_be_read(mortal: Peer) -> None:
    mortal.process.send_signal(signal.SIGSTOP)
    _, status = os.waitpid(mortal.process.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    engine, target = engine_with(MIB)
    engine.read(mortal.session, columns(mortal.address + 5, target.ctypes.data, MIB))
    assert np.array_equal(target, content(5, MIB))


def test_a_peer_that_is_killed_during_a_read(mortal: Peer) -> None:
    calls = []

    def call_and_kill(pid: int, local: np.ndarray, remote: np.ndarray) -> int:
        got = process_vm_readv(pid, local, remote)
        if not calls:
            mortal.process.kill()
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # dead, and still listed as a process
        calls.append(got)
        return got

    engine, target = engine_with(80 * MIB)
    engine._call = call_and_kill
    with pytest.raises(TransferFailed, match=f"process {mortal.process.pid} .* is gone"):
        engine.read(mortal.session, columns(mortal.address, target.ctypes.data, 80 * MIB))
    (first,) = calls  # the second raised ESRCH
    assert 0 < first < 80 * MIB
    assert np.array_equal(target[:first], content(0, first))
    assert not target[first:].any()
    mortal.process.wait(10)
    with pytest.raises(TransferFailed, match="is gone"):
        engine.read(mortal.session, columns(mortal.address, target.ctypes.data, 1))


def test_close_ends_a_long_read_between_two_calls(peer: Peer) -> None:
    calls = []

    def call_and_close(pid: int, local: np.ndarray, remote: np.ndarray) -> int:
        if not calls:
            closer.start()
            while not engine._closing:
                closer.join(0.001)
        calls.append(pid)
        return process_vm_readv(pid, local, remote)

    engine, target = engine_with(80 * MIB)
    closer = threading.Thread(target=engine.close)
    engine._call = call_and_close
    with pytest.raises(TransferFailed, match="was closed"):
        engine.read(peer.session, columns(peer.address, target.ctypes.data, 80 * MIB))
    closer.join(10)
    assert engine.closed
    assert len(calls) == 1


def test_a_later_process_of_the_same_number_is_not_read(peer: Peer) -> None:
    name = ProcessName.parse(peer.session)
    assert name is not None
    engine, target = engine_with(64)
    with pytest.raises(TransferFailed, match="is gone"):
        engine.read(str(replace(name, started=name.started - 1)), columns(peer.address, target.ctypes.data, 64))
    assert not target.any()


def test_a_number_that_passes_on_during_a_read_fails_it(tmp_path: Path) -> None:
    """By a made-up /proc, in which the number of this process is given to a later one."""
    proc = tmp_path
    (proc / "sys/kernel/random").mkdir(parents=True)
    (proc / "sys/kernel/random/boot_id").write_text("0f0f0f0f-0000-4000-8000-000000000001\n")
    (proc / "self/ns").mkdir(parents=True)
    (proc / "self/ns/pid").write_text("")
    entry = proc / str(os.getpid())
    entry.mkdir()

    def started(ticks: int) -> None:
        (entry / "stat").write_text(f"{os.getpid()} (a) b (c)) S {' '.join('7' * 18)} {ticks} 1 2\n")

    started(4711)
    engine, target = engine_with(64, proc=proc)
    source = content(0, 64)
    assert engine.session.split(":")[:3] == ["local", str(os.getpid()), "4711"]
    engine.read(engine.session, columns(source.ctypes.data, target.ctypes.data, 64))

    def call_and_pass_on(pid: int, local: np.ndarray, remote: np.ndarray) -> int:
        started(4712)
        return process_vm_readv(pid, local, remote)

    engine._call = call_and_pass_on
    with pytest.raises(TransferFailed, match="is gone"):
        engine.read(engine.session, columns(source.ctypes.data, target.ctypes.data, 64))


def test_memory_that_the_peer_does_not_have(peer: Peer) -> None:
    engine, target = engine_with(3 * 4096)
    segments = columns(
        [peer.address, 4096, peer.address], target.ctypes.data + np.array([0, 4096, 8192]), [4096, 4096, 4096]
    )
    with pytest.raises(TransferFailed, match=r"segment 1 of 3, 4096 bytes at 0x1000, .* Bad address.*GPU memory"):
        engine.read(peer.session, segments)
    with pytest.raises(TransferFailed, match="Bad address"):
        engine.read(peer.session, columns(-4096, target.ctypes.data, 64))


def test_unregistered_local_memory_is_refused(peer: Peer) -> None:
    engine, target = engine_with(4096)
    engine.unregister(target.ctypes.data)
    with pytest.raises(LocalError, match="registered local memory"):
        engine.read(peer.session, columns(peer.address, target.ctypes.data, 4096))
    assert not target.any()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"boot": "0f0f0f0f-0000-4000-8000-000000000001"}, ["another machine", "0f0f0f0f", "'tcp' or 'rdma'"]),
        ({"namespace": 1}, ["another pid namespace", "got 1", "shareProcessNamespace"]),
    ],
)
def test_processes_of_another_machine_are_refused(change: dict[str, object], words: list[str]) -> None:
    engine, target = engine_with(64)
    other = replace(ProcessName.own(), **change)  # type: ignore[arg-type]
    with pytest.raises(TransferFailed) as caught:
        engine.read(str(other), columns(target.ctypes.data, target.ctypes.data, 64))
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    "session",
    ["", "127.0.0.1:15001", "local:1:2:3:4", "local:-1:2:0f0f0f0f-0000-4000-8000-000000000001:4", "x" * 500]
    + [f"local:{pid}:2:0f0f0f0f-0000-4000-8000-000000000001:4" for pid in (0, 2**31, 2**32 + 1)],
)
def test_what_is_no_name_of_a_process_is_refused(session: str) -> None:
    engine, target = engine_with(64)
    with pytest.raises(TransferFailed, match="names no process"):
        engine.read(session, columns(target.ctypes.data, target.ctypes.data, 64))


def test_names_are_what_the_system_says() -> None:
    """Start times as `ps` computes them, boot and namespace as the kernel prints them."""
    own = ProcessName.own()
    assert str(own) == local_session() == local_factory(timeout_s=5, max_segments_per_batch=7)().session
    assert ProcessName.parse(str(own)) == own
    assert own.pid == os.getpid()
    assert own.boot == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert f"pid:[{own.namespace}]" == os.readlink("/proc/self/ns/pid")
    assert own.lives()
    with subprocess.Popen(["sleep", "60"]) as other:
        try:
            seconds = int(subprocess.run(["ps", "-o", "etimes=", "-p", str(other.pid)], capture_output=True).stdout)
            uptime = float(Path("/proc/uptime").read_text().split()[0])
            ticks = start_time(other.pid)
            assert ticks is not None
            assert abs(uptime - ticks / os.sysconf("SC_CLK_TCK") - seconds) < 5
        finally:
            other.kill()
    assert start_time(other.pid) is None


def test_a_process_of_another_user_is_not_read() -> None:
    if os.geteuid() == 0:
        source = content(0, 4096)
        command = ["read", local_session(), str(source.ctypes.data), "64", str(NOBODY)]
        reader = subprocess.run(
            [sys.executable, "-m", "tests.transport.local_peer", *command],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert reader.returncode == 0, reader.stderr
        assert f"process {os.getpid()} of this machine is not permitted" in reader.stdout
        assert "It runs as user 0, this one as user 65534" in reader.stdout
        return
    started = start_time(1)
    if started is None or os.stat("/proc/1").st_uid == os.geteuid():
        pytest.skip("no process of another user is seen here")
    engine, target = engine_with(64)
    with pytest.raises(TransferFailed, match=r"not permitted.*run both sides as one user"):
        engine.read(str(replace(ProcessName.own(), pid=1, started=started)), columns(1 << 20, target.ctypes.data, 64))


@pytest.mark.parametrize(
    ("scope", "words"),
    [
        (None, "security module"),
        ("1", "protocol 'local' on the prefill side"),
        ("2", "scope is 2: give"),
        ("3", "scope is 3: set protocol 'tcp'"),
    ],
)
def test_what_to_do_where_reading_is_not_permitted(scope: str | None, words: str, tmp_path: Path) -> None:
    """The system call is a stand-in here; what yama says comes from a made-up /proc."""
    proc = tmp_path / "proc"
    proc.mkdir()
    for name in ("self", str(os.getpid())):
        (proc / name).symlink_to(Path("/proc") / name)
    (proc / "sys/kernel/yama").mkdir(parents=True)
    (proc / "sys/kernel/random").symlink_to("/proc/sys/kernel/random")
    if scope is not None:
        (proc / "sys/kernel/yama/ptrace_scope").write_text(f"{scope}\n")

    def refuse(pid: int, local: np.ndarray, remote: np.ndarray) -> int:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    engine, target = engine_with(64, proc=proc)
    engine._call = refuse
    with pytest.raises(TransferFailed, match="not permitted") as caught:
        engine.read(local_session(), columns(1 << 20, target.ctypes.data, 64))
    assert words in str(caught.value)


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EPERM])
def test_a_kernel_without_the_call_is_a_matter_of_configuration(code: int) -> None:
    def refuse(pid: int, local: np.ndarray, remote: np.ndarray) -> int:
        raise OSError(code, os.strerror(code))

    with pytest.raises(ConfigError, match=f"{os.strerror(code)}.*seccomp"):
        LocalEngine(timeout_s=5, call=refuse)


@pytest.mark.parametrize("readable", [True, False])
def test_consent_under_yama(readable: bool) -> None:
    """A reader that is no ancestor of the peer, where the kernel asks for the peer's consent."""
    scope = Path("/proc/sys/kernel/yama/ptrace_scope")
    if not scope.exists() or scope.read_text().strip() != "1" or os.geteuid() == 0:
        pytest.skip("needs a kernel with yama's ptrace_scope 1, and a user without CAP_SYS_PTRACE")
    peer = serving(4096, *(["readable"] if readable else []))
    try:
        reader = subprocess.run(
            [sys.executable, "-m", "tests.transport.local_peer", "read", peer.session, str(peer.address), "64"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
        )
        expected = str(int(content(0, 64).sum(dtype=np.int64))) if readable else "ptrace_scope is 1"
        assert expected in reader.stdout
    finally:
        peer.end()


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=40), st.integers(0, 2**32 - 1))
def test_calls_that_end_early_are_taken_up_where_they_ended(lengths: list[int], seed: int) -> None:
    """The kernel may stop at any byte; the stand-in does, and copies by a way of its own."""
    rng = np.random.default_rng(seed)
    size = sum(lengths)
    source = content(0, size)
    starts = np.cumsum([0, *lengths[:-1]])
    order = rng.permutation(len(lengths))
    tos = np.empty(len(lengths), dtype=np.int64)
    tos[order] = np.cumsum([0, *np.array(lengths)[order][:-1].tolist()])

    def stutter(pid: int, local: np.ndarray, remote: np.ndarray) -> int:
        assert local[:, 1].tolist() == remote[:, 1].tolist()
        assert (local[:, 1] > 0).all()
        left = stop = int(rng.integers(1, int(local[:, 1].sum()) + 1))
        for (to, length), (origin, _) in zip(local.tolist(), remote.tolist(), strict=True):
            take = min(length, left)
            at, start = to - target.ctypes.data, origin - source.ctypes.data
            target[at : at + take] = source[start : start + take]
            left -= take
        return stop

    engine, target = engine_with(size)
    engine._call = stutter
    segments = columns(source.ctypes.data + starts, target.ctypes.data + tos, lengths)
    engine.read(engine.session, segments)
    for start, to, length in zip(starts.tolist(), tos.tolist(), lengths, strict=True):
        assert np.array_equal(target[to : to + length], content(start, length))


def test_a_call_that_reads_nothing_is_not_repeated_for_ever(peer: Peer) -> None:
    engine, target = engine_with(64)
    engine._call = lambda pid, local, remote: 0
    with pytest.raises(TransferFailed, match="stop after 0 of 64 bytes"):
        engine.read(peer.session, columns(peer.address, target.ctypes.data, 64))


@pytest.mark.slow
def test_one_segment_of_more_than_the_kernel_takes_at_once() -> None:
    """Past 2 GiB, out of this very process.  Each page tells its number."""
    source = np.arange(2**19 + 5, dtype=np.uint32).repeat(1024)
    target = np.zeros_like(source)
    engine = LocalEngine(timeout_s=5)
    engine.register(target.ctypes.data, target.nbytes)
    engine.read(engine.session, columns(source.ctypes.data, target.ctypes.data, target.nbytes))
    assert target.nbytes > 2**31
    assert np.array_equal(target, source)
