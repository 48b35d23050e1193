"""A decode side of another release is refused by name, whatever else its Hello has grown."""

from __future__ import annotations

import msgspec
import pytest

from hawk_connector.errors import ProtocolError
from hawk_connector.protocol.messages import (
    PROTOCOL_VERSION,
    Hello,
    Refused,
    decode_message,
    encode,
    foreign_hello,
)
from tests.protocol.table import Table
from tests.protocol.world import decode_facts

EPOCH = "ab" * 16


def newer_hello(**more: object) -> bytes:
    """A Hello as a later release might send it: a higher version, fields that this one does not know."""
    hello = msgspec.to_builtins(Hello(epoch=EPOCH, version=PROTOCOL_VERSION, facts=decode_facts(), number=3))
    return msgspec.msgpack.encode({**hello, "version": PROTOCOL_VERSION + 1, "compression": "zstd", **more})


def test_a_newer_hello_is_refused_with_both_versions() -> None:
    payload = newer_hello()
    with pytest.raises(ProtocolError):
        decode_message(payload)
    foreign = foreign_hello(payload)
    assert foreign is not None
    table = Table()
    table.prefill.receive("peer", foreign)
    (sent,) = table.prefill.take_actions()
    refused = sent.message
    assert isinstance(refused, Refused)
    assert (refused.to, refused.number) == (EPOCH, 3)
    (mismatch,) = refused.mismatches
    assert (mismatch.field, mismatch.prefill, mismatch.decode) == ("protocol version", "2", "3")


def test_what_is_no_hello_of_another_version_stays_malformed() -> None:
    same = msgspec.to_builtins(Hello(epoch=EPOCH, version=PROTOCOL_VERSION, facts=decode_facts(), number=3))
    assert foreign_hello(encode(Hello(epoch=EPOCH, version=PROTOCOL_VERSION, facts=decode_facts()))) is None
    assert foreign_hello(msgspec.msgpack.encode({**same, "compression": "zstd"})) is None
    assert foreign_hello(newer_hello(epoch="../../etc")) is None
    assert foreign_hello(b"\xc1") is None
