"""`hawk bench transfer`: request-to-landed time of every mode, between two processes, in rounds.

The time is the paper's (5.2): from when decode asks for the KV to when it lies in its pool.  It begins with the decode
worker's step that starts a load and ends with its report, so that it has all messages, packs, reads and landings in it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from typing import Any

from .child import Child
from .contestants import FACE_ROWS, FACE_ROWS_RUNS, MIB, Contestant, Room, TransferOptions, contestants
from .decode_process import DecodeProcess, DecodeSpec, LoadResult
from .expected import Landed
from .machine import available_bytes, check_memory
from .prefill_process import PrefillProcess, PrefillSpec
from .rounds import Ratio, Spread, compared, rounds

__all__ = ["TransferRun", "run_transfer"]

# Rows (a block's K or V of one layer on one chip) that are looked at after a transfer, and after each one's first.
_SAMPLES = 16
_ALL_SAMPLES = 640

Report = Callable[[str, int, int], None]
"""(what is being measured, measurements done, of how many)."""


@dataclass(frozen=True)
class TransferRun:
    """Rows for the file and the table, (what it is of, ratio), and what was left out."""

    rows: list[dict[str, Any]]
    ratios: list[tuple[dict[str, Any], Ratio]]
    notes: tuple[str, ...]


@dataclass
class _Measured:
    """Of one contestant at one size: seconds by round, and each round's report."""

    seconds: dict[int, float] = field(default_factory=dict)
    loads: list[LoadResult] = field(default_factory=list)
    pack_s: list[float] = field(default_factory=list)
    verified_pages: int = 0


def run_transfer(options: TransferOptions, report: Report = lambda *_: None) -> TransferRun:
    """Measures everyone at every size that memory allows.

    CapacityError where not even the smallest size fits; LocalError where a transfer fails or lands other bytes.
    """
    field_ = tuple(contestants(options))
    kept, notes = _sizes(options, field_)
    room = Room(options, field_, options.tokens(max(kept)))
    rows: list[dict[str, Any]] = []
    ratios: list[tuple[dict[str, Any], Ratio]] = []
    total = sum(_runs(each, options) for size in kept for each in field_ if each.runs_at(size))
    done = 0
    with _Pair(room) as pair:
        for size in kept:
            running = {each.name: each for each in field_ if each.runs_at(size)}
            measured = {name: _Measured() for name in running}
            for each in running.values():
                if each.mode == FACE_ROWS:
                    continue  # seconds long, so nothing needs to warm up
                report(f"{size} MB, {each.name}: the first, not counted", done, total)
                measured[each.name].verified_pages += pair.run(each, size, _ALL_SAMPLES)[2]
            for number, name in rounds(list(running), options.runs, options.seed + size):
                each = running[name]
                if number >= _runs(each, options):
                    continue
                report(f"{size} MB, {name}", done, total)
                load, pack_s, pages = pair.run(each, size, _SAMPLES)
                found = measured[name]
                found.seconds[number] = load.seconds
                found.loads.append(load)
                found.pack_s.append(pack_s)
                found.verified_pages += pages
                done += 1
            rows += [_row(options, each, size, measured[name]) for name, each in running.items()]
            ratios += _ratios(size, running, {name: found.seconds for name, found in measured.items()})
    return TransferRun(rows, ratios, tuple(notes))


