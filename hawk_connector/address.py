"""A host and a port, and the questions that configuration and transport both ask of them."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from .errors import ConfigError


@dataclass(frozen=True, slots=True)
class Address:
    """A TCP address. ``host`` is a name or a numeric address without brackets; ``port`` is 0..65535."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{bracketed(self.host)}:{self.port}"

    @classmethod
    def parse(cls, text: str) -> Address:
        """Read ``host:port`` or ``[v6]:port``; raises ConfigError for anything else."""
        host, colon, port = text.rpartition(":")
        if host.startswith("[") and host.endswith("]"):
            host = host[1:-1]
        elif ":" in host or host.startswith("[") or host.endswith("]"):
            raise _not_an_address(text)
        if not colon or not host or any(c.isspace() or c == "/" for c in host):
            raise _not_an_address(text)
        # isdecimal alone would admit other scripts' digits; int() alone would admit "+1" and "1_0".
        if not (port.isascii() and port.isdecimal() and 1 <= int(port) <= 65535):
            raise _not_an_address(text)
        return cls(host, int(port))


def bracketed(host: str) -> str:
    """``host`` as it stands in front of ``:port``: IPv6 addresses get brackets."""
    return f"[{host}]" if ":" in host else host


def is_loopback(host: str) -> bool:
    """Whether ``host`` can only be reached from this machine. Names other than localhost are not resolved."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_wildcard(host: str) -> bool:
    """Whether ``host`` means every interface ("0.0.0.0", "::")."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def _not_an_address(text: str) -> ConfigError:
    return ConfigError(
        "not an address",
        expected="host:port with a port in 1..65535 (IPv6 as [::1]:port)",
        got=repr(text),
    )
