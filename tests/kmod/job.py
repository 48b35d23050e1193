"""What the two sides in the VM tell each other, and where the stand-in NPU keeps what they move. No torch here."""

from __future__ import annotations

import os
import time
from pathlib import Path

import msgspec

from hawk_connector.plan.pairing import DecodeFacts
from hawk_connector.protocol.ticket import Ticket
from tt_plugin.device.tt_kmd import NocTile
from tt_plugin.device.windows import BankSite

__all__ = ["CHANNEL_OF_BANK", "SITES", "UNTOUCHED", "WINDOW_BYTES", "Job", "Loose", "read_when_there", "write_whole"]

# Bank b is another channel than b: a mix-up of the two shows.
CHANNEL_OF_BANK = tuple((3 * bank + 1) % 8 for bank in range(8))
# Blackhole's translated NoC coordinates of a DRAM channel; each channel is reached through one of its three ports.
SITES = tuple(
    BankSite(NocTile(17 + (channel >= 4), 12 + 3 * (channel % 4) + channel % 3), 0) for channel in CHANNEL_OF_BANK
)
# How much of each window is mapped.
WINDOW_BYTES = 64 << 20
# What the pools hold before anything lands.
UNTOUCHED = 0xA5


class Loose(msgspec.Struct, frozen=True):
    """A SendBuffer of its own, read without HAWK's protocol: into ``bank`` at ``target``."""

    session: str
    address: int
    nbytes: int
    seed: int
    bank: int
    target: int


class Job(msgspec.Struct, frozen=True):
    """A request that prefill offers, and where decode shall put it.

    ``buffer_addresses``: of the pools in every bank.  ``tokens``, ``seed``: of the prompt.
    """

    facts: DecodeFacts
    ticket: Ticket
    tokens: int
    seed: int
    num_blocks: int
    buffer_addresses: tuple[int, ...]
    block_ids: tuple[int, ...]
    loose: Loose


def write_whole(path: Path, content: bytes) -> None:
    """So that whoever waits for ``path`` never sees a part of it."""
    part = path.with_suffix(".part")
    part.write_bytes(content)
    os.rename(part, path)


def read_when_there(path: Path, deadline_s: float) -> bytes:
    """Content of a file that another process writes; AssertionError after ``deadline_s``."""
    end = time.monotonic() + deadline_s
    while not path.exists():
        assert time.monotonic() < end, f"{path} was not written within {deadline_s:g} s"
        time.sleep(0.1)
    return path.read_bytes()
