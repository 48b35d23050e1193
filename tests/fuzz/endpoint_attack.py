"""The attack on real sockets: floods of frames, ZMTP garbage over plain TCP, and peers that may not speak.

A process with real side channels is attacked while a well-behaved client is served.  Raises AssertionError where the
process dies, logs an error, grows, stops serving, or answers a peer that it has not let in.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import zmq

from hawk_connector.errors import ProtocolError
from hawk_connector.protocol.messages import (
    MAX_MESSAGE_BYTES,
    PROTOCOL_VERSION,
    Claimed,
    Gone,
    Hello,
    Pull,
    Status,
    StatusQuery,
    Welcome,
    decode_message,
    encode,
)
from hawk_connector.transport.curve import read_public_key, write_key_pair
from tests.fuzz.frames import FrameSource
from tests.fuzz.zmtp import GREETING_BYTES, handshakes, message_frames
from tests.protocol.world import decode_facts

__all__ = ["attack", "resident_bytes"]

ROOT = Path(__file__).parents[2]
# What the attacked process may grow by after the first quarter: ZMQ keeps queues and buffers of its connections.
GROWTH_BOUND = 32 << 20
# ZMTP's greeting, and the hand-shake's one command that refuses or asks on (CURVE's WELCOME has 168 bytes).
UNAUTHENTICATED_BOUND = GREETING_BYTES + 256
_PATIENCE_S = 60.0
# Looks, a tenth of a second apart, in which a process that has settled does not grow.
_STILL_LOOKS = 15
_EVERY = 4000
_DEFAULT_RATE = 2000.0


def resident_bytes(pid: int) -> int:
    """Resident memory of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


class Endpoint:
    """The attacked process."""

    def __init__(self, rate: float, peer: str, keys: tuple[Path, Path] | None, log: IO[bytes]) -> None:
        """``peer``: whom its decode side says Hello to.  ``keys``: its key file, and that of the keys that it knows."""
        arguments = [str(rate), peer, *(map(str, keys) if keys else ())]
        self._log = log
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.fuzz.endpoint", *arguments],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        assert self.process.stdout is not None
        said = json.loads(self.process.stdout.readline())
        self.address, self.epoch, self.status = said["address"], said["epoch"], said["status"]
        host, _, port = self.address.rpartition(":")
        self.tcp = (host, int(port))

    @property
    def rss(self) -> int:
        assert self.process.poll() is None, f"the attacked process has died: {self.process.returncode}"
        return resident_bytes(self.process.pid)

    def settle(self) -> None:
        """Waits until it does not grow any more: a first pairing loads a compiler and makes kernels, once."""
        deadline = time.monotonic() + _PATIENCE_S
        before, still = self.rss, 0
        while still < _STILL_LOOKS:
            assert time.monotonic() < deadline, "it grows without an attack"
            time.sleep(0.1)
            now = self.rss
            still = still + 1 if now - before < 1 << 20 else 0
            before = now

    def end(self) -> None:
        """Ends it; AssertionError where it logged an error or did not end well."""
        out, _ = self.process.communicate("", timeout=_PATIENCE_S)
        errors = json.loads(out)["errors"]
        assert not errors, f"the attacked process logged errors: {errors}"
        self._log.seek(0)
        last = self._log.read()[-2000:].decode(errors="replace")
        assert self.process.returncode == 0, f"the attacked process ended with {self.process.returncode}: {last}"

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


@contextlib.contextmanager
def serving(rate: float, peer: str = "127.0.0.1:9", keys: tuple[Path, Path] | None = None) -> Iterator[Endpoint]:
    with tempfile.TemporaryFile() as log:
        endpoint = Endpoint(rate, peer, keys, log)
        try:
            yield endpoint
            endpoint.end()
        finally:
            endpoint.kill()


