"""What the two sides say to each other: typed, bounded, never pickled.

Every message is a msgpack map with its type's name under ``type``.  ``epoch`` is the sender's, ``to`` the epoch that
the sender believes the receiver to have: a message for another life of the receiver changes nothing but is answered
with Stale.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec

from ..errors import Mismatch, ProtocolError
from ..metrics import TransferReport
from ..plan.pairing import DecodeFacts, PrefillFacts
from .snapshot import TransferSnapshot

__all__ = [
    "DRAIN_REFUSED",
    "MAX_BLOCKS_NAMED",
    "MAX_MESSAGE_BYTES",
    "PROTOCOL_VERSION",
    "Abort",
    "Accepted",
    "Claimed",
    "DecodeMessage",
    "Done",
    "Drain",
    "Draining",
    "ForeignHello",
    "Gone",
    "GoneReason",
    "Hello",
    "Message",
    "PairingStatus",
    "PrefillMessage",
    "Pull",
    "Ready",
    "Refused",
    "Renew",
    "Renewed",
    "Stale",
    "Status",
    "StatusQuery",
    "Welcome",
    "decode_message",
    "encode",
    "foreign_hello",
]

PROTOCOL_VERSION = 2
MAX_MESSAGE_BYTES = 1 << 20
MAX_BLOCKS_NAMED = 1 << 16  # in one Ready; they fit a message
_MAX_REPEATED = 300
DRAIN_REFUSED = (
    "only the owner of this side's own key pair may drain it: give the key file that the side itself has "
    "(curve_key_file in its configuration)"
)

# \Z and not $, which would let a newline through.
Id = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{32}\Z")]
Digest = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
ParcelDigest = Annotated[str, msgspec.Meta(pattern=r"^([0-9a-f]{32})?\Z")]
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 24)]
BlockId = Annotated[int, msgspec.Meta(ge=0, le=(1 << 32) - 1)]
Bytes64 = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Text = Annotated[str, msgspec.Meta(max_length=1024)]
Seconds = Annotated[float, msgspec.Meta(gt=0, le=86400)]

GoneReason = Literal[
    "unknown", "claimed", "digest", "expired", "aborted", "layout", "failed", "released", "draining", "busy"
]


class _Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag_field="type"):
    """Defaults are left out on the wire, so that an older peer stumbles only over what is really used."""

    epoch: Id


class _ToPeer(_Message, frozen=True):
    to: Id


class _OfClaim(_ToPeer, frozen=True):
    transfer: Id
    claim: Id


# --- decode side to prefill side


class Hello(_Message, frozen=True, tag="hello"):
    """Asks for a pairing; repeated as a sign of life.  ``number`` rises; the answer says which Hello it answers.

    ``digests``: each Ready shall carry its parcel's digest.
    """

    version: Count
    facts: DecodeFacts
    number: Count = 0
    digests: bool = False

    def __post_init__(self) -> None:
        facts = self.facts
        _check_texts(model=facts.model, dtype=facts.shape.dtype, codec=facts.layout.codec)


class Pull(_OfClaim, frozen=True, tag="pull"):
    """Claims a transfer (or repeats the claim).

    With ``deliver`` the sender also asks for the parcels, blocks below ``first_block`` left out; without, it only
    makes sure of the claim (the decode scheduler, before it admits the request).
    """

    digest: Digest
    tokens: Count
    deliver: bool
    first_block: Count = 0


class Renew(_OfClaim, frozen=True, tag="renew"):
    """Keeps the lease of a claimed transfer alive."""


class Done(_OfClaim, frozen=True, tag="done"):
    """The parcel's bytes have been read; they count only once Accepted comes back."""

    parcel: Count
    generation: Count


class Abort(_OfClaim, frozen=True, tag="abort"):
    """The claimant wants no more of the transfer and none of its reads is running."""

    digest: Digest


class StatusQuery(_Message, frozen=True, tag="status?"):
    """Asks either side how it is."""


class Drain(_Message, frozen=True, tag="drain"):
    """Tells either side to finish what it owes and to take nothing new; repeated as a question how far it is.

    Only its owner may: who has its own key pair, or, where it has no keys, who reaches its loopback address.
    """


# --- prefill side to decode side


class Welcome(_ToPeer, frozen=True, tag="welcome"):
    """The pairing is accepted.  ``engine``: transfer-engine session of this rank.

    ``process``: its session for readers on the same machine, empty where there is none.  ``cache``: address of each
    layer's cache, for a peer in mode direct only.
    """

    version: Count
    facts: PrefillFacts
    engine: Text
    lease_s: Seconds
    number: Count = 0
    verdict_keep_s: Seconds = 60.0
    process: Text = ""
    cache: Annotated[tuple[Bytes64, ...], msgspec.Meta(max_length=4096)] = ()

    def __post_init__(self) -> None:
        _check_texts(model=self.facts.model, dtype=self.facts.shape.dtype)


class Refused(_ToPeer, frozen=True, tag="refused"):
    """The pairing is refused, with every differing field."""

    mismatches: Annotated[tuple[Mismatch, ...], msgspec.Meta(max_length=32)]
    number: Count = 0


