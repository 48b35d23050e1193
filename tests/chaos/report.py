"""A chaos run as text: faults by kind and phase, and what became of the requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from tests.chaos.faults import Kind, Phase
from tests.chaos.load import Outcome
from tests.chaos.run import Verdict


def table(verdicts: Sequence[Verdict]) -> str:
    """Faults by kind, policy and phase; what became of each policy's requests; and what it took to get over faults."""
    hits = [hit for verdict in verdicts for hit in verdict.hits]
    phases = [p.value for p in Phase if any(hit.phase == p.value for hit in hits)]
    phases += ["none under way"] if any(not hit.phases for hit in hits) else []
    rows = [["fault", "policy", *phases, "all"]]
    for kind in Kind:
        for verdict in verdicts:
            counts = Counter(hit.phase for hit in verdict.hits if hit.fault.kind is kind)
            if counts:
                rows.append([kind.value, verdict.policy, *(str(counts[p] or "") for p in phases), str(counts.total())])
    by_phase = Counter(hit.phase for hit in hits)
    rows.append(["all", "", *(str(by_phase[p]) for p in phases), str(len(hits))])
    outcomes = [["policy", "requests", *(o.value for o in Outcome)]]
    over = [["policy", "transfers", "KV moved again after", "idle after", "open descriptors, first and last"]]
    for verdict in verdicts:
        came = verdict.tally.outcomes
        outcomes.append([verdict.policy, str(came.total()), *(str(came[o]) for o in Outcome)])
        moved = ", ".join(f"{count} {outcome}" for outcome, count in sorted(verdict.transfers.items()))
        again = sorted(verdict.recoveries_s)
        spread = f"{again[len(again) // 2]:.1f} s (median), {again[-1]:.1f} s (longest)" if again else "-"
        opened = ", ".join(f"{name} {first} -> {last}" for name, (first, last) in verdict.descriptors.items())
        over.append([verdict.policy, moved, spread, f"{verdict.idle_after_s:.1f} s", opened])
    return "\n\n".join(_columns(part) for part in (rows, outcomes, over))


def _columns(rows: Iterable[Sequence[str]]) -> str:
    rows = list(rows)
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)
