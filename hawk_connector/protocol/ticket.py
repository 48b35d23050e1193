"""Ticket: what a request's kv_transfer_params say of a transfer, checked, with the digest of decode's own request.

The dict's outer shape is NIXL's (``do_remote_prefill``, ``do_remote_decode``), so that existing routers work; HAWK's
own fields are under the key ``hawk``.  Whatever stands in it may come from a client: it is typed, bounded and never
believed beyond what the prefill side confirms.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from ..errors import ProtocolError
from .messages import PROTOCOL_VERSION, Count, Digest, Id, Text

__all__ = ["HAWK_KEY", "RankAddress", "Ticket", "TransferParams", "parse_params", "remote_decode_wanted"]

HAWK_KEY = "hawk"


class RankAddress(msgspec.Struct, frozen=True):
    """Side channel (``host:port``) and epoch of one prefill rank."""

    address: Text
    epoch: Id


class TransferParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """HAWK's part of the parameters.  ``first_token`` is reserved: the token that prefill sampled."""

    v: Count
    transfer: Id
    tokens: Annotated[int, msgspec.Meta(ge=1, le=1 << 24)]
    ranks: Annotated[tuple[RankAddress, ...], msgspec.Meta(min_length=1, max_length=64)]
    first_token: int | None = None


class Ticket(msgspec.Struct, frozen=True):
    """A transfer that decode wants: ``claim`` is the nonce under which it asks, ``digest`` of its own tokens."""

    transfer: Id
    claim: Id
    digest: Digest
    tokens: int
    ranks: tuple[RankAddress, ...]


def remote_decode_wanted(params: Any) -> bool:
    """Whether a request on the prefill side asks for its KV to be kept for a decode side."""
    return isinstance(params, dict) and params.get("do_remote_decode") is True


def parse_params(params: Any) -> TransferParams | None:
    """The transfer that a request on the decode side names; None where it names none.

    ProtocolError where it names one but is malformed: the request then computes its own KV.
    """
    if not isinstance(params, dict) or params.get("do_remote_prefill") is not True:
        return None
    if HAWK_KEY not in params:
        raise ProtocolError(
            f"kv_transfer_params: expected a '{HAWK_KEY}' entry as HAWK's prefill side writes it, got none; "
            "send the prefill response's kv_transfer_params on verbatim"
        )
    try:
        parsed = msgspec.convert(params[HAWK_KEY], TransferParams, strict=True)
    except msgspec.ValidationError as error:
        raise ProtocolError(
            f"kv_transfer_params['{HAWK_KEY}']: {error}; send the prefill response's on verbatim"
        ) from error
    if parsed.v != PROTOCOL_VERSION:
        raise ProtocolError(
            f"kv_transfer_params['{HAWK_KEY}'].v: expected {PROTOCOL_VERSION}, got {parsed.v}; "
            "install the same release of hawk-connector on both sides"
        )
    addresses = [rank.address for rank in parsed.ranks]
    if len(set(addresses)) < len(addresses):
        raise ProtocolError(f"kv_transfer_params['{HAWK_KEY}'].ranks: expected each rank once, got {addresses}")
    return parsed
