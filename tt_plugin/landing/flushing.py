"""Where a flush must look after runs of bytes were written."""

from __future__ import annotations

from hawk_connector.plan.runs import BankRuns

from ..device.interface import Written

__all__ = ["last_writes"]


def last_writes(runs: BankRuns) -> list[Written]:
    """The last run of each bank that has any: runs are written in order, so the others were before it."""
    columns = (runs.chip.tolist(), runs.bank.tolist(), runs.address.tolist(), runs.length.tolist())
    last = {
        (chip, bank): Written(chip, bank, address, length) for chip, bank, address, length in zip(*columns, strict=True)
    }
    return list(last.values())
