"""Mooncake itself, over loopback TCP, between this process and another."""

from __future__ import annotations

import os
import signal
import socket
import stat
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from hawk_connector.errors import ConfigError, LocalError, TransferFailed
from hawk_connector.transport.engine import Segments
from hawk_connector.transport.mooncake import MooncakeEngine
from tests.transport.mooncake_peer import content
from tests.transport.peer import Peer
from tests.transport.waiting import eventually

pytestmark = pytest.mark.slow

MIB = 1024 * 1024


def serving(nbytes: int) -> Peer:
    """A process with a region of ``nbytes``."""
    return Peer("tests.transport.mooncake_peer", str(nbytes), quiet=True)


@pytest.fixture(scope="module")
def peer() -> Iterator[Peer]:
    peer = serving(8 * MIB)
    yield peer
    peer.end()


@pytest.fixture
def engine() -> Iterator[MooncakeEngine]:
    engine = MooncakeEngine("127.0.0.1", protocol="tcp", timeout_s=5)
    yield engine
    engine.close()


def buffer(engine: MooncakeEngine, nbytes: int) -> np.ndarray:
    array = np.zeros(nbytes, dtype=np.uint8)
    engine.register(array.ctypes.data, nbytes)
    return array


def piece(peer: Peer, target: np.ndarray, nbytes: int) -> Segments:
    columns = (peer.address, target.ctypes.data, nbytes)
    return Segments(*(np.array([value], dtype=np.int64) for value in columns))


def test_reads_what_the_peer_has(peer: Peer, engine: MooncakeEngine) -> None:
    target = buffer(engine, 8 * MIB)
    engine.read(peer.session, piece(peer, target, 8 * MIB))
    assert np.array_equal(target, content(0, 8 * MIB))


def test_more_segments_than_mooncake_queues(peer: Peer, engine: MooncakeEngine) -> None:
    rng = np.random.default_rng(1)
    count, size = 3000, 512
    target = buffer(engine, count * size)
    froms, tos = rng.integers(0, 8 * MIB - size, count), rng.permutation(count) * size
    engine.read(
        peer.session,
        Segments(peer.address + froms, target.ctypes.data + tos, np.full(count, size, dtype=np.int64)),
    )
    for start, end in zip(froms.tolist(), tos.tolist(), strict=True):
        assert np.array_equal(target[end : end + size], content(start, size))


def test_threads_share_one_engine(peer: Peer, engine: MooncakeEngine) -> None:
    targets = [buffer(engine, 2 * MIB) for _ in range(4)]
    steps = np.arange(1024, dtype=np.int64) * 2048
    sizes = np.full(1024, 2048, dtype=np.int64)
    failures: list[Exception] = []

    def read(number: int) -> None:
        try:
            remote = peer.address + number * 2 * MIB + steps
            engine.read(peer.session, Segments(remote, targets[number].ctypes.data + steps, sizes))
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=read, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert failures == []
    for number, target in enumerate(targets):
        assert np.array_equal(target, content(number * 2 * MIB, 2 * MIB))


def test_unregistered_local_memory_is_refused_although_mooncake_takes_it(peer: Peer, engine: MooncakeEngine) -> None:
    target = np.zeros(4096, dtype=np.uint8)
    with pytest.raises(LocalError, match="registered local memory"):
        engine.read(peer.session, piece(peer, target, 4096))
    assert not target.any()
    engine.register(target.ctypes.data, 4096)
    engine.unregister(target.ctypes.data)
    with pytest.raises(LocalError, match="registered local memory"):
        engine.read(peer.session, piece(peer, target, 4096))


def test_remote_memory_past_the_registered_end_fails(peer: Peer, engine: MooncakeEngine) -> None:
    target = buffer(engine, 4096)
    columns = (peer.address + 8 * MIB - 100, target.ctypes.data, 4096)
    with pytest.raises(TransferFailed, match="1 segments"):
        engine.read(peer.session, Segments(*(np.array([value], dtype=np.int64) for value in columns)))


def test_nobody_there_fails(engine: MooncakeEngine) -> None:
    target = buffer(engine, 64)
    columns = (4096, target.ctypes.data, 64)
    with pytest.raises(TransferFailed):
        engine.read("127.0.0.1:9", Segments(*(np.array([value], dtype=np.int64) for value in columns)))


@pytest.mark.slow
def test_a_peer_that_dies_during_a_read() -> None:
    peer = serving(256 * MIB)
    engine = MooncakeEngine("127.0.0.1", protocol="tcp", timeout_s=5)
    try:
        target = buffer(engine, 256 * MIB)
        engine.read(peer.session, piece(peer, target, 1))

        def kill_when_bytes_land() -> None:
            eventually(lambda: bool(target[4096]), "the read begins")
            peer.process.kill()

        killer = threading.Thread(target=kill_when_bytes_land)
        killer.start()
        with pytest.raises(TransferFailed, match=peer.session):
            engine.read(peer.session, piece(peer, target, 256 * MIB))
        killer.join(10)
    finally:
        peer.end()
        engine.close()


