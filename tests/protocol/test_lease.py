"""Leases, repetition and digests: the small parts."""

from __future__ import annotations

import hashlib
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from hawk_connector.protocol.digest import token_digest
from hawk_connector.protocol.lease import Lease, Resend


def test_an_expired_lease_is_not_revived() -> None:
    lease = Lease(10.0)
    assert lease.renew(9.0, 3.0) and lease.until == 12.0
    assert lease.renew(9.5, 1.0) and lease.until == 12.0  # never shortened
    assert not lease.renew(12.0, 5.0) and lease.until == 12.0 and lease.expired(12.0)


def test_repetition_slows_down_by_half_to_eight_periods_and_stops_at_the_deadline() -> None:
    resend, sent, now = Resend.start(0.0, 1.0, 60.0), [], 0.0
    while now < 100.0:
        if resend.due(now):
            sent.append(now)
        now += 0.125
    gaps = [b - a for a, b in pairwise(sent)]
    assert sent[0] == 1.0 and gaps[:3] == [1.5, 2.25, 3.375]
    assert max(gaps) == 8.0 and max(sent) < 60.0


TOKENS = st.lists(st.integers(0, 1 << 20), max_size=20)


@given(TOKENS, TOKENS, st.sampled_from(["", "a", "b"]), st.sampled_from(["", "a", "b"]))
def test_digests_are_equal_exactly_where_tokens_and_keys_are(a: list[int], b: list[int], x: str, y: str) -> None:
    equal = token_digest(a, [("lora", x)]) == token_digest(b, [("lora", y)])
    assert equal == ((a, x) == (b, y))


def test_a_digest_is_the_sha_256_of_its_msgpack() -> None:
    # msgpack by hand: [[1, 300], []]
    assert token_digest([1, 300]) == hashlib.sha256(bytes([0x92, 0x92, 0x01, 0xCD, 0x01, 0x2C, 0x90])).hexdigest()
