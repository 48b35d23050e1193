"""Messages and tickets: typed, bounded, and nothing but ProtocolError whatever arrives (rule 10)."""

from __future__ import annotations

import contextlib

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hawk_connector.errors import Mismatch, ProtocolError
from hawk_connector.metrics import TransferReport
from hawk_connector.plan.pairing import DecodeFacts
from hawk_connector.protocol.messages import (
    MAX_MESSAGE_BYTES,
    PROTOCOL_VERSION,
    Abort,
    Accepted,
    Claimed,
    Done,
    Gone,
    Hello,
    Message,
    PairingStatus,
    Pull,
    Ready,
    Refused,
    Renew,
    Renewed,
    Stale,
    Status,
    StatusQuery,
    Welcome,
    decode_message,
    encode,
)
from hawk_connector.protocol.ticket import HAWK_KEY, RankAddress, TransferParams, parse_params, remote_decode_wanted
from tests.protocol.world import decode_facts, direct_facts, prefill_facts, prefill_protocol

E, F, T, C = "1" * 32, "2" * 32, "3" * 32, "4" * 32
DIGEST = "5" * 64
OF_CLAIM = {"epoch": E, "to": F, "transfer": T, "claim": C}
EXAMPLES: list[Message] = [
    Hello(epoch=E, version=PROTOCOL_VERSION, facts=decode_facts(), number=3),
    Hello(epoch=E, version=PROTOCOL_VERSION, facts=direct_facts(), number=3),
    Pull(digest=DIGEST, tokens=7, deliver=True, first_block=1, **OF_CLAIM),
    Renew(**OF_CLAIM),
    Done(parcel=1, generation=2, **OF_CLAIM),
    Abort(digest=DIGEST, **OF_CLAIM),
    StatusQuery(epoch=E),
    Welcome(epoch=E, to=F, version=PROTOCOL_VERSION, facts=prefill_facts(), engine="host:1", lease_s=3.0, number=3),
    Welcome(
        epoch=E,
        to=F,
        version=PROTOCOL_VERSION,
        facts=prefill_facts(),
        engine="host:1",
        lease_s=3.0,
        process="local:1:2:3:4",
        cache=(1 << 40, 1 << 41),
    ),
    Refused(epoch=E, to=F, mismatches=(Mismatch("dtype", "a", "b", "c"),), number=3),
    Stale(epoch=E, to=F),
    Claimed(blocks=3, parcel_blocks=2, **OF_CLAIM),
    Ready(parcel=1, generation=2, address=1 << 40, nbytes=4096, **OF_CLAIM),
    Ready(parcel=1, generation=2, address=0, nbytes=4096, blocks=(7, (1 << 32) - 1), **OF_CLAIM),
    Renewed(**OF_CLAIM),
    Accepted(parcel=1, generation=2, **OF_CLAIM),
    Gone(reason="expired", **OF_CLAIM),
    Status(
        epoch=E,
        role="prefill",
        held={"leases": 0},
        pairings=(PairingStatus(peer=F, state="paired", detail=""),),
        reports=(TransferReport(transfer_id=T, request_id="r", outcome="completed", reason="", tokens=3),),
    ),
]
PARAMS = {
    "v": PROTOCOL_VERSION,
    "transfer": T,
    "tokens": 5,
    "ranks": [{"address": "a:1", "epoch": E}],
    "first_token": None,
}


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda m: type(m).__name__)
def test_every_message_survives_the_wire(message: Message) -> None:
    assert decode_message(encode(message)) == message


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda m: type(m).__name__)
def test_a_message_is_taken_only_where_it_belongs(message: Message) -> None:
    others = tuple({type(m) for m in EXAMPLES} - {type(message)})
    with pytest.raises(ProtocolError, match=f"got {type(message).__name__}"):
        decode_message(encode(message), others)