class GoodClient:
    """A decode side that behaves; ``served`` is False where it gets no answer."""

    def __init__(self, context: zmq.Context[Any], endpoint: Endpoint, curve: tuple[Path, bytes] | None = None) -> None:
        self.epoch, self.endpoint, self.number = "e" * 32, endpoint, 0
        self.dealer = _dealer(context, endpoint.address, curve)
        self.status = _dealer(context, endpoint.status, curve)

    def close(self) -> None:
        self.dealer.close()
        self.status.close()

    def served(self, patience_s: float = _PATIENCE_S) -> bool:
        self.number += 1
        hello = Hello(epoch=self.epoch, version=PROTOCOL_VERSION, facts=decode_facts(), number=self.number)
        transfers = self.live_transfers()
        transfer = transfers[-1] if transfers else "0" * 32
        fields = {"epoch": self.epoch, "to": self.endpoint.epoch, "transfer": transfer}
        pull = Pull(claim=f"{self.number:032x}", digest="5" * 64, tokens=48, deliver=False, **fields)
        deadline = time.monotonic() + patience_s
        # The attacker says things in this client's name, so it may be told that it is not paired: it pairs again.
        while not (_answered(self.dealer, hello, (Welcome,)) and _answered(self.dealer, pull, (Claimed, Gone))):
            if time.monotonic() > deadline:
                return False
        while not _answered(self.status, StatusQuery(epoch=self.epoch), (Status,)):
            if time.monotonic() > deadline:
                return False
        return True

    def live_transfers(self) -> list[str]:
        """Ids of the prefill side's transfers, as anybody sees them who may ask for its status."""
        status = _answered(self.dealer, StatusQuery(epoch=self.epoch), (Status,))
        return [transfer.transfer for transfer in status.transfers] if isinstance(status, Status) else []


def _answered(dealer: zmq.Socket[Any], question: Any, answers: tuple[type, ...]) -> Any:
    """One of ``answers``, or None where a second is quiet before it comes."""
    dealer.send(encode(question))
    while dealer.poll(1000):
        answer = decode_message(dealer.recv())
        if isinstance(answer, answers):
            return answer
    return None


def _dealer(context: zmq.Context[Any], address: str, curve: tuple[Path, bytes] | None = None) -> zmq.Socket[Any]:
    """``curve``: a key file of the client's, and the server's public key."""
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.LINGER, 0)
    if curve is not None:
        words = dict(line.split() for line in curve[0].read_text().splitlines())
        dealer.curve_publickey = words["public-key"].encode()
        dealer.curve_secretkey = words["secret-key"].encode()
        dealer.curve_serverkey = curve[1]
    dealer.connect(f"tcp://{address}")
    return dealer


