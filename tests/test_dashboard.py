"""The dashboard, the alert rules and the page of operations against the series that the code has."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard

from hawk_connector.protocol.admission import VerdictKind
from hawk_connector.series import SERIES, Series

ROOT = Path(__file__).parents[1]
DASHBOARD = ROOT / "configs" / "grafana" / "hawk.json"
ALERTS = ROOT / "configs" / "prometheus" / "hawk-alerts.yaml"

# vLLM's own labels, ours, Prometheus' own.
LABELS = {"model_name", "engine", "side", "instance", "job", "le"}
SHOWN: dict[str, Series] = {name: series for series in SERIES for name in series.exposed}


def selectors(node: Any) -> Iterator[promql_parser.VectorSelector]:
    """Every selector of a parsed expression."""
    if isinstance(node, promql_parser.VectorSelector):
        yield node
    elif isinstance(node, promql_parser.MatrixSelector):
        yield node.vector_selector
    elif isinstance(node, promql_parser.BinaryExpr):
        yield from (*selectors(node.lhs), *selectors(node.rhs))
    elif isinstance(node, promql_parser.Call):
        for argument in node.args:
            yield from selectors(argument)
    elif isinstance(node, (promql_parser.AggregateExpr, promql_parser.ParenExpr, promql_parser.UnaryExpr)):
        yield from selectors(node.expr)
    elif not isinstance(node, (promql_parser.NumberLiteral, promql_parser.StringLiteral)):
        raise TypeError(f"no way into {type(node).__name__}")


def check_query(expression: str) -> set[str]:
    """The expression parses, and every selector names a series, its labels and their values as the code has them.

    Gives the keys of the series.
    """
    parsed = promql_parser.parse(expression.replace("$__rate_interval", "5m"))
    keys: set[str] = set()
    for selector in selectors(parsed):
        assert selector.name in SHOWN, f"{selector.name} in {expression}"
        series = SHOWN[selector.name]
        keys.add(series.key)
        for matcher in selector.matchers.matchers:
            if matcher.name == series.label:
                assert set(matcher.value.split("|")) <= set(series.values), expression
            elif matcher.name == "side":
                assert matcher.value in ("prefill", "decode"), expression
            else:
                assert matcher.name in LABELS, f"label {matcher.name} of {selector.name}"
        if series.kind == "counter":
            assert re.search(rf"(rate|increase)\({selector.name}\b", expression), f"a bare counter in {expression}"
    for name in re.findall(r"by \(([\w, ]+)\)", expression):
        assert set(name.split(", ")) <= LABELS | {SHOWN[s.name].label for s in selectors(parsed)}, expression
    return keys


@pytest.fixture(scope="module")
def dashboard() -> dict[str, Any]:
    return json.loads(DASHBOARD.read_text())  # type: ignore[no-any-return]


def kept(part: Any, whole: Any, path: str = "") -> Iterator[str]:
    """Where ``whole`` lacks something of ``part``."""
    if isinstance(part, dict):
        for key, value in part.items():
            if not isinstance(whole, dict) or key not in whole:
                yield f"{path}/{key}"
            else:
                yield from kept(value, whole[key], f"{path}/{key}")
    elif isinstance(part, list):
        if not isinstance(whole, list) or len(part) != len(whole):
            yield path
        else:
            for index, (one, other) in enumerate(zip(part, whole, strict=True)):
                yield from kept(one, other, f"{path}[{index}]")
    elif part != whole:
        yield path


def test_grafanas_own_types_know_every_field_of_the_dashboard(dashboard: dict[str, Any]) -> None:
    read = Dashboard.from_json(dashboard)
    written = json.loads(JSONEncoder(sort_keys=True).encode(read))
    assert list(kept(dashboard, written)) == []
    # And they would have dropped one that they do not know.
    spoiled = {**dashboard, "panells": []}
    assert list(kept(spoiled, json.loads(JSONEncoder(sort_keys=True).encode(Dashboard.from_json(spoiled))))) == [
        "/panells"
    ]


def test_the_dashboard_can_be_imported_as_it_is(dashboard: dict[str, Any]) -> None:
    assert 8 <= len(dashboard["uid"]) <= 40 and dashboard["title"] == "HAWK"
    assert "id" not in dashboard  # it is one Grafana's own number
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    variables = {variable["name"] for variable in dashboard["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", DASHBOARD.read_text())) - {"__rate_interval", "__all"}
    assert used == variables
    places = [(p["gridPos"], p["title"]) for p in panels]
    for place, title in places:
        assert place["x"] >= 0 and place["x"] + place["w"] <= 24 and place["h"] > 0, title
    for (one, _), (other, title) in combinations(places, 2):
        apart_x = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        apart_y = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert apart_x or apart_y, title
    for panel in panels:
        if panel["type"] != "row":
            assert panel["description"] and panel["datasource"]["uid"] == "${datasource}"
            references = [target["refId"] for target in panel["targets"]]
            assert references and len(set(references)) == len(references)


def test_every_query_of_the_dashboard_asks_for_what_is_there_and_all_of_it_is_shown(dashboard: dict[str, Any]) -> None:
    shown: set[str] = set()
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            shown |= check_query(target["expr"])
            named = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            grouped = {word for group in re.findall(r"by \(([\w, ]+)\)", target["expr"]) for word in group.split(", ")}
            assert named <= grouped, target
    assert shown == {series.key for series in SERIES}
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            (name, label) = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["query"]["query"]).groups()  # type: ignore[union-attr]
            assert name in SHOWN and label in LABELS


def test_alert_rules() -> None:
    rules = yaml.safe_load(ALERTS.read_text())
    assert list(rules) == ["groups"]
    (group,) = rules["groups"]
    assert set(group) == {"name", "rules"}
    names = [rule["alert"] for rule in group["rules"]]
    assert len(set(names)) == len(names)
    for rule in group["rules"]:
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
        assert re.fullmatch(r"Hawk[A-Za-z]+", rule["alert"])
        assert check_query(rule["expr"])
        assert re.fullmatch(r"\d+[smh]", rule.get("for", "1m"))
        assert rule["labels"]["severity"] in ("info", "warning", "critical")
        assert set(rule["annotations"]) == {"summary", "description"}
        used = set(re.findall(r"\$labels\.(\w+)", str(rule["annotations"])))
        grouped = re.search(r"by \(([\w, ]+)\)", rule["expr"])
        assert used <= (set(grouped[1].split(", ")) if grouped else LABELS), rule["alert"]


@pytest.mark.parametrize(
    "wrong",
    [
        "hawk_no_such",
        "rate(hawk_transfers[5m])",
        'rate(hawk_failures_total{reason="because"}[5m])',
        'hawk_peers{staet="paired"}',
        "sum(hawk_transfers_total)",
        'hawk_leases{side="left"}',
        "sum by (colour) (hawk_leases)",
    ],
)
def test_a_query_that_is_wrong_is_found(wrong: str) -> None:
    with pytest.raises(AssertionError):
        check_query(wrong)


def test_what_is_no_query_is_found() -> None:
    with pytest.raises(ValueError):
        check_query("sum(")


# --- docs/operations.md

OPERATIONS = (ROOT / "docs" / "operations.md").read_text()


def rows(heading: str) -> list[list[str]]:
    """Cells of the table of operations.md whose first heading is ``heading``."""
    lines = OPERATIONS.splitlines()
    (start,) = [n for n, line in enumerate(lines) if line.startswith(f"| {heading} |")]
    found: list[list[str]] = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        found.append([cell.strip() for cell in line.strip("|").split(" | ")])
    return found


def code(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def test_the_table_of_series_is_the_codes() -> None:
    listed = [(code(name)[0], kind, code(label), meaning) for name, kind, label, _, meaning in rows("series")]
    expected = [
        (s.name if s.kind == "histogram" else s.exposed[0], s.kind, [s.label] if s.label else [], s.text)
        for s in SERIES
    ]
    assert listed == expected
    assert {side for _, _, _, side, _ in rows("series")} == {"both", "prefill", "decode"}


def test_the_values_of_labels_are_the_codes() -> None:
    by_key = {series.key: list(series.values) for series in SERIES if series.label}
    assert [code(values) for _, values in rows("label")] == [
        by_key["transfers"],
        by_key["messages_dropped"],
        by_key["peers"],
        by_key["circuits"],
    ]
    assert [code(reason)[0] for reason, *_ in rows("reason")] == by_key["failures"] == by_key["recomputes"]
    assert all(meaning and advice for _, meaning, advice in rows("reason"))


def test_every_failure_says_what_the_user_sees_and_what_to_do() -> None:
    failures = rows("what fails")
    assert len(failures) >= 10
    assert all(len(cells) == 4 and cells[0] and cells[1] and cells[2] for cells in failures)


def test_the_phases_are_those_of_the_views() -> None:
    """Every phase that a view can give is in the table, and no other."""
    named: set[tuple[str, str]] = set()
    for phases, side, _ in rows("phase"):
        named |= {(phase, side.removesuffix(" (scheduler)")) for phase in phases.split(", ") if phase != "pending"}
    given: set[tuple[str, str]] = {("claimed", "decode")}  # the scheduler's, with "pending": VerdictKind's values
    for side in ("prefill", "decode"):
        source = (ROOT / "hawk_connector" / "protocol" / f"{side}_view.py").read_text()
        given |= {(phase, side) for phase in re.findall(r'return "(\w+)", ', source)}
    assert named == given
    assert {"pending", "claimed"} <= {kind.value for kind in VerdictKind}
