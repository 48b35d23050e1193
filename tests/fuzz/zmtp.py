"""ZMTP 3 (RFC 23, RFC 26) by hand, as far as an attacker needs it: beginnings that are almost right."""

from __future__ import annotations

import random
from collections.abc import Iterator

__all__ = ["GREETING_BYTES", "handshakes", "message_frames"]

GREETING_BYTES = 64
_LONG, _COMMAND = 2, 4


def greeting(mechanism: bytes, *, major: int = 3, as_server: int = 0) -> bytes:
    signature = b"\xff" + b"\0" * 7 + b"\x01\x7f"
    return signature + bytes([major, 1]) + mechanism.ljust(20, b"\0")[:20] + bytes([as_server]) + b"\0" * 31


def frame(body: bytes, flags: int = 0) -> bytes:
    if len(body) < 256:
        return bytes([flags, len(body)]) + body
    return bytes([flags | _LONG]) + len(body).to_bytes(8, "big") + body


def command(name: bytes, body: bytes) -> bytes:
    return frame(bytes([len(name)]) + name + body, _COMMAND)


def handshakes(rng: random.Random, count: int) -> Iterator[bytes]:
    """``count`` beginnings of connections, none of which proves a key."""
    for _ in range(count):
        payload = _handshake(rng)
        if rng.random() < 0.4:
            changed = bytearray(payload)
            for _ in range(rng.randint(1, 4)):
                changed[rng.randrange(len(changed))] = rng.randrange(256)
            payload = bytes(changed)
        if rng.random() < 0.2:
            payload = payload[: rng.randrange(len(payload))]
        yield payload


def _handshake(rng: random.Random) -> bytes:
    mechanism = rng.choice([b"NULL", b"CURVE", b"PLAIN", b"GSSAPI", b"", b"null", rng.randbytes(20)])
    begin = greeting(mechanism, major=rng.choice([3, 3, 3, 2, 1, 0, 255]), as_server=rng.choice([0, 0, 1]))
    ready = command(b"READY", b"\x0bSocket-Type\0\0\0\x06DEALER\x08Identity\0\0\0\0")
    hello = b"\x01\0" + b"\0" * 72 + rng.randbytes(32) + rng.randbytes(8) + rng.randbytes(80)
    initiate = rng.randbytes(8) + rng.randbytes(rng.choice([16, 144, 400]))
    follow = [
        ready,
        command(b"HELLO", hello),
        command(b"HELLO", rng.randbytes(rng.choice([0, 10, 194, 3000]))),
        command(b"INITIATE", initiate),
        command(b"MESSAGE", rng.randbytes(40)),
        command(b"HELLO", b"\x04user\x04pass"),
        command(b"ERROR", b"\x05wrong"),
        command(b"PING", b"\0\0aaaa"),
        frame(b"\x85\xa4type\xa7status?"),
        frame(rng.randbytes(rng.choice([0, 1, 300]))),
        b"\x02" + b"\xff" * 8,  # a frame of 2^64 - 1 bytes
        b"\x06" + (1 << 40).to_bytes(8, "big"),
        b"\x01\x01",  # ZMTP 1: a final part of nothing
    ]
    pick = rng.random()
    if pick < 0.1:
        return rng.randbytes(rng.randint(1, 200))
    if pick < 0.2:
        return b"\x01\0" + b"\x05\0hey!" * rng.randint(1, 5)  # ZMTP 1, which has no greeting and no security
    return begin + b"".join(rng.choice(follow) for _ in range(rng.randint(0, 4)))


def message_frames(received: bytes) -> list[bytes]:
    """Frames after the greeting that are messages and not commands of the hand-shake."""
    found, at = [], GREETING_BYTES
    while at + 2 <= len(received):
        flags = received[at]
        size_bytes = 8 if flags & _LONG else 1
        size = int.from_bytes(received[at + 1 : at + 1 + size_bytes], "big")
        body = received[at + 1 + size_bytes : at + 1 + size_bytes + size]
        if not flags & _COMMAND:
            found.append(body)
        at += 1 + size_bytes + size
    return found