class Stale(_ToPeer, frozen=True, tag="stale"):
    """The message was for another epoch, or its sender is not paired: say Hello again."""


class Claimed(_OfClaim, frozen=True, tag="claimed"):
    """The claim holds.  The transfer's ``blocks`` are cut into parcels of ``parcel_blocks``, the last one shorter.

    ``ended_ago_s``: how long ago the prefill request had ended when this was sent; None while it has not.
    """

    blocks: Count
    parcel_blocks: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
    ended_ago_s: Annotated[float, msgspec.Meta(ge=0, le=86400)] | None = None


class Ready(_OfClaim, frozen=True, tag="ready"):
    """A parcel can be read: ``nbytes`` at ``address`` of the prefill rank's engine session.

    ``digest``: of the blocks that the claimant wants (see ``plan.parcel_digest``); empty where neither side asks for
    it.  ``blocks``: in mode direct the ids of the parcel's blocks in the prefill side's cache, in the place of an
    address.
    """

    parcel: Count
    generation: Count
    address: Bytes64
    nbytes: Bytes64
    digest: ParcelDigest = ""
    blocks: Annotated[tuple[BlockId, ...], msgspec.Meta(max_length=MAX_BLOCKS_NAMED)] = ()


class Renewed(_OfClaim, frozen=True, tag="renewed"):
    """The lease was extended."""


class Accepted(_OfClaim, frozen=True, tag="accepted"):
    """The parcel was still on offer when Done came: its bytes are good."""

    parcel: Count
    generation: Count


class Gone(_OfClaim, frozen=True, tag="gone"):
    """Nothing more comes of this claim, and bytes read but not accepted must not be used."""

    reason: GoneReason


class PairingStatus(msgspec.Struct, frozen=True):
    """One peer as seen from here: ``state`` is paired, refused, connecting or down; ``circuit`` closed, open or
    half_open."""

    peer: Text
    state: Text
    detail: Text
    circuit: Text = "closed"


class Status(_Message, frozen=True, tag="status"):
    """How a side is.  ``held``: everything it holds by name; all zero when idle.

    ``transfers``: those that live, the oldest first.  ``unready``: why the side cannot serve all that it should, empty
    where it can.  ``dropped``: messages dropped since its start, by reason.  ``left_out``: how many ``pairings``,
    ``transfers`` and ``reports`` there are beyond those in this message.
    """

    role: Text
    held: dict[Text, int]
    pairings: tuple[PairingStatus, ...]
    reports: tuple[TransferReport, ...]
    transfers: tuple[TransferSnapshot, ...] = ()
    unready: tuple[Text, ...] = ()
    dropped: dict[Text, int] = msgspec.field(default_factory=dict)
    left_out: dict[Text, int] = msgspec.field(default_factory=dict)
    uptime_s: float = 0.0


class Draining(_Message, frozen=True, tag="draining"):
    """The answer to Drain.  ``held``: what is still owed, by name; all of it is zero when the side may leave.

    ``refused``: why it does not drain, empty where it does.
    """

    role: Text
    held: dict[Text, int] = msgspec.field(default_factory=dict)
    refused: Text = ""


def _check_texts(**texts: str) -> None:
    """Refused repeats them to their sender and must still fit a message."""
    for name, text in texts.items():
        if len(text) > 1024:
            raise ValueError(f"expected {name} of at most 1024 characters, got {len(text)}")


DecodeMessage = Hello | Pull | Renew | Done | Abort | StatusQuery | Drain
PrefillMessage = Welcome | Refused | Stale | Claimed | Ready | Renewed | Accepted | Gone | Status | Draining
Message = DecodeMessage | PrefillMessage

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    """The message as bytes."""
    return _encoder.encode(message)


class ForeignHello(msgspec.Struct, frozen=True, tag_field="type", tag="hello"):
    """What can be read of a Hello of any protocol version."""

    epoch: Id
    version: Count
    number: Count = 0


_foreign_decoder = msgspec.msgpack.Decoder(ForeignHello)


def foreign_hello(data: bytes) -> ForeignHello | None:
    """The Hello of another protocol version in ``data``, or None: it is to be refused by name, not dropped."""
    if len(data) > MAX_MESSAGE_BYTES:
        return None
    try:
        hello = _foreign_decoder.decode(data)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return None
    return hello if hello.version != PROTOCOL_VERSION else None


def decode_message(data: bytes, allowed: Sequence[type] | None = None) -> Message:
    """The message in ``data``; ProtocolError where it is too large, malformed, or none of ``allowed``."""
    if len(data) > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"expected a message of at most {MAX_MESSAGE_BYTES} bytes, got {len(data)}: dropped")
    try:
        message = _decoder.decode(data)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        # The decoder repeats some values, which a peer chose.
        said = ascii(str(error)[:_MAX_REPEATED])[1:-1][:_MAX_REPEATED]
        raise ProtocolError(f"expected a HAWK protocol {PROTOCOL_VERSION} message, got {said}: dropped") from error
    if allowed is not None and type(message) not in allowed:
        names = ", ".join(t.__name__ for t in allowed)
        raise ProtocolError(f"expected one of {names}, got {type(message).__name__}: dropped")
    return message
