"""Each rule can fail: every mutant of the product is caught by the simulation, with the rule that it breaks."""

from __future__ import annotations

import ast
import shutil
from pathlib import Path

import pytest

from tests.mutations.mutant import ROOT, Edit, Mutant, Stale, hunt
from tests.mutations.mutants import MUTANTS
from tests.mutations.run_mutations import SEEDS

# Named in the list of what must be shown, beside one for each rule.
_WANTED = (
    "retry before the fence",
    "report before the fence",
    "a second claim let in",
    "a verdict forgotten",
    "Renew revives an expired lease",
    "a region is free at Done, not at Accepted",
    "a pack of a stale generation is offered",
)


def test_every_rule_has_a_mutant_of_its_own() -> None:
    names = [mutant.name for mutant in MUTANTS]
    assert len(set(names)) == len(names) >= 15 and set(_WANTED) <= set(names)
    assert {mutant.rules[0] for mutant in MUTANTS if len(mutant.rules) == 1} == set(range(1, 11))


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name.replace(" ", "-"))
def test_the_text_of_each_mutant_stands_in_the_product(mutant: Mutant, tmp_path: Path) -> None:
    for edit in mutant.edits:
        (tmp_path / edit.file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / "hawk_connector" / edit.file, tmp_path / edit.file)
    mutant.write(tmp_path)
    for edit in mutant.edits:
        ast.parse((tmp_path / edit.file).read_text())


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name.replace(" ", "-"))
def test_the_simulation_catches(mutant: Mutant, tmp_path: Path) -> None:
    caught = hunt(mutant, tmp_path, SEEDS)
    assert caught.rule in mutant.rules, f"after {caught.seeds} seeds: {caught}"


@pytest.mark.slow
def test_nothing_is_caught_without_a_mutant(tmp_path: Path) -> None:
    caught = hunt(None, tmp_path, range(40))
    assert (caught.rule, caught.seeds) == (None, 40)


def test_a_mutant_whose_text_is_gone_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("one\none\n")
    for old, count in (("one", 2), ("three", 0)):
        with pytest.raises(Stale, match=f"{count} times in a.py"):
            Mutant("m", 1, (Edit("a.py", old, "two"),)).write(tmp_path)