@pytest.mark.slow
def test_close_is_a_fence_against_a_peer_that_was_stopped_during_a_read() -> None:
    """Without the fence, the bytes that were under way land when the peer goes on."""
    size = 256 * MIB
    peer = serving(size)
    engine = MooncakeEngine("127.0.0.1", protocol="tcp", timeout_s=5)
    second = None
    try:
        target = buffer(engine, size)
        engine.read(peer.session, piece(peer, target, 1))

        def stop_when_bytes_land() -> None:
            eventually(lambda: bool(target[4096]), "the read begins")
            peer.process.send_signal(signal.SIGSTOP)

        stopper = threading.Thread(target=stop_when_bytes_land)
        stopper.start()
        with pytest.raises(TransferFailed, match="gave no sign for 5 s"):
            engine.read(peer.session, piece(peer, target, size))
        stopper.join(10)
        engine.close()
        landed = target.copy()
        assert landed.any()
        assert not landed.all()
        peer.process.send_signal(signal.SIGCONT)
        # A whole read by another engine: the peer runs again and has had time to write what it owed.
        second = MooncakeEngine("127.0.0.1", protocol="tcp", timeout_s=60)
        again = buffer(second, size)
        second.read(peer.session, piece(peer, again, size))
        assert again.all()
        assert np.array_equal(target, landed)
    finally:
        peer.end()
        engine.close()
        if second is not None:
            second.close()


def test_a_new_engine_reads_where_the_old_one_was_fenced(peer: Peer) -> None:
    for _life in range(3):
        engine = MooncakeEngine("127.0.0.1", protocol="tcp", timeout_s=5)
        target = buffer(engine, 4096)
        engine.read(peer.session, piece(peer, target, 4096))
        engine.close()
        assert np.array_equal(target, content(0, 4096))
        with pytest.raises(TransferFailed, match="was closed"):
            engine.read(peer.session, piece(peer, target, 4096))


def test_the_accept_wait_of_the_engine_is_short(engine: MooncakeEngine) -> None:
    """Else its destructor holds Python's global lock for up to a second."""
    port = int(engine.session.rpartition(":")[2])
    waits = []
    for name in os.listdir("/proc/self/fd"):
        try:
            if not stat.S_ISSOCK(os.stat(f"/proc/self/fd/{name}").st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as copy:
                listening = copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                if listening and copy.family == socket.AF_INET and copy.getsockname()[1] == port:
                    seconds, micros = struct.unpack("ll", copy.getsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, 16))
                    waits.append(seconds + micros / 1e6)
        except OSError:
            continue
    (wait,) = waits
    assert wait <= 0.06  # the kernel rounds 50 ms up to its tick; Mooncake's own value is 1 s


def test_registering_twice_is_refused(engine: MooncakeEngine) -> None:
    target = buffer(engine, 4096)
    with pytest.raises(LocalError, match="overlaps"):
        engine.register(target.ctypes.data, 4096)
    engine.unregister(target.ctypes.data)
    engine.register(target.ctypes.data, 4096)


def test_rdma_without_a_device_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MC_FORCE_TCP", raising=False)
    for devices in (tmp_path, tmp_path / "missing"):
        with pytest.raises(ConfigError, match="no RDMA device"):
            MooncakeEngine("127.0.0.1", protocol="rdma", timeout_s=5, rdma_devices=devices)


def test_rdma_that_the_environment_turns_into_tcp_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mlx5_0").mkdir()
    monkeypatch.setenv("MC_FORCE_TCP", "1")
    with pytest.raises(ConfigError, match="Unset MC_FORCE_TCP"):
        MooncakeEngine("127.0.0.1", protocol="rdma", timeout_s=5, rdma_devices=tmp_path)


def test_the_wait_is_slept_through_and_not_spun(peer: Peer) -> None:
    """What is slept follows from what the reads before took by the injected clock: 50 ms here, four fifths of it."""
    slept: list[float] = []
    times = iter([10.0, 10.05, 20.0, 20.05])
    engine = MooncakeEngine(
        "127.0.0.1", protocol="tcp", timeout_s=5, clock=lambda: next(times), sleep=lambda seconds: slept.append(seconds)
    )
    try:
        target = buffer(engine, 8 * MIB)
        for _ in range(2):
            target[:] = 0
            engine.read(peer.session, piece(peer, target, 8 * MIB))
            assert np.array_equal(target, content(0, 8 * MIB))
        assert slept == [pytest.approx(0.04)]
    finally:
        engine.close()