def attack(frames: int, seed: int) -> Counter[str]:
    """``frames`` frames in all, over the three kinds of endpoints."""
    seen: Counter[str] = Counter()
    with zmq.Context() as context:
        # The rate limit set so high that every frame is looked at, then as it is by default.
        _open_server(context, frames * 3 // 4, seed, 1e9, seen)
        _open_server(context, frames // 8, seed + 1, _DEFAULT_RATE, seen)
        _closed_server(context, frames // 8, seed + 2, seen)
    return seen


def _open_server(context: zmq.Context[Any], frames: int, seed: int, rate: float, seen: Counter[str]) -> None:
    bad_peer = context.socket(zmq.ROUTER)
    bad_peer.setsockopt(zmq.LINGER, 0)
    port = bad_peer.bind_to_random_port("tcp://127.0.0.1")
    with bad_peer, serving(rate, f"127.0.0.1:{port}") as endpoint:
        source = FrameSource(seed, [endpoint.epoch, "e" * 32, "d" * 32], [f"{n:032x}" for n in range(64)])
        good = GoodClient(context, endpoint)
        assert good.served()
        endpoint.settle()
        targets = [endpoint.address, endpoint.address, endpoint.status]
        dealers = [_dealer(context, target) for target in targets]
        before = endpoint.rss
        caller = b""
        for n in range(frames):
            if n % _EVERY == 0:
                assert good.served(), f"after {n} frames a good client is not served"
                seen["good client served during the attack"] += 1
                dealers.append(_dealer(context, targets[n // _EVERY % 3]))  # another identity
                dealers.pop(0).close()
                for fresh in handshakes(source.rng, 4):
                    _raw(endpoint, fresh)
                    seen["raw connections"] += 1
            if n % 500 == 0:
                source.transfers = good.live_transfers() or source.transfers
            if n == frames // 4:
                before = endpoint.rss
            kind, frame = source.frame()
            if b"drain" in frame and n < frames * 7 // 8:
                continue  # whoever is on loopback may drain it, and there would be little left to attack
            seen[f"sent: {kind}"] += 1
            while bad_peer.poll(0):
                caller, hello = bad_peer.recv_multipart()
                source.epochs = [endpoint.epoch, "e" * 32, decode_message(hello).epoch]  # the decode side's own
            if n % 8 == 0 and caller:
                bad_peer.send_multipart([caller, frame])
                seen["sent by a bad prefill side"] += 1
                continue
            dealer = dealers[n % len(dealers)]
            parts = [frame] if n % 50 else [frame, frame][: source.rng.randint(0, 2)] or [b"", frame, b""]
            dealer.send_multipart(parts)  # waits while the server's queue is full
            while dealer.poll(0):
                answer = dealer.recv()
                assert len(answer) <= MAX_MESSAGE_BYTES
                seen[f"answer: {type(_checked(answer)).__name__}"] += 1
        assert good.served(), "after the attack a good client is not served"
        key = f"bytes grown at a rate limit of {rate:g}/s"
        seen[key] = max(0, endpoint.rss - before)
        assert seen[key] < GROWTH_BOUND, f"the attacked process grew by {seen[key]} bytes"
        for dealer in dealers:
            dealer.close()
        good.close()


def _checked(answer: bytes) -> Any:
    try:
        return decode_message(answer)
    except ProtocolError as error:
        raise AssertionError(f"the server answers what is no message: {error}") from error


def _closed_server(context: zmq.Context[Any], frames: int, seed: int, seen: Counter[str]) -> None:
    """With CURVE keys: whoever does not prove a known one gets the hand-shake's refusal and nothing else."""
    with tempfile.TemporaryDirectory(prefix="hawk-fuzz-") as name:
        folder = Path(name)
        for pair in ("server", "friend", "stranger"):
            write_key_pair(folder / pair)
        known = folder / "known"
        known.write_text(f"friend {read_public_key(folder / 'friend').decode()}\n")
        server_key = read_public_key(folder / "server")
        with serving(1e9, keys=(folder / "server", known)) as endpoint:
            source = FrameSource(seed, [endpoint.epoch, "e" * 32], [f"{n:032x}" for n in range(64)])
            good = GoodClient(context, endpoint, (folder / "friend", server_key))
            assert good.served()
            endpoint.settle()
            before = endpoint.rss
            raw = max(40, frames // 50)
            for n, payload in enumerate(handshakes(source.rng, raw)):
                got = _raw(endpoint, payload)
                assert len(got) <= UNAUTHENTICATED_BOUND, f"{len(got)} bytes for {payload[:80].hex()}"
                assert not message_frames(got), f"a message for {payload[:80].hex()}: {got.hex()}"
                seen["raw connections without a key"] += 1
                seen["most bytes answered without a key"] = max(seen["most bytes answered without a key"], len(got))
                if n == raw // 4:
                    before = endpoint.rss
            for curve in (None, (folder / "stranger", server_key)):
                dealer = _dealer(context, endpoint.address, curve)
                dealer.setsockopt(zmq.SNDTIMEO, 0)
                for _ in range(frames // 2):
                    with contextlib.suppress(zmq.Again):  # nothing leaves before a hand-shake, so the queue fills
                        dealer.send(source.frame()[1])
                    seen["sent without a known key"] += 1
                assert good.served(), "a good client is not served beside strangers"
                assert not dealer.poll(500), f"a stranger is answered: {dealer.recv()!r}"
                dealer.close()
            seen["bytes grown with keys"] = max(0, endpoint.rss - before)
            assert seen["bytes grown with keys"] < GROWTH_BOUND
            good.close()


def _raw(endpoint: Endpoint, payload: bytes) -> bytes:
    """What comes back on a TCP connection that says ``payload``; until it is closed or quiet."""
    got = b""
    with contextlib.suppress(ConnectionError, TimeoutError), socket.create_connection(endpoint.tcp, _PATIENCE_S) as raw:
        raw.settimeout(0.03)
        raw.sendall(payload)
        while (more := raw.recv(4096)) and len(got) < 1 << 20:
            got += more
    return got
