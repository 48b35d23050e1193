"""Every decoder of what others write, called with whatever there is: it answers or raises its one error, never another.

Raises AssertionError with the frame where a decoder does anything else.
"""

from __future__ import annotations

import math
import random
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, get_args

import msgspec

from hawk_connector.address import Address
from hawk_connector.config import DecodeConfig, HawkConfig, PrefillConfig
from hawk_connector.errors import ConfigError, ProtocolError
from hawk_connector.protocol import messages
from hawk_connector.protocol.messages import MAX_MESSAGE_BYTES, PROTOCOL_VERSION, decode_message, encode, foreign_hello
from hawk_connector.protocol.ticket import HAWK_KEY, TransferParams, parse_params, remote_decode_wanted
from hawk_connector.transport.curve import KnownKeys

__all__ = ["fuzz_config", "fuzz_known_keys", "fuzz_message", "fuzz_params"]

_FROM_DECODE, _FROM_PREFILL = get_args(messages.DecodeMessage), get_args(messages.PrefillMessage)


def fuzz_message(frame: bytes, seen: Counter[str]) -> Any:
    """The message, where it is one: bounded, and the same after another trip over the wire."""
    try:
        foreign = foreign_hello(frame)
        assert foreign is None or foreign.version != PROTOCOL_VERSION
        message = decode_message(frame)
    except ProtocolError as error:
        assert len(str(error)) < 1024, f"the error repeats what a peer sent: {len(str(error))} characters"
        seen["refused"] += 1
        return None
    except Exception as error:
        raise AssertionError(f"{type(error).__name__}: {error} at {frame[:200].hex()} ({len(frame)} bytes)") from error
    assert len(frame) <= MAX_MESSAGE_BYTES
    again = encode(message)
    assert msgspec.msgpack.encode(decode_message(again)) == again, frame.hex()
    for side in (_FROM_DECODE, _FROM_PREFILL):
        try:
            decode_message(frame, side)
            assert isinstance(message, side)
        except ProtocolError:
            assert not isinstance(message, side)
    seen[type(message).__name__] += 1
    return message


_VALUES: tuple[Any, ...] = (
    *(None, True, 0, 1, -1, 2**63, 10**30, 1.5, math.nan, math.inf, "", "x", "x" * 2000, b"x", [], {}, [[]], {"a": {}}),
    *("127.0.0.1:0", "127.0.0.1:99999", "[::1]:1", "2130706433:80", "0x7f.1:80", "[::ffff:10.0.0.1]:80"),
    *("169.254.169.254:80", "localhost:1\r\nX: y", "a/b:1", " :1", "host:+1", "host:１", "\0:1", "evil.example:443"),
)


def fuzz_params(rng: random.Random, seen: Counter[str], config: DecodeConfig) -> None:
    """kv_transfer_params as a client may write them: no rank is named that may not be connected to."""
    ranks = [
        {"address": f"127.0.0.1:{1 + n}", "epoch": f"{rng.getrandbits(128):032x}"}
        for n in range(rng.choice([1, 2, 64, 65]))
    ]
    entry: Any = {
        "v": PROTOCOL_VERSION,
        "transfer": f"{rng.getrandbits(128):032x}",
        "tokens": 9,
        "ranks": ranks,
        "first_token": None,
    }
    params: Any = {"do_remote_prefill": True, "do_remote_decode": False, HAWK_KEY: entry}
    for _ in range(rng.choice([0, 1, 1, 2, 3])):
        holder = rng.choice([params, entry, *ranks])
        key = rng.choice([*holder, "x"])
        if rng.random() < 0.2:
            holder.pop(key, None)
        else:
            holder[key] = rng.choice(_VALUES)
    if rng.random() < 0.02:
        params = rng.choice(_VALUES)
    try:
        remote_decode_wanted(params)
        parsed = parse_params(params)
    except ProtocolError as error:
        assert len(str(error)) < 8192
        seen["parameters refused"] += 1
        return
    if parsed is None:
        seen["no parameters"] += 1
        return
    assert isinstance(parsed, TransferParams) and 1 <= len(parsed.ranks) <= 64 and 1 <= parsed.tokens <= 1 << 24
    seen["parameters taken"] += 1
    for rank in parsed.ranks:
        try:
            address = Address.parse(rank.address)
        except ConfigError:
            seen["no address"] += 1
            continue
        allowed = config.allows_peer(address)
        assert allowed is (address.host in ("127.0.0.1", "::1")), f"{address} is allowed: {allowed}"
        seen["address allowed" if allowed else "address refused"] += 1


_NAMES = {
    role: [f.name for f in msgspec.structs.fields(kind)]
    for role, kind in (("kv_producer", PrefillConfig), ("kv_consumer", DecodeConfig))
}


def fuzz_config(rng: random.Random, seen: Counter[str]) -> None:
    """kv_connector_extra_config: taken, or refused by ConfigError."""
    role = rng.choice(["kv_producer", "kv_consumer"])
    names = _NAMES[rng.choice([role, role, role, "kv_producer"])]
    given = {
        rng.choice([*names, "lease", ""]): rng.choice([*_VALUES, 30, 5.0, 1 << 20]) for _ in range(rng.randint(0, 4))
    }
    try:
        HawkConfig.parse(given, role)
        seen["config taken"] += 1
    except ConfigError as error:
        assert str(error)
        seen["config refused"] += 1


def fuzz_known_keys(rng: random.Random, seen: Counter[str]) -> None:
    """A known keys file as a half-done copy or a wrong hand leaves it: read, or refused by ConfigError."""
    key = bytes(
        rng.choice(b"0123456789abcdefABCDEF.-:+=^!/*?&<>()[]{}@%$#") for _ in range(rng.choice([39, 40, 40, 40, 41]))
    )
    lines = [
        b"127.0.0.1:1 " + key,
        b"# " + key,
        b"",
        key,
        b"name  " + key + b" more",
        b"\xff\xfe " + key,
        rng.randbytes(50),
    ]
    text = b"\n".join(rng.choice(lines) for _ in range(rng.randint(0, 4)))
    with tempfile.NamedTemporaryFile(prefix="hawk-fuzz-") as file:
        file.write(text[: rng.randrange(len(text) + 1)] if rng.random() < 0.3 else text)
        file.flush()
        try:
            known = KnownKeys(Path(file.name))
            known.knows(key)
            seen["known keys taken"] += 1
        except ConfigError as error:
            assert len(str(error)) < 2048
            seen["known keys refused"] += 1