@given(st.binary(max_size=200))
def test_random_bytes_are_a_protocol_error(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode_message(data)


@settings(max_examples=400)
@given(st.sampled_from(EXAMPLES), st.data())
def test_mutated_messages_raise_nothing_but_protocol_errors(message: Message, data: st.DataObject) -> None:
    raw = bytearray(encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(raw) - 1))
        raw[at] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(raw)))
    for attempt in (bytes(raw), bytes(raw[:cut])):
        with contextlib.suppress(ProtocolError):
            decode_message(attempt)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | st.text(max_size=40),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=8,
)


@settings(max_examples=400)
@given(st.sampled_from(EXAMPLES), st.data())
def test_a_field_of_another_type_is_a_protocol_error_or_the_same_type(message: Message, data: st.DataObject) -> None:
    """What passes is of the declared types: it can be encoded, and read again as the same."""
    fields = msgspec.msgpack.decode(encode(message))
    fields[data.draw(st.sampled_from(sorted(fields)))] = data.draw(JSON)
    try:
        decoded = decode_message(msgspec.msgpack.encode(fields))
    except ProtocolError:
        return
    # A number that is not a number is not equal to itself.
    assert encode(decode_message(encode(decoded))) == encode(decoded)


def test_an_oversized_message_is_a_protocol_error_that_names_both_sizes() -> None:
    with pytest.raises(ProtocolError, match=f"at most {MAX_MESSAGE_BYTES} bytes, got {MAX_MESSAGE_BYTES + 1}"):
        decode_message(b"\x00" * (MAX_MESSAGE_BYTES + 1))


def test_what_a_peer_wrote_is_repeated_escaped_and_cut() -> None:
    with pytest.raises(ProtocolError, match=r"got Object missing required field `type`: dropped$"):
        decode_message(b"\x80")
    with pytest.raises(ProtocolError, match=r"got Invalid value 'x\\n\\x1b' - at `\$.type`: dropped$"):
        decode_message(msgspec.msgpack.encode({"type": "x\n\x1b"}))
    with pytest.raises(ProtocolError) as raised:
        decode_message(msgspec.msgpack.encode({"type": "x" * 5000}))
    assert len(str(raised.value)) < 400


def test_deep_nesting_is_a_protocol_error() -> None:
    with pytest.raises(ProtocolError):
        decode_message(b"\x81\xa4type" + b"\x91" * 100_000)


@pytest.mark.parametrize("epoch", ["", "1" * 31, "1" * 33, "g" * 32, "A" * 32, "1" * 32 + "\n", "1" * 31 + "٣"])
def test_an_id_is_32_lower_case_hex_digits(epoch: str) -> None:
    raw = msgspec.msgpack.encode({"type": "status?", "epoch": epoch})
    with pytest.raises(ProtocolError):
        decode_message(raw)


SIZES = st.sampled_from([-1, 0, 1, 2, 3, 1 << 16, (1 << 16) + 1, 1 << 40, (1 << 63) - 1]) | st.integers(1, 4096)


@pytest.mark.parametrize("mode", ["hawk", "direct", "host"])
@settings(max_examples=150, deadline=None)
@given(st.data())
def test_facts_that_no_device_has_are_refused_or_dropped_cheaply(mode: str, data: st.DataObject) -> None:
    """A Hello may say anything; the pairing of what passes is computed without any cost that it could choose."""
    facts = direct_facts() if mode == "direct" else decode_facts()
    fields = msgspec.to_builtins(Hello(epoch=E, version=PROTOCOL_VERSION, facts=facts))
    fields["facts"]["mode"] = mode
    for _ in range(data.draw(st.integers(1, 3))):
        part = data.draw(st.sampled_from([fields["facts"]["shape"], fields["facts"]["layout"], fields["facts"]]))
        key = data.draw(st.sampled_from(sorted(k for k, v in part.items() if not isinstance(v, dict))))
        kind = type(part[key])
        part[key] = data.draw(SIZES if kind is int else st.booleans() if kind is bool else st.text(max_size=2000))
    try:
        message = decode_message(msgspec.msgpack.encode(fields))
    except ProtocolError:
        return
    assert isinstance(message, Hello)
    machine = prefill_protocol(prefill_facts(), F, lambda: 0.0)
    machine.receive("peer", message)
    (answer,) = machine.take_actions()
    assert len(encode(answer.message)) < MAX_MESSAGE_BYTES  # type: ignore[union-attr]
    assert isinstance(answer.message, (Welcome, Refused))  # type: ignore[union-attr]


