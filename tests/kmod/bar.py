"""The judge, on the host: `python -m tests.kmod.bar JOB BAR`, where BAR is the file that the VM saw as the NPU's BAR.

Byte a of DRAM channel c is byte c * 4 GiB + a of the file (kmod/test/npu/layout.h). What must be there is the scalar
oracle's word. Prints a line for each thing that it checks; exit status 0 when all hold.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from tests.kmod.job import CHANNEL_OF_BANK, UNTOUCHED, Job
from tests.kmod.prefill_side import GEOMETRY, loose_bytes
from tests.oracle import scalar
from tests.workers.source import Prompt

CHANNEL_BYTES = 4 << 30
AROUND = 4096


class Bar:
    def __init__(self, path: Path) -> None:
        self._file = path.open("rb")

    def bytes_at(self, bank: int, address: int, length: int) -> bytes:
        self._file.seek(CHANNEL_OF_BANK[bank] * CHANNEL_BYTES + address)
        return self._file.read(length)


def expected_pages(job: Job) -> dict[tuple[int, int], bytes]:
    """(bank, address) -> page, for every page of the request."""
    layout = job.facts.layout
    key, value = job.buffer_addresses
    pool = scalar.Pool(
        "cross_layer",
        layout.layers,
        layout.heads,
        layout.block_size,
        layout.head_dim,
        (0,) * layout.banks,
        {"k": key, "v": value},
        "bfp8",
        layout.alignment,
    )
    prompt = Prompt(GEOMETRY, job.tokens, job.seed)
    banks = scalar.expected_banks(
        prompt.row,
        pool,
        num_tokens=job.tokens,
        block_ids=list(job.block_ids),
        kv_heads=GEOMETRY.kv_heads,
        rotary_dim=GEOMETRY.head_dim,
    )
    return {(bank, address): page for (_, bank), pages in banks.items() for address, page in pages.items()}


def wrong_pages(job: Job, bar: Bar, pages: dict[tuple[int, int], bytes]) -> list[str]:
    return [
        f"bank {bank}, address {address:#x}"
        for (bank, address), page in sorted(pages.items())
        if bar.bytes_at(bank, address, len(page)) != page
    ]


def touched_elsewhere(job: Job, bar: Bar, pages: dict[tuple[int, int], bytes]) -> list[str]:
    """Pages of the pools that are not the request's and have changed."""
    layout = job.facts.layout
    slots = -(-job.num_blocks * layout.pages_per_unit // layout.banks)
    pitch = len(next(iter(pages.values())))
    clean = bytes([UNTOUCHED]) * pitch
    return [
        f"bank {bank}, address {address:#x}"
        for bank in range(layout.banks)
        for start in job.buffer_addresses
        for address in range(start, start + slots * pitch, pitch)
        if (bank, address) not in pages and bar.bytes_at(bank, address, pitch) != clean
    ]


def main() -> int:
    job = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Job)
    bar = Bar(Path(sys.argv[2]))
    pages = expected_pages(job)
    loose = job.loose
    beside = bytes([UNTOUCHED]) * AROUND
    wrong, elsewhere = wrong_pages(job, bar, pages), touched_elsewhere(job, bar, pages)
    found = bar.bytes_at(loose.bank, loose.target - AROUND, loose.nbytes + 2 * AROUND)
    checks = {
        f"{len(pages)} pages in {len({bank for bank, _ in pages})} banks are the oracle's": wrong[:3],
        "no other page of the pools has changed": elsewhere[:3],
        f"the SendBuffer's {loose.nbytes} bytes are in the window": found[AROUND:-AROUND] != loose_bytes(loose),
        "no byte beside them has changed": found[:AROUND] + found[-AROUND:] != 2 * beside,
    }
    for what, fault in checks.items():
        print(f"not ok {what}: {fault}" if fault else f"ok {what}")
    return int(any(checks.values()))


if __name__ == "__main__":
    sys.exit(main())
