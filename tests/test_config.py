"""The configuration: what is accepted, and what each refusal names."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hawk_connector.address import Address, is_loopback
from hawk_connector.cli.config_reference import reference
from hawk_connector.config import DEADLINE_ORDER, DecodeConfig, HawkConfig, PrefillConfig
from hawk_connector.errors import ConfigError

P, D = "kv_producer", "kv_consumer"
CURVE = {"curve_key_file": "k", "curve_known_keys_file": "n"}


def refusal(config: dict[str, Any], role: str) -> str:
    with pytest.raises(ConfigError) as caught:
        HawkConfig.parse(config, role)
    return str(caught.value)


def test_defaults() -> None:
    prefill, decode = HawkConfig.parse({}, P), HawkConfig.parse({}, D)
    assert isinstance(prefill, PrefillConfig)
    assert isinstance(decode, DecodeConfig)
    assert (prefill.send_buffer_bytes, prefill.parcel_tokens, prefill.lease_s) == (1073741824, 512, 30.0)
    assert (decode.max_segments_per_batch, decode.renew_s, decode.peers) == (1024, 5.0, ())
    assert (prefill.protocol, prefill.side_channel_host, prefill.peer_host) == (
        "tcp",
        "127.0.0.1",
        "127.0.0.1",
    )


def test_json_types() -> None:
    decode = HawkConfig.parse({"peers": ["[::1]:80", "prefill-0:18550"], "renew_s": 1}, D)
    assert isinstance(decode, DecodeConfig)
    assert decode.peers == ("[::1]:80", "prefill-0:18550")
    assert decode.renew_s == 1.0


@pytest.mark.parametrize(
    ("config", "role", "words"),
    [
        ({"lease": 3}, P, ["'lease'", "Did you mean 'lease_s'?"]),
        ({"side_chanel_port": 3}, D, ["'side_chanel_port'", "Did you mean 'side_channel_port'?"]),
        ({"zzz": 3}, P, ["'zzz'", "Known keys", "lease_s"]),
        ({"lease_s": 3}, D, ["'lease_s'", "kv_producer", "this one is kv_consumer"]),
        ({"peers": []}, P, ["'peers'", "kv_consumer", "this one is kv_producer"]),
        ({"lease_s": "3"}, P, ["'lease_s'", "number > 0", "got '3'"]),
        ({"lease_s": 0}, P, ["'lease_s'", "number > 0", "got 0"]),
        ({"lease_s": float("inf")}, P, ["'lease_s'", "<= 86400", "got inf"]),
        ({"lease_s": float("nan")}, P, ["'lease_s'", "got nan"]),
        ({"parcel_tokens": 1.5}, P, ["'parcel_tokens'", "integer >= 1", "got 1.5"]),
        ({"side_channel_port": True}, P, ["'side_channel_port'", "integer >= 0 and <= 65535", "got True"]),
        ({"side_channel_port": 65536}, P, ["'side_channel_port'", "got 65536"]),
        ({"transfer_timeout_s": 4}, D, ["'transfer_timeout_s'", "integer >= 5", "got 4"]),
        ({"max_segments_per_batch": 1025}, D, ["'max_segments_per_batch'", "<= 1024", "got 1025"]),
        ({"protocol": "udp"}, P, ["'protocol'", "'local' or 'rdma' or 'tcp'", "got 'udp'"]),
        ({"mode": "fast"}, D, ["'mode'", "'direct' or 'hawk' or 'host'", "got 'fast'"]),
        ({"mode": "direct"}, P, ["'mode'", "belongs to the other side", "kv_consumer"]),
        ({"mode": "direct", "parcel_digest": True}, D, ["'direct'", "parcel_digest", "hawk or host"]),
        ({"mode": "direct", "landing": "tt_plugin"}, D, ["'direct'", "landing", "vLLM's own cache"]),
        ({"peers": "a:1"}, D, ["'peers'", "list of strings", "got 'a:1'"]),
        ({"peers": ["a"]}, D, ["peers", "host:port", "got 'a'"]),
        ({"resend_s": 5}, D, ["resend_s < 5 s", "got 5 s", "hello_deadline_s"]),
        ({"resend_s": 4, "admission_deadline_s": 3}, D, ["resend_s < 3 s", "admission_deadline_s"]),
        ({"admission_deadline_s": 120}, D, ["admission_deadline_s < 120 s", "load_deadline_s"]),
        ({"renew_s": 150}, D, ["renew_s < 120 s", "claim_hold_s"]),
        ({"circuit_open_s": 61}, D, ["circuit_open_s must not be longer", "at most 60 s", "got 61 s"]),
        ({"peer_buffer_share": 1.5}, P, ["'peer_buffer_share'", "> 0 and <= 1", "got 1.5"]),
        ({"shutdown_drain_s": -1}, P, ["'shutdown_drain_s'", ">= 0", "got -1"]),
        ({"side_channel_host": "10.0.0.1"}, P, ["'10.0.0.1' is not loopback", "curve_key_file", "`hawk keys FILE`"]),
        ({"side_channel_host": "prefill-0"}, D, ["'prefill-0' is not loopback"]),
        ({"curve_key_file": "k"}, P, ["curve_key_file is set without curve_known_keys_file"]),
        ({"curve_known_keys_file": "k"}, P, ["curve_known_keys_file is set without curve_key_file"]),
        ({"side_channel_host": "0.0.0.0", **CURVE}, P, ["'0.0.0.0'", "advertise_host"]),
        ({}, "kv_both", ["kv_producer", "kv_consumer", "'kv_both'"]),
    ],
)
def test_refusals_name_what_to_mend(config: dict[str, Any], role: str, words: list[str]) -> None:
    text = refusal(config, role)
    assert [word for word in words if word not in text] == [], text


def test_keys_open_other_interfaces() -> None:
    config = HawkConfig.parse({"side_channel_host": "::", "advertise_host": "node-1", **CURVE}, P)
    assert config.uses_curve
    assert config.peer_host == "node-1"


def test_allowed_peers_are_hosts_or_exact_addresses() -> None:
    config = HawkConfig.parse({"allowed_peer_hosts": ["a", "b:1", "[fd00::1]:2"], "peers": ["c:3"]}, D)
    assert isinstance(config, DecodeConfig)
    asked = [
        ("a", 9),
        ("b", 1),
        ("b", 2),
        ("c", 3),
        ("c", 4),
        ("fd00::1", 2),
        ("fd00::1", 3),
        ("127.0.0.1", 1),
    ]
    allowed = [address for address in asked if config.allows_peer(Address(*address))]
    assert allowed == [("a", 9), ("b", 1), ("c", 3), ("fd00::1", 2)]


@pytest.mark.parametrize(
    ("config", "allowed"),
    [
        ({}, ["127.0.0.1:1", "127.0.0.1:9", "[::1]:1", "localhost:1"]),
        ({"peers": ["p:7", "127.0.0.1:9"]}, ["p:7", "127.0.0.1:9"]),
        ({"peers": ["p:7"], "allowed_peer_hosts": ["localhost"]}, ["p:7", "localhost:1"]),
        ({"allowed_peer_hosts": []}, []),
    ],
    ids=["nothing said", "peers", "both", "nobody"],
)
def test_whom_a_request_may_name_by_default(config: dict[str, object], allowed: list[str]) -> None:
    """Where the peers are known, a client cannot have this process knock at other ports of the machine."""
    parsed = HawkConfig.parse(config, D)
    assert isinstance(parsed, DecodeConfig)
    asked = ["127.0.0.1:1", "127.0.0.1:9", "[::1]:1", "localhost:1", "p:7", "p:8", "10.0.0.1:1"]
    found = {text for text in asked if parsed.allows_peer(Address.parse(text))}
    assert found == set(allowed)


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [("a:1", "a", 1), ("127.0.0.1:65535", "127.0.0.1", 65535), ("[::1]:80", "::1", 80)],
)
def test_addresses_read_and_written(text: str, host: str, port: int) -> None:
    assert Address.parse(text) == Address(host, port)
    assert str(Address(host, port)) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a",
        ":1",
        "a:",
        "a:0",
        "a:65536",
        "a:+1",
        "a:1_0",
        "a:٣",
        "::1:80",
        "[::1:80",
        "a b:1",
        "tcp://a:1",
        "a]:1",
    ],
)
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(ConfigError, match="host:port"):
        Address.parse(text)


@pytest.mark.parametrize(
    ("host", "inside"),
    [
        *((host, True) for host in ("127.0.0.1", "127.9.9.9", "::1", "localhost")),
        *((host, False) for host in ("0.0.0.0", "::", "10.0.0.1", "localhost.evil.example", "*")),
    ],
)
def test_loopback(host: str, inside: bool) -> None:
    assert is_loopback(host) is inside


@pytest.mark.parametrize(("shorter", "longer"), [(s, longer) for s, longer, _ in DEADLINE_ORDER])
def test_deadlines_that_must_be_shorter_are(shorter: str, longer: str) -> None:
    """Equal is refused, a little shorter is taken; the others are out of the way."""
    values = {"resend_s": 0.5, "renew_s": 0.5, "hello_deadline_s": 5e4, "admission_deadline_s": 5e4}
    values |= {"claim_hold_s": 8e4, "load_deadline_s": 8e4, longer: 20.0}
    if shorter == "renew_s":
        values["admission_deadline_s"] = 10.0
    with pytest.raises(ConfigError, match=f"^{shorter} must be shorter than {longer}"):
        HawkConfig.parse({**values, shorter: 20.0}, D)
    HawkConfig.parse({**values, shorter: 19.9}, D)


def test_the_order_of_deadlines_names_every_time_of_a_load() -> None:
    named = {name for pair in DEADLINE_ORDER for name in pair[:2]}
    waits = {"resend_s", "renew_s", "hello_deadline_s", "admission_deadline_s", "claim_hold_s", "load_deadline_s"}
    assert named == waits
    for shorter, longer, _ in DEADLINE_ORDER:  # no pair says the opposite of others
        assert not any(other == (longer, shorter) for other in ((a, b) for a, b, _ in DEADLINE_ORDER))


def test_reference_page_is_current() -> None:
    page = Path(__file__).parent.parent / "docs" / "configuration.md"
    assert page.read_text(encoding="utf-8") == reference(), (
        "run: python -m hawk_connector.cli.config_reference > docs/configuration.md"
    )
    for key in (*PrefillConfig.__struct_fields__, *DecodeConfig.__struct_fields__):
        assert f"\n| `{key}` | " in reference()


def test_the_ground_needs_neither_torch_nor_vllm_nor_mooncake() -> None:
    code = (
        "import sys, hawk_connector.config, hawk_connector.metrics, hawk_connector.transport.side_channel, "
        "hawk_connector.transport.mooncake, hawk_connector.transport.memory\n"
        "print([name for name in ('torch', 'vllm', 'mooncake', 'prometheus_client') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
