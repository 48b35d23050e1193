"""The connector's configuration: the dict under ``kv_connector_extra_config``, checked once at start.

Each side has one flat struct. Units are in the names (``_s`` seconds, ``_bytes``). The types and the
``Meta`` of each field are the only source of its limits and meaning: error messages and
``docs/configuration.md`` are made from them.
"""

from __future__ import annotations

import difflib
from typing import Annotated, Any, Literal, overload

import msgspec
from msgspec import Meta

from .address import Address, is_loopback, is_wildcard
from .errors import ConfigError

GIB = 1024**3

PREFILL_ROLE = "kv_producer"
DECODE_ROLE = "kv_consumer"

# Mooncake 0.3.13's TCP transport queues 1024 requests per peer and holds 1024 more back; a batch past both
# fails as a whole, with some of its pieces written later. One full queue is the most that is always safe.
MAX_SEGMENTS_IN_FLIGHT = 1024

# A day: nothing that HAWK holds may be without a deadline, and JSON readers admit Infinity.
Seconds = Annotated[float, Meta(gt=0, le=86400)]
Count = Annotated[int, Meta(ge=1)]
Bytes = Annotated[int, Meta(ge=1)]


class HawkConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What both sides have. Use :meth:`parse`; direct construction skips the limits of single fields."""

    protocol: Annotated[
        Literal["tcp", "rdma", "local"],
        Meta(
            description="What carries the KV. `rdma` needs an RDMA device, and is an error without one. `local` reads "
            "another process of this machine directly: several times faster than `tcp` over loopback. The decode "
            "side's value says how it reads; a prefill side with `tcp` or `rdma` can be read by `local` too."
        ),
    ] = "tcp"
    side_channel_host: Annotated[
        str,
        Meta(
            min_length=1,
            description="Address that the side channel (control messages) listens on. Anything but loopback "
            "needs `curve_key_file` and `curve_known_keys_file`.",
        ),
    ] = "127.0.0.1"
    side_channel_port: Annotated[
        int, Meta(ge=0, le=65535, description="Port of the side channel; 0 takes any free one.")
    ] = 0
    advertise_host: Annotated[
        str | None,
        Meta(
            description="Host name or address under which peers reach this side, for the side channel and "
            "for the KV. Default: `side_channel_host`."
        ),
    ] = None
    curve_key_file: Annotated[
        str | None,
        Meta(description="This side's CURVE key pair (`hawk keys` writes one). Only its owner may read it."),
    ] = None
    curve_known_keys_file: Annotated[
        str | None,
        Meta(
            description="Public keys of the peers, one `name key` a line. Whoever connects must have a "
            "listed key; a side that is connected to is looked up by its `host:port` or `host`. Read again "
            "when it changes."
        ),
    ] = None
    model_id: Annotated[
        str | None,
        Meta(
            description="Says that both sides serve the same weights although their model paths or configs "
            "differ: set the same value on both. Default: a fingerprint of the model's config and weights; needed "
            "where the weights cannot be seen at start (GGUF, a remote loader)."
        ),
    ] = None
    transfer_timeout_s: Annotated[
        int,
        Meta(ge=5, le=3600, description="After how many seconds without an answer a read counts as failed."),
    ] = 30
    max_connections: Annotated[
        Count,
        Meta(description="Connections that the side channel takes at once; further ones are closed."),
    ] = 256
    max_messages_per_s: Annotated[
        Count,
        Meta(description="Messages a second from one connection, after twice as many at once; more are dropped."),
    ] = 2000
    stall_report_s: Annotated[
        Seconds,
        Meta(
            description="A transfer that has not moved for so long is written to the log with its whole state, and "
            "again whenever it has stood still for twice as long."
        ),
    ] = 15.0
    parcel_digest: Annotated[
        bool,
        Meta(
            description="Compare a digest of each parcel's bytes as they were packed with one as they came: a "
            "difference fails the load. One side's `true` is enough for all that it exchanges. Costs a pass over the "
            "bytes on each side."
        ),
    ] = False
    status_history: Annotated[Count, Meta(description="How many recent transfers the status report remembers.")] = 256

    def __post_init__(self) -> None:
        self._check_side_channel()

    @overload
    @staticmethod
    def parse(extra_config: dict[str, Any], role: Literal["kv_producer"]) -> PrefillConfig: ...
    @overload
    @staticmethod
    def parse(extra_config: dict[str, Any], role: Literal["kv_consumer"]) -> DecodeConfig: ...
    @overload
    @staticmethod
    def parse(extra_config: dict[str, Any], role: str) -> PrefillConfig | DecodeConfig: ...

    @staticmethod
    def parse(extra_config: dict[str, Any], role: str) -> PrefillConfig | DecodeConfig:
        """The checked configuration of ``role`` (vLLM's ``kv_role``).

        Raises ConfigError for a role that is neither side, an unknown key (naming the nearest right one), a
        key of the other side, a value of another type or out of its limits, and values that contradict.
        """
        if role == PREFILL_ROLE:
            return PrefillConfig(**_checked(extra_config, PrefillConfig, DecodeConfig, role))
        if role == DECODE_ROLE:
            return DecodeConfig(**_checked(extra_config, DecodeConfig, PrefillConfig, role))
        raise ConfigError(
            "kv_role does not name one side",
            expected=f"{PREFILL_ROLE!r} (prefill side) or {DECODE_ROLE!r} (decode side)",
            got=repr(role),
            fix="Run one vLLM instance for each; HAWK's two sides keep their caches in different orders, so "
            "one instance cannot be both.",
        )

    @property
    def peer_host(self) -> str:
        """The host under which peers reach this side."""
        return self.advertise_host if self.advertise_host is not None else self.side_channel_host

    @property
    def uses_curve(self) -> bool:
        """Whether the side channel is encrypted and its peers are checked by their keys."""
        return self.curve_key_file is not None

    def _check_side_channel(self) -> None:
        if (self.curve_key_file is None) != (self.curve_known_keys_file is None):
            given, missing = (
                ("curve_key_file", "curve_known_keys_file")
                if self.curve_known_keys_file is None
                else ("curve_known_keys_file", "curve_key_file")
            )
            raise ConfigError(f"{given} is set without {missing}", fix="Set both, or neither.")
        if not is_loopback(self.side_channel_host) and not self.uses_curve:
            raise ConfigError(
                f"side_channel_host {self.side_channel_host!r} is not loopback and no CURVE keys are set",
                fix="Anyone who reaches that port could take KV or stop transfers. Make a key pair with "
                "`hawk keys FILE`, set curve_key_file and curve_known_keys_file, or use side_channel_host 127.0.0.1.",
            )
        if is_wildcard(self.peer_host):
            raise ConfigError(
                f"no host to give to peers: {self.peer_host!r} stands for every interface",
                fix="Set advertise_host to the name or address under which peers reach this machine.",
            )


class PrefillConfig(HawkConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The prefill side (``kv_role: kv_producer``)."""

    send_buffer_bytes: Annotated[
        Bytes,
        Meta(description="Memory, on each prefill rank, in which packed parcels wait to be pulled."),
    ] = GIB
    parcel_tokens: Annotated[
        Count,
        Meta(description="Tokens that are packed, pulled and released as one unit; rounded to whole decode blocks."),
    ] = 512
    parcel_bytes: Annotated[
        Bytes,
        Meta(
            description="Bytes that a parcel has at most as it is pulled from one rank, whatever `parcel_tokens` says, "
            "so that of large models too one parcel is read while the next is packed. One block is always allowed."
        ),
    ] = 32 * 1024**2
    pack_threads: Annotated[
        int,
        Meta(
            ge=1,
            le=64,
            description="Threads that pack a parcel together, where the cache is in host memory. They take cores from "
            "vLLM's own computing.",
        ),
    ] = 1
    lease_s: Annotated[
        Seconds,
        Meta(description="How long an offered parcel is kept with no sign of life from its claimant."),
    ] = 30.0
    buffer_wait_s: Annotated[
        Seconds,
        Meta(
            description="How long a finished request may hold its blocks while it waits for send-buffer "
            "space or for a decode side to appear; after that its transfer is given up."
        ),
    ] = 60.0
    verdict_keep_s: Annotated[
        Seconds,
        Meta(description="How long the verdict on a finished parcel is remembered for a repeated question."),
    ] = 60.0
    max_transfers: Annotated[
        Count, Meta(description="Transfers kept at once; further requests are not offered to decode.")
    ] = 4096
    shutdown_drain_s: Annotated[
        float,
        Meta(
            ge=0,
            le=86400,
            description="How long vLLM's shutdown waits for what is offered or being read. Needs vLLM's own "
            "`--shutdown-timeout`, which must be longer: without it vLLM kills its workers at once.",
        ),
    ] = 0.0
    max_peers: Annotated[Count, Meta(description="Decode sides that may be paired at once.")] = 64
    max_transfers_per_peer: Annotated[
        Count,
        Meta(description="Transfers that one decode side may have claimed at once; its further requests compute."),
    ] = 1024
    peer_buffer_share: Annotated[
        float,
        Meta(
            gt=0,
            le=1,
            description="Share of the send buffer that one decode side's transfers may hold while others are paired, "
            "so that one that reads slowly does not starve them. One parcel is always allowed.",
        ),
    ] = 0.5


# (shorter, longer, why) of the decode side's times. What concerns both sides is checked when they pair: a lease must
# hold two renewals, and a verdict be kept for longer than the longest pause before a Done is repeated.
DEADLINE_ORDER: tuple[tuple[str, str, str], ...] = (
    ("resend_s", "hello_deadline_s", "a lost Hello must be sent again before that"),
    ("resend_s", "admission_deadline_s", "a lost Pull must be sent again before that"),
    ("admission_deadline_s", "load_deadline_s", "a load begins with its admission"),
    ("admission_deadline_s", "claim_hold_s", "a claim is held once it is admitted"),
    ("renew_s", "claim_hold_s", "leases are renewed while a claim waits for blocks"),
    ("renew_s", "load_deadline_s", "leases are renewed while a load runs"),
)


class DecodeConfig(HawkConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The decode side (``kv_role: kv_consumer``)."""

    mode: Annotated[
        Literal["hawk", "direct", "host"],
        Meta(
            description="How KV moves; a prefill side serves every mode, and several at once. `hawk`: packed by the "
            "prefill side in the device's byte order, pulled into its banks. `direct`: both sides keep their cache "
            "alike (like models, backends, dtypes and block sizes, one rank each): read from vLLM's cache into vLLM's "
            "cache. `host`: pulled as the prefill side keeps it and converted by this side's host: what one does "
            "without HAWK, for comparison."
        ),
    ] = "hawk"
    peers: Annotated[
        tuple[str, ...],
        Meta(
            description="Prefill side channels (`host:port`) to pair with at start. Others are paired when a "
            "request first names them. These are always allowed."
        ),
    ] = ()
    allowed_peer_hosts: Annotated[
        tuple[str, ...] | None,
        Meta(
            description="Prefill sides that a request may name beside `peers`, as `host` or `host:port`. A request "
            "that names another computes its own KV. Default: none where `peers` is set, else any port of this "
            "machine (127.0.0.1, ::1, localhost)."
        ),
    ] = None
    hello_deadline_s: Annotated[Seconds, Meta(description="How long a prefill side has to answer a pairing.")] = 5.0
    admission_deadline_s: Annotated[
        Seconds, Meta(description="How long a prefill side has to answer a request's first Pull.")
    ] = 10.0
    claim_hold_s: Annotated[
        Seconds,
        Meta(
            description="How long a claimed request may wait for blocks while the prefill side keeps its KV; after "
            "that it computes its own."
        ),
    ] = 120.0
    load_deadline_s: Annotated[
        Seconds, Meta(description="How long a request's whole load may take before it counts as failed.")
    ] = 120.0
    renew_s: Annotated[
        Seconds,
        Meta(
            description="How often leases are renewed. Must be shorter than the prefill side's `lease_s` "
            "(checked at pairing)."
        ),
    ] = 5.0
    resend_s: Annotated[Seconds, Meta(description="After how long an unanswered control message is sent again.")] = 0.5
    max_segments_per_batch: Annotated[
        int,
        Meta(
            ge=1,
            le=MAX_SEGMENTS_IN_FLIGHT,
            description="Segments handed to the transfer engine in one call. Mooncake's TCP transport queues "
            "1024 per peer and fails whole batches beyond that.",
        ),
    ] = MAX_SEGMENTS_IN_FLIGHT
    circuit_failures: Annotated[
        Count,
        Meta(
            description="After how many failures in a row (reads, loads, silence) requests do not wait for a prefill "
            "rank any more: they compute, or fail at once."
        ),
    ] = 3
    circuit_open_s: Annotated[
        Seconds,
        Meta(
            description="After how long one request tries a rank again that answers but fails; doubled each time that "
            "it fails. One that was silent is tried as soon as it answers."
        ),
    ] = 5.0
    circuit_open_max_s: Annotated[Seconds, Meta(description="The most that `circuit_open_s` is doubled to.")] = 60.0
    read_threads: Annotated[int, Meta(ge=1, le=64, description="Threads that run reads, for each prefill rank.")] = 2
    landing: Annotated[
        str | None,
        Meta(description="Name of the landing provider (an NPU plugin). Default: the only one installed."),
    ] = None
    load_whole_blocks: Annotated[
        bool,
        Meta(
            description="Loads only whole blocks and computes the tokens of a prompt's last one here, for devices that "
            "continue a prompt at a block's start only. The overlay on Tenstorrent's plugin sets it."
        ),
    ] = False

    def __post_init__(self) -> None:
        self._check_side_channel()
        if self.load_whole_blocks and self.parcel_digest:
            raise ConfigError(
                "load_whole_blocks and parcel_digest are both set",
                fix="Set one of them: a digest is of a whole parcel, and a prompt's last block is not read.",
            )
        self._check_mode()
        for peer in self.peers:
            try:
                Address.parse(peer)
            except ConfigError as error:
                raise ConfigError("peers", expected=error.expected, got=error.got) from None
        for shorter, longer, why in DEADLINE_ORDER:
            low, high = float(getattr(self, shorter)), float(getattr(self, longer))
            if low >= high:
                raise ConfigError(
                    f"{shorter} must be shorter than {longer}",
                    expected=f"{shorter} < {high:g} s",
                    got=f"{low:g} s",
                    fix=f"Lower {shorter} or raise {longer}: {why}.",
                )
        if self.circuit_open_s > self.circuit_open_max_s:
            raise ConfigError(
                "circuit_open_s must not be longer than circuit_open_max_s",
                expected=f"at most {self.circuit_open_max_s:g} s",
                got=f"{self.circuit_open_s:g} s",
                fix="Lower circuit_open_s or raise circuit_open_max_s.",
            )

    def _check_mode(self) -> None:
        """Keys that have no meaning in mode direct."""
        if self.mode != "direct":
            return
        if self.parcel_digest:
            raise ConfigError(
                "mode 'direct' with parcel_digest",
                fix="Set parcel_digest to false, or mode to hawk or host: a digest is of a packed parcel, and in mode "
                "direct nothing is packed.",
            )
        if self.landing is not None:
            raise ConfigError(
                "mode 'direct' with a landing",
                expected="none: it lands in vLLM's own cache",
                got=repr(self.landing),
                fix="Leave landing out, or set mode to hawk or host.",
            )

    def allows_peer(self, address: Address) -> bool:
        """Whether a request may name the prefill side at ``address`` (its parameters are untrusted)."""
        allowed = self.allowed_peer_hosts
        if allowed is None:
            allowed = () if self.peers else ("127.0.0.1", "::1", "localhost")
        entries = (*allowed, *self.peers)
        return address.host in entries or str(address) in entries


def field_types(struct: type[HawkConfig]) -> dict[str, msgspec.inspect.Type]:
    """Each key of ``struct`` with its inspected type (limits included, description stripped)."""
    info = msgspec.inspect.type_info(struct)
    assert isinstance(info, msgspec.inspect.StructType)
    return {field.name: _bare(field.type) for field in info.fields}


def describe_type(kind: msgspec.inspect.Type) -> str:
    """What a value of this type may be, in words: "integer >= 1", "number > 0", "'tcp' or 'rdma'"."""
    inspect = msgspec.inspect
    kind = _bare(kind)
    if isinstance(kind, inspect.UnionType):
        return " or ".join(describe_type(member) for member in kind.types)
    if isinstance(kind, inspect.LiteralType):
        return " or ".join(repr(value) for value in kind.values)
    if isinstance(kind, inspect.VarTupleType):
        return f"list of {describe_type(kind.item_type)}s"
    if isinstance(kind, inspect.NoneType):
        return "null"
    if isinstance(kind, inspect.BoolType):
        return "true or false"
    if isinstance(kind, inspect.StrType):
        return "non-empty string" if kind.min_length else "string"
    if isinstance(kind, (inspect.IntType, inspect.FloatType)):
        bounds = [
            f"{sign} {bound:g}" if isinstance(bound, float) else f"{sign} {bound}"
            for sign, bound in ((">", kind.gt), (">=", kind.ge), ("<", kind.lt), ("<=", kind.le))
            if bound is not None
        ]
        word = "integer" if isinstance(kind, inspect.IntType) else "number"
        return " ".join([word, " and ".join(bounds)]).rstrip()
    raise TypeError(f"no words for configuration type {kind!r}")


def _bare(kind: msgspec.inspect.Type) -> msgspec.inspect.Type:
    return _bare(kind.type) if isinstance(kind, msgspec.inspect.Metadata) else kind


def _checked(
    extra_config: dict[str, Any],
    own: type[HawkConfig],
    other: type[HawkConfig],
    role: str,
) -> dict[str, Any]:
    """``extra_config`` with every value converted to its field's type; raises ConfigError."""
    fields = {field.name: field for field in msgspec.structs.fields(own)}
    kinds = field_types(own)
    values: dict[str, Any] = {}
    for key, value in extra_config.items():
        if key not in fields:
            raise _unknown_key(key, tuple(fields), other.__struct_fields__, role)
        try:
            values[key] = msgspec.convert(value, fields[key].type)
        except msgspec.ValidationError:
            raise ConfigError(
                f"kv_connector_extra_config key {key!r}", expected=describe_type(kinds[key]), got=repr(value)
            ) from None
    return values


def _unknown_key(key: str, own: tuple[str, ...], other: tuple[str, ...], role: str) -> ConfigError:
    if key in other:
        owner = DECODE_ROLE if role == PREFILL_ROLE else PREFILL_ROLE
        return ConfigError(
            f"kv_connector_extra_config key {key!r} belongs to the other side ({owner}), this one is {role}",
            fix=f"Move it to the instance with kv_role {owner}.",
        )
    near = difflib.get_close_matches(str(key), own, n=1, cutoff=0.5)
    fix = f"Did you mean {near[0]!r}?" if near else "Known keys: " + ", ".join(sorted(own)) + "."
    return ConfigError(f"unknown kv_connector_extra_config key {key!r}", fix=fix)
