"""What can go wrong, as types.

Two families, because they are answered differently: a :class:`LocalError` is this process's own
configuration, limits or bug and is fixed here; a :class:`PeerError` is what another process did, or failed
to do, and must never take more down than the transfers that depend on that peer.

Every error says what was wrong and, where they are known, what was expected, what came and what to do.
Only the text of ``what`` is required.
"""

from __future__ import annotations

from dataclasses import dataclass


class HawkError(Exception):
    """Root of every error that HAWK raises on purpose.

    ``what`` is a clause ("lease_s is too short"); ``expected`` and ``got`` are short noun phrases; ``fix``
    is a whole sentence. They stay readable as attributes, for status pages and tests.
    """

    def __init__(
        self, what: str, *, expected: str | None = None, got: str | None = None, fix: str | None = None
    ) -> None:
        super().__init__(what)
        self.what = what
        self.expected = expected
        self.got = got
        self.fix = fix

    def __str__(self) -> str:
        text = self.what
        if self.expected is not None and self.got is not None:
            text += f": expected {self.expected}, got {self.got}"
        elif self.expected is not None:
            text += f": expected {self.expected}"
        elif self.got is not None:
            text += f": got {self.got}"
        if self.fix is not None:
            text = text.rstrip(".") + ". " + self.fix
        return text

    def __reduce__(self) -> tuple[object, ...]:
        # Exception's own way calls the class with self.args alone, which loses keyword arguments (and fails
        # where a subclass asks for more). vLLM sends exceptions between its processes.
        return (_rebuild, (type(self), self.args, dict(self.__dict__)))


def _rebuild(cls: type[HawkError], args: tuple[object, ...], state: dict[str, object]) -> HawkError:
    error = cls.__new__(cls)
    error.args = args
    error.__dict__.update(state)
    return error


class LocalError(HawkError):
    """This process's own mistake or limit; no peer is to blame and no retry helps."""


class ConfigError(LocalError):
    """A configuration value that cannot be used. Raised at start, never while requests run."""


class UnsupportedError(LocalError):
    """A model, cache or feature that HAWK cannot serve. Raised at start.

    ``what`` names the thing; ``reason`` says why it cannot be served.
    """

    def __init__(
        self,
        what: str,
        *,
        reason: str | None = None,
        expected: str | None = None,
        got: str | None = None,
        fix: str | None = None,
    ) -> None:
        super().__init__(
            f"{what} is not supported: {reason}" if reason is not None else what,
            expected=expected,
            got=got,
            fix=fix,
        )
        self.reason = reason


class CapacityError(LocalError):
    """Something does not fit a bound of this process (a buffer, a table); ``fix`` names the setting."""


class DeviceError(LocalError):
    """The accelerator did not do what it was told: it cannot be opened, a write was lost, a bank does not answer."""


class ReadStopped(LocalError):
    """A read ended early because it was told to.  No batch of it is under way: no byte of it can still arrive."""


class PeerError(HawkError):
    """What another process did or failed to do. Costs at most the transfers that depend on that peer."""


class ProtocolError(PeerError):
    """A message that cannot be read, or that must not come now. The message is dropped; the peer stays."""


@dataclass(frozen=True, slots=True)
class Mismatch:
    """One field in which two sides differ so that their pairing would give wrong bytes.

    ``prefill`` and ``decode`` are the two sides' values as text, ``fix`` is the flag or key that mends it.
    """

    field: str
    prefill: str
    decode: str
    fix: str

    def __str__(self) -> str:
        return f"{self.field}: prefill side has {self.prefill}, decode side has {self.decode} ({self.fix})"


class PairingRefused(PeerError):
    """A prefill instance and a decode instance cannot be paired; ``fields`` has every difference found."""

    def __init__(self, fields: tuple[Mismatch, ...], *, peer: str | None = None) -> None:
        if not fields:
            raise ValueError("a refused pairing needs at least one differing field")
        whom = f"pairing with {peer} refused" if peer else "pairing refused"
        super().__init__(f"{whom}: " + "; ".join(str(mismatch) for mismatch in fields))
        self.fields = fields
        self.peer = peer


class PeerGone(PeerError):
    """A peer does not answer within its deadline, or came back as another epoch."""


class TransferFailed(PeerError):
    """A read failed or ran out of time.

    **Failed does not mean stopped**: bytes may still arrive at every local address of the read until the
    engine that carried it is closed (the fence). Until then none of that memory may be used again.
    """