class _Pair:
    """Both processes."""

    def __init__(self, room: Room) -> None:
        self._room = room
        self._random = random.Random(room.options.seed)
        self._count = 0

    def __enter__(self) -> _Pair:
        room, options = self._room, self._room.options
        self._prefill = Child(
            "prefill", PrefillProcess, PrefillSpec(room.cache, options.seed, options.protocol, room.workers)
        ).__enter__()
        with ExitStack() as started:
            started.push(self._prefill)
            ranks = self._prefill.call("handshakes")
            spec = DecodeSpec(room.cache, options.seed, options.protocol, ranks, room.pools, room.decoders)
            self._decode = started.enter_context(Child("decode", DecodeProcess, spec))
            self._decode.call("ready")
            for worker in room.workers:
                self._prefill.call("wait_paired", worker.name, room.peers_of(worker.name))
            started.pop_all()  # from here on they end with the pair
        return self

    def __exit__(self, *ended: Any) -> None:
        self._decode.__exit__(*ended)
        self._prefill.__exit__(*ended)

    def run(self, each: Contestant, size_mb: int, samples: int) -> tuple[LoadResult, float, int]:
        """One transfer, through other blocks than the last: (what decode says, seconds of packing, pages verified)."""
        landed = self._landed(each, size_mb)
        self._count += 1
        request = f"run-{self._count}"
        if each.mode == FACE_ROWS:
            session, address = self._prefill.call("raw_cache")
            load = self._decode.call("read_face_rows", FACE_ROWS, session, address, landed)
            pages = self._decode.call("verify_pools", FACE_ROWS, landed, samples, self._count)
            return load, 0.0, pages
        transfer, claim = (f"{self._random.getrandbits(128):032x}" for _ in range(2))
        digest = f"{self._random.getrandbits(256):064x}"
        packed = each.packing == "eager" and each.mode != "direct"
        self._prefill.call("offer", each.rank, request, transfer, digest, landed.tokens, landed.table, packed)
        load = self._decode.call("load", each.decoder, each.rank, request, (transfer, claim, digest), landed)
        sent = self._prefill.call("collect", each.rank, request, packed)
        pages = self._decode.call("verify", each.decoder, landed, samples, self._count)
        return load, sent.pack_s or 0.0, pages

    def _landed(self, each: Contestant, size_mb: int) -> Landed:
        """Shuffled blocks on both sides."""
        room, options = self._room, self._room.options
        tokens = options.tokens(size_mb)
        source, target = room.cache.blocks, self._target_blocks(each)
        count = -(-tokens // (options.source_block if each.mode == "direct" else options.block_size))
        return Landed(
            tokens,
            tuple(self._random.sample(range(source), -(-tokens // options.source_block))),
            tuple(self._random.sample(range(target), count)),
        )

    def _target_blocks(self, each: Contestant) -> int:
        if each.mode == "direct":
            return self._room.cache.blocks
        return self._room.pools[FACE_ROWS if each.mode == FACE_ROWS else each.dtype].num_blocks


def _runs(each: Contestant, options: TransferOptions) -> int:
    return min(options.runs, FACE_ROWS_RUNS) if each.mode == FACE_ROWS else options.runs


def _sizes(options: TransferOptions, field_: Sequence[Contestant]) -> tuple[list[int], list[str]]:
    """Sizes for which there is memory, and a word on those for which there is none."""
    wanted = sorted(set(options.sizes_mb))
    needed = {size: Room(options, tuple(field_), options.tokens(size)).nbytes for size in wanted}
    available = available_bytes()
    kept = [size for size in wanted if needed[size] <= available]
    if not kept:
        check_memory(needed[wanted[0]], f"a transfer of {wanted[0]} MB", "Choose fewer --modes, --dtypes or --packing.")
    notes = [
        f"{size} MB left out: caches, send buffers and pools of all contestants need {needed[size] / MIB:,.0f} MiB, "
        f"{available / MIB:,.0f} MiB may be used; fewer contestants need less"
        for size in wanted
        if size not in kept
    ]
    return kept, notes


def _row(options: TransferOptions, each: Contestant, size_mb: int, found: _Measured) -> dict[str, Any]:
    spread = Spread.of(list(found.seconds.values()))
    last = found.loads[-1]
    return {
        "mode": each.mode,
        "dtype": each.dtype,
        "packing": each.packing,
        "parcel_tokens": each.parcel_tokens,
        "size_mb": size_mb,
        "size_bytes": options.tokens(size_mb) * options.cache(1).bf16_token_bytes,
        "seconds_median": spread.median,
        "seconds_min": spread.least,
        "seconds_max": spread.most,
        "runs": spread.count,
        "segments": last.segments,
        "bytes_per_segment": last.wire_bytes / last.segments if last.segments else 0.0,
        "wire_bytes": last.wire_bytes,
        "parcels": last.parcels,
        "pack_s": Spread.of(found.pack_s).median,
        "pull_s": Spread.of([load.pull_s - load.land_s for load in found.loads]).median,
        "land_s": Spread.of([load.land_s for load in found.loads]).median,
        "verified_pages": found.verified_pages,
        "seconds": list(found.seconds.values()),
    }


def _ratios(
    size_mb: int, running: Mapping[str, Contestant], times: Mapping[str, Mapping[int, float]]
) -> list[tuple[dict[str, Any], Ratio]]:
    """Everyone to direct, host to hawk, and face rows to hawk of the same dtype."""
    pairs: list[tuple[str, str]] = []
    direct = next((name for name, each in running.items() if each.mode == "direct"), None)
    for name, each in running.items():
        if direct is not None and each.mode in ("hawk", "host"):
            pairs.append((name, direct))
        if each.mode in ("host", FACE_ROWS):
            pairs += [(name, other) for other, rival in running.items() if _rivals(each, rival)]
    return [({"size_mb": size_mb}, compared(of, times[of], to, times[to])) for of, to in pairs]


def _rivals(each: Contestant, other: Contestant) -> bool:
    same = other.mode == "hawk" and other.dtype == each.dtype
    return same and (each.mode == FACE_ROWS or asdict(each) == {**asdict(other), "mode": each.mode})
