"""Frames as an attacker sends them: valid ones of every kind, changed in ways that know how they are built.

Everything comes from the seed.  A frame is bytes; ``FrameSource.frame`` gives one with the name of what was done to it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any, get_args

import msgspec

from hawk_connector.errors import Mismatch
from hawk_connector.protocol import messages
from hawk_connector.protocol.messages import encode
from tests.protocol.world import decode_facts, direct_facts, prefill_facts

__all__ = ["FrameSource"]

_EDGES: tuple[Any, ...] = (
    *(0, 1, -1, 2**24, 2**24 + 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1, -(2**63)),
    *(0.0, -0.0, math.nan, math.inf, -math.inf, 1e308, 5e-324, 86400.0, 86400.1),
    *(
        "",
        "\0",
        "0" * 31,
        "0" * 32,
        "0" * 32 + "\n",
        "G" * 32,
        "0" * 64,
        "\u202e",
        "ä" * 1024,
        "x" * 5000,
        b"",
        b"\xff" * 9,
    ),
    *(None, True, False, [], {}, [[]], {"": {}}, [0] * 300, {str(i): i for i in range(300)}),
)

# The first bytes of a value that claims to be far larger than the frame.
_HUGE = (
    b"\xdd\xff\xff\xff\xff",  # an array of 2^32 - 1
    b"\xdf\xff\xff\xff\xff",  # a map
    b"\xdb\xff\xff\xff\xff",  # a text
    b"\xc6\xff\xff\xff\xff",  # bytes
    b"\xc9\xff\xff\xff\xff\x01",  # an extension
    b"\xdc\xff\xff",
    b"\xde\xff\xff",
)


class FrameSource:
    """``epochs``: lives that the receiver knows or is; ``transfers``: ids that mean something to it."""

    def __init__(self, seed: int, epochs: list[str], transfers: list[str]) -> None:
        self.rng = random.Random(seed)
        self.epochs, self.transfers = epochs, transfers
        self._said: list[bytes] = []  # what may be replayed
        self._fields = {kind: msgspec.structs.fields(kind) for kind in get_args(messages.Message)}
        self._mutations: tuple[Callable[[bytes], bytes], ...] = (
            self._flip,
            self._cut_off,
            self._extend,
            self._huge_count,
            self._another_value,
            self._another_value,
            self._another_value,
            self._drop_field,
            self._unknown_field,
            self._another_type,
            self._nested,
            self._spliced,
        )

    def frame(self) -> tuple[str, bytes]:
        """A frame and the name of its kind."""
        rng = self.rng
        pick = rng.random()
        if pick < 0.15:
            return "valid", self.valid()
        if pick < 0.25 and self._said:
            return "replayed", rng.choice(self._said)
        if pick < 0.3:
            return "noise", rng.randbytes(rng.choice([0, 1, 2, 7, 40, 400]))
        if pick < 0.3005:
            return "oversize", self.valid() + b"\0" * (rng.choice([1 << 15, 1 << 20]) + rng.randint(-64, 64))
        data = self.valid()
        names = []
        for _ in range(rng.choice([1, 1, 1, 2, 3])):
            mutation = rng.choice(self._mutations)
            names.append(mutation.__name__.strip("_"))
            data = mutation(data)
        return names[0], data

    # --- valid messages

    def valid(self) -> bytes:
        kind = self.rng.choice(list(self._fields))
        data = encode(kind(**{field.name: self._value(field) for field in self._fields[kind]}))
        if len(self._said) < 256:
            self._said.append(data)
        else:
            self._said[self.rng.randrange(256)] = data
        return data

    def _value(self, field: Any) -> Any:
        rng, name = self.rng, field.name
        if name in ("epoch", "to"):
            return rng.choice(self.epochs) if rng.random() < 0.8 else self._id()
        if name == "transfer":
            return rng.choice(self.transfers) if rng.random() < 0.8 else self._id()
        known: dict[str, Callable[[], Any]] = {
            "claim": lambda: rng.choice(self.transfers) if rng.random() < 0.5 else self._id(),
            "version": lambda: messages.PROTOCOL_VERSION,
            "digest": lambda: f"{rng.getrandbits(256):064x}" if "64" in str(field.type) else "",
            "deliver": lambda: rng.random() < 0.5,
            "tokens": lambda: rng.choice([1, 32, 128, 1 << 24]),
            "engine": lambda: "127.0.0.1:17000",
            "lease_s": lambda: 30.0,
            "reason": lambda: rng.choice(get_args(messages.GoneReason)),
            "blocks": lambda: (
                tuple(range(rng.choice([0, 1, 2, 300])))
                if "tuple" in str(field.type)
                else rng.choice([0, 1, 4, 1 << 24])
            ),
            "process": lambda: "local:1:2:00000000-0000-0000-0000-000000000000:3",
            "cache": lambda: (1 << 40,) * rng.choice([0, 1, 2]),
            "parcel_blocks": lambda: rng.choice([1, 2, 1 << 20]),
            "mismatches": lambda: (Mismatch("model", "a", "b", "serve one"),) * rng.choice([0, 1, 32]),
            "role": lambda: "prefill",
            "held": lambda: {"transfers": rng.randint(0, 9)},
            "pairings": lambda: (
                (messages.PairingStatus("p", "paired", "x" * rng.choice([0, 9, 1024])),) * rng.randint(0, 3)
            ),
            "reports": lambda: (),
        }
        if name == "facts":
            if "Prefill" in str(field.type):
                return prefill_facts()
            return direct_facts() if rng.random() < 0.3 else decode_facts(codec=rng.choice(["bfp8", "bfp4"]))
        if name in known:
            return known[name]()
        if field.default is not msgspec.NODEFAULT:
            return field.default
        if field.default_factory is not msgspec.NODEFAULT:
            return field.default_factory()
        return rng.choice([0, 1, 2, 1 << 20])  # counts and addresses

    def _id(self) -> str:
        return f"{self.rng.getrandbits(128):032x}"

    # --- changes of bytes

    def _flip(self, data: bytes) -> bytes:
        changed = bytearray(data)
        for _ in range(self.rng.choice([1, 1, 2, 8])):
            if changed:
                changed[self.rng.randrange(len(changed))] ^= 1 << self.rng.randrange(8)
        return bytes(changed)

    def _cut_off(self, data: bytes) -> bytes:
        return data[: self.rng.randrange(len(data) + 1)]

    def _extend(self, data: bytes) -> bytes:
        return data + self.rng.randbytes(self.rng.choice([1, 3, 100]))

    def _huge_count(self, data: bytes) -> bytes:
        """Somewhere a value begins that says that it is huge."""
        at = self.rng.randrange(len(data) + 1)
        return data[:at] + self.rng.choice(_HUGE) + data[at:]

    def _spliced(self, data: bytes) -> bytes:
        other = self.rng.choice(self._said)
        return data[: self.rng.randrange(len(data) + 1)] + other[self.rng.randrange(len(other) + 1) :]

    # --- changes of the message

    def _another_value(self, data: bytes) -> bytes:
        """A field, or one inside it, has a value at or past its bounds, or of another type."""
        return self._changed(data, lambda holder, key: holder.__setitem__(key, self.rng.choice(_EDGES)))

    def _drop_field(self, data: bytes) -> bytes:
        return self._changed(data, lambda holder, key: holder.__delitem__(key))

    def _unknown_field(self, data: bytes) -> bytes:
        def add(holder: Any, key: Any) -> None:
            if isinstance(holder, dict):
                holder[self.rng.choice(["x", "", "type", "__class__", "epoch ", "\0"])] = self.rng.choice(_EDGES)

        return self._changed(data, add)

    def _another_type(self, data: bytes) -> bytes:
        tags = [kind.__struct_config__.tag for kind in get_args(messages.Message)]

        def rename(holder: Any, key: Any) -> None:
            if isinstance(holder, dict) and "type" in holder:
                holder["type"] = self.rng.choice([*tags, "", "os.system", 7, None])

        return self._changed(data, rename)

    def _nested(self, data: bytes) -> bytes:
        """As deep as a decoder that calls itself can go, and deeper."""
        depth = self.rng.choice([10, 600, 2000])
        opening = self.rng.choice([b"\x91", b"\x81\xa1a"])
        at = self.rng.randrange(len(data) + 1)
        return data[:at] + opening * depth + data[at:]

    def _changed(self, data: bytes, change: Callable[[Any, Any], None]) -> bytes:
        """Applies ``change`` to some field, however deep; bytes that are no message stay as they are."""
        try:
            message = msgspec.msgpack.decode(data)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError, ValueError):
            return self._flip(data)
        places: list[tuple[Any, Any]] = []
        todo = [message]
        while todo:
            holder = todo.pop()
            keys = list(holder) if isinstance(holder, dict) else range(len(holder)) if isinstance(holder, list) else ()
            for key in keys:
                places.append((holder, key))
                if isinstance(holder[key], (dict, list)):
                    todo.append(holder[key])
        if not places:
            return self._flip(data)
        change(*self.rng.choice(places))
        try:
            return msgspec.msgpack.encode(message)
        except (TypeError, OverflowError, UnicodeEncodeError):
            return self._flip(data)
