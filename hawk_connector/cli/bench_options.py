"""Lists on the command line of `hawk bench`: words and numbers with commas between them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from enum import Enum

from hawk_connector.errors import ConfigError

__all__ = ["Carrier", "Device", "numbers", "words"]


class Device(str, Enum):
    """Where a parcel is packed."""

    cpu = "cpu"
    cuda = "cuda"


class Carrier(str, Enum):
    """What carries the KV between the two processes, as in the configuration key ``protocol``."""

    tcp = "tcp"
    rdma = "rdma"
    local = "local"


def words(option: str, text: str, known: Iterable[str]) -> tuple[str, ...]:
    """The words in ``text``, each once, in its order.  ConfigError for one that is not ``known``, and for none."""
    allowed = list(known)
    found = tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    for word in found:
        if word not in allowed:
            near = difflib.get_close_matches(word, allowed, n=1)
            raise ConfigError(
                option,
                expected=f"some of {', '.join(allowed)}, with commas between them",
                got=repr(word),
                fix=f"Did you mean {near[0]}?" if near else None,
            )
    if not found:
        raise ConfigError(option, expected=f"at least one of {', '.join(allowed)}", got="none")
    return found


def numbers(option: str, text: str, least: int, most: int) -> tuple[int, ...]:
    """The whole numbers in ``text``, ascending, each once.  ConfigError for one out of its limits, and for none."""
    found = set()
    for word in (part.strip() for part in text.split(",")):
        if not word.isascii() or not word.isdigit() or not least <= int(word) <= most:
            raise ConfigError(
                option, expected=f"numbers of {least} to {most}, with commas between them", got=repr(word)
            )
        found.add(int(word))
    return tuple(sorted(found))