def test_facts_are_bounded_by_name() -> None:
    good = msgspec.to_builtins(Hello(epoch=E, version=PROTOCOL_VERSION, facts=decode_facts()))
    good["facts"]["layout"]["chips"] = 1 << 40
    with pytest.raises(ProtocolError, match=r"<= 65536 - at `\$\.facts\.layout\.chips`"):
        decode_message(msgspec.msgpack.encode(good))
    good["facts"]["layout"]["chips"] = 1
    good["facts"]["model"] = "m" * (MAX_MESSAGE_BYTES // 2)  # would come back in Refused
    with pytest.raises(ProtocolError, match="model of at most 1024 characters"):
        decode_message(msgspec.msgpack.encode(good))
    good["facts"]["model"] = "m"
    assert msgspec.convert(good["facts"], DecodeFacts) == decode_facts()


# --- tickets


def test_params_as_the_prefill_side_writes_them_are_read() -> None:
    parsed = parse_params({"do_remote_prefill": True, "remote_host": "x", HAWK_KEY: PARAMS})
    assert parsed == TransferParams(PROTOCOL_VERSION, T, 5, (RankAddress("a:1", E),))


@pytest.mark.parametrize("params", [None, 1, "x", [], {}, {"do_remote_prefill": 1}, {"do_remote_prefill": "true"}])
def test_a_request_that_names_no_transfer_runs_alone(params: object) -> None:
    assert parse_params(params) is None
    assert remote_decode_wanted(params) is False


RANK = {"address": "a:1", "epoch": E}
HOSTILE = {
    "no hawk entry": None,
    "not a map": [1],
    "version": {**PARAMS, "v": PROTOCOL_VERSION + 1},
    "no tokens": {**PARAMS, "tokens": 0},
    "huge tokens": {**PARAMS, "tokens": 1 << 40},
    "tokens as text": {**PARAMS, "tokens": "5"},
    "tokens as bool": {**PARAMS, "tokens": True},
    "transfer": {**PARAMS, "transfer": "../../etc"},
    "no ranks": {**PARAMS, "ranks": []},
    "65 ranks": {**PARAMS, "ranks": [{"address": f"a:{n}", "epoch": E} for n in range(65)]},
    "one rank twice": {**PARAMS, "ranks": [RANK, RANK]},
    "long address": {**PARAMS, "ranks": [{"address": "a" * 2000, "epoch": E}]},
    "epoch": {**PARAMS, "ranks": [{"address": "a:1", "epoch": "x"}]},
    "unknown field": {**PARAMS, "claim": C},
    "keys": {1: 2},
}


@pytest.mark.parametrize("entry", HOSTILE.values(), ids=HOSTILE.keys())
def test_malformed_params_are_a_protocol_error_that_says_what_to_do(entry: object) -> None:
    params = {"do_remote_prefill": True} | ({HAWK_KEY: entry} if entry is not None else {})
    with pytest.raises(ProtocolError, match=r"verbatim|same release|each rank once"):
        parse_params(params)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_hostile_params_raise_nothing_but_protocol_errors(data: st.DataObject) -> None:
    entry = dict(PARAMS)
    for _ in range(data.draw(st.integers(0, 2))):
        entry[data.draw(st.sampled_from([*PARAMS, "other"]))] = data.draw(JSON)
    for hawk in (entry, data.draw(JSON)):
        try:
            parsed = parse_params({"do_remote_prefill": True, HAWK_KEY: hawk})
        except ProtocolError:
            continue
        assert isinstance(parsed, TransferParams) and 1 <= len(parsed.ranks) <= 64
