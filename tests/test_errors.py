"""Errors say what was expected, what came and what to do, and survive the way between processes."""

from __future__ import annotations

import pickle

import pytest

from hawk_connector import errors
from hawk_connector.errors import (
    CapacityError,
    ConfigError,
    HawkError,
    LocalError,
    Mismatch,
    PairingRefused,
    PeerError,
    PeerGone,
    ProtocolError,
    TransferFailed,
    UnsupportedError,
)

MISMATCH = Mismatch("head_dim", "64", "128", "serve the same model on both sides")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ConfigError("lease_s"), "lease_s"),
        (ConfigError("lease_s", expected="number > 0"), "lease_s: expected number > 0"),
        (ConfigError("lease_s", got="-1"), "lease_s: got -1"),
        (
            ConfigError("lease_s", expected="number > 0", got="-1", fix="Raise it."),
            "lease_s: expected number > 0, got -1. Raise it.",
        ),
        (CapacityError("It is full.", fix="Raise it."), "It is full. Raise it."),
        (
            UnsupportedError("MLA", reason="it has one latent", fix="Serve a GQA model."),
            "MLA is not supported: it has one latent. Serve a GQA model.",
        ),
        (
            PairingRefused((MISMATCH,), peer="127.0.0.1:18550"),
            "pairing with 127.0.0.1:18550 refused: head_dim: prefill side has 64, "
            "decode side has 128 (serve the same model on both sides)",
        ),
    ],
)
def test_text(error: HawkError, text: str) -> None:
    assert str(error) == text


def test_every_error_is_local_or_the_peers_and_never_both() -> None:
    leaves = [
        kind
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, HawkError) and kind is not HawkError
    ]
    assert {kind.__name__ for kind in leaves if issubclass(kind, LocalError)} == {
        "LocalError",
        "ConfigError",
        "UnsupportedError",
        "CapacityError",
        "DeviceError",
        "ReadStopped",
    }
    assert {kind.__name__ for kind in leaves if issubclass(kind, PeerError)} == {
        "PeerError",
        "ProtocolError",
        "PairingRefused",
        "PeerGone",
        "TransferFailed",
    }


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("a", expected="b", got="c", fix="d"),
        UnsupportedError("a", reason="b", fix="c"),
        PairingRefused((MISMATCH, MISMATCH), peer="p"),
        TransferFailed("a"),
        PeerGone("a"),
        ProtocolError("a", got="b"),
    ],
)
def test_pickle_keeps_everything(error: HawkError) -> None:
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is type(error)
    assert str(back) == str(error)
    assert vars(back) == vars(error)


def test_a_refusal_names_at_least_one_field() -> None:
    with pytest.raises(ValueError, match="at least one"):
        PairingRefused(())
