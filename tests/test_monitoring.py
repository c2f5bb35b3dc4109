"""Tests that `examples/monitoring/` uses only documented and declared metrics, in Grafana's form."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.metrics_page import added_labels, documented, documented_series

CALLED = {"sum", "min", "max", "rate", "increase", "changes", "histogram_quantile", "scalar", "by"}
"""Aggregations, functions, and other words before a parenthesis."""
CLOSING = {")": "(", "}": "{", "]": "["}


@dataclass(frozen=True, slots=True, kw_only=True)
class Used:
    """A metric of an expression, and the labels that the expression uses."""

    metric: str
    labels: frozenset[str]


def uses(expression: str) -> list[Used]:
    """Returns every metric of Offramp with the labels by which it is selected or the expression is grouped.

    Raises ValueError for unbalanced brackets, and for an unknown function.
    """
    bare = re.sub(r'"(?:[^"\\]|\\.)*"', "", expression)
    _check_brackets(bare)
    if unknown := set(re.findall(r"(\w+)\s*\(", bare)) - CALLED:
        raise ValueError(f"{expression}: no function {sorted(unknown)}")
    words = re.findall(r"[A-Za-z_]\w*", re.sub(r"\{[^}]*\}|\[[^]]*\]|\bby\s*\([^)]*\)", " ", bare))
    if foreign := [word for word in words if word not in CALLED and not word.startswith("ray_")]:
        raise ValueError(f"{expression}: no metrics of Ray's page: {foreign}")
    grouped = {label for labels in re.findall(r"\bby\s*\(([^)]*)\)", bare) for label in re.findall(r"\w+", labels)}
    found = re.findall(r"\b(ray_\w+)(?:\{([^}]*)\})?", bare)
    return [Used(metric=name, labels=frozenset({*re.findall(r"\w+", labels), *grouped})) for name, labels in found]


def _check_brackets(bare: str) -> None:
    open_brackets: list[str] = []
    for mark in re.findall(r"[](){}[]", bare):
        if mark not in CLOSING:
            open_brackets.append(mark)
        elif not open_brackets or open_brackets.pop() != CLOSING[mark]:
            raise ValueError(f"{bare}: {mark!r} closes nothing")
    if open_brackets:
        raise ValueError(f"{bare}: {open_brackets[-1]!r} is not closed")


MONITORING = Path(__file__).parents[1] / "examples" / "monitoring"
DASHBOARD: dict[str, Any] = json.loads((MONITORING / "grafana.json").read_text(encoding="utf-8"))
PANELS: list[dict[str, Any]] = DASHBOARD["panels"]
GRAPHS = [panel for panel in PANELS if panel["type"] != "row"]
VARIABLES = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
UNITS = {"cps", "reqps", "s", "short", "none", "percentunit"}


def expressions() -> list[str]:
    """Returns every expression once, in order."""
    annotations = DASHBOARD["annotations"]["list"]
    return sorted(
        {each["expr"] for each in [*annotations, *(target for panel in GRAPHS for target in panel["targets"])]}
    )


def test_the_metrics_and_labels_of_an_expression_are_found() -> None:
    found = uses('sum by (le, a) (rate(ray_x{b=~"$c", d="e(f)"}[5m])) / min by (a) (ray_y)')
    assert found == [
        Used(metric="ray_x", labels=frozenset({"le", "a", "b", "d"})),
        Used(metric="ray_y", labels=frozenset({"le", "a"})),
    ]
    for wrong in ("sum(x", "x)", "sum by (x", "rat(x[1m])", "x{a=b", "sum(offramp_x)"):
        with pytest.raises(ValueError, match=r"clos|no function|no metrics"):
            uses(wrong)


def test_the_dashboard_shows_exactly_the_documented_metrics() -> None:
    known, seen = documented_series(), set()
    for expression in expressions():
        for used in uses(expression):
            assert used.metric in known, expression
            assert used.labels <= known[used.metric] | added_labels(), expression
            assert not re.search(r"ray_\w+(?!\w|\{[^}]*application)", expression), (
                f"of the chosen services: {expression}"
            )
            seen.add(used.metric)
    assert {family(name) for name in known} == {family(name) for name in seen}


def family(series: str) -> str:
    return re.sub(r"_(bucket|sum|count)_total$", "", series)


def test_a_panel_has_expressions_a_unit_a_description_and_the_chosen_data_source() -> None:
    for panel in GRAPHS:
        title, targets = panel["title"], panel["targets"]
        assert targets, title
        assert all(target["expr"] and target["legendFormat"] for target in targets), title
        assert len({target["refId"] for target in targets}) == len(targets), title
        assert panel["description"].endswith("."), title
        assert panel["fieldConfig"]["defaults"]["unit"] in UNITS, title
        assert panel["fieldConfig"]["defaults"]["thresholds"]["steps"][0]["value"] is None, title
        for each in (panel, *targets):
            assert each["datasource"] == {"type": "prometheus", "uid": "${datasource}"}, title


def test_a_legend_names_the_labels_that_are_left() -> None:
    for target in (target for panel in GRAPHS for target in panel["targets"]):
        named = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
        grouped = {label for group in re.findall(r"by \(([^)]*)\)", target["expr"]) for label in group.split(", ")}
        assert named == grouped - {"le"}, target["expr"]


def test_panels_do_not_overlap() -> None:
    assert len({panel["id"] for panel in PANELS}) == len(PANELS)
    boxes = [panel["gridPos"] for panel in PANELS]
    assert all(box["x"] >= 0 and box["x"] + box["w"] <= 24 for box in boxes)
    assert [pair for pair in combinations(boxes, 2) if overlap(*pair)] == []


def overlap(one: dict[str, int], other: dict[str, int]) -> bool:
    across = one["x"] < other["x"] + other["w"] and other["x"] < one["x"] + one["w"]
    down = one["y"] < other["y"] + other["h"] and other["y"] < one["y"] + one["h"]
    return across and down


def test_prometheus_scrapes_the_series_that_the_dashboard_shows() -> None:
    assert (VARIABLES["datasource"]["type"], VARIABLES["datasource"]["query"]) == ("datasource", "prometheus")
    assert VARIABLES["application"]["definition"] == "label_values(ray_offramp_requests_total, application)"
    variables = set(re.findall(r"\$\{?(\w+)", json.dumps(DASHBOARD)))
    assert variables == {*VARIABLES, "__rate_interval", "__all"}
    config = yaml.safe_load((MONITORING / "prometheus.yaml").read_text(encoding="utf-8"))
    static, discovered = config["scrape_configs"]
    assert static["static_configs"] == [{"targets": ["127.0.0.1:9090"]}]
    assert discovered["file_sd_configs"][0]["files"] == ["/tmp/ray/prom_metrics_service_discovery.json"]
    for job in config["scrape_configs"]:
        [kept] = job["metric_relabel_configs"]
        assert all(re.fullmatch(kept["regex"], name) for name in documented_series())


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool, of Debian's package prometheus, is not here")
def test_promtool_accepts_the_configuration_and_every_expression(tmp_path: Path) -> None:
    config = subprocess.run(["promtool", "check", "config", MONITORING / "prometheus.yaml"], capture_output=True)
    assert config.returncode == 0, config.stderr
    filled = [expression.replace("$__rate_interval", "1m") for expression in expressions()]
    rules = [{"record": f"rule_{index}", "expr": expression} for index, expression in enumerate(filled)]
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    checked = subprocess.run(["promtool", "check", "rules", tmp_path / "rules.yaml"], capture_output=True)
    assert checked.returncode == 0, checked.stderr
    assert f"{len(filled)} rules found" in checked.stdout.decode()


ROOT = Path(__file__).parents[1]
Declared = list[tuple[str, str, frozenset[str]]]


@pytest.fixture(scope="module")
def declared() -> Declared:
    """Returns name, kind and labels of every instrument that a process of a service creates."""
    command = [sys.executable, "-m", "tests.declared_metrics"]
    printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, cwd=ROOT, timeout=60).stdout
    return [(name, kind, frozenset(labels)) for name, kind, labels in json.loads(printed)]


def test_the_documented_metrics_are_exactly_those_declared(declared: Declared) -> None:
    kinds = {"gauge": "gauge", "counter": "counter", "histogram": "counter"}
    rows = [
        (name.removeprefix("ray_").removesuffix("" if row.kind == "gauge" else "_total"), kinds[row.kind], labels)
        for row in documented()
        for name, labels in row.series.items()
    ]
    assert sorted(rows, key=str) == sorted(declared, key=str)


def test_instruments_are_created_only_in_the_known_modules() -> None:
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "deployments").rglob("*.py")]
    tellers = [source for source in sources if "from deployments.metrics import" in source]
    made = [name for source in tellers for name in re.findall(r'"(offramp_\w+)"', source)]
    assert sorted(made) == sorted(row.in_source for row in documented())
    assert sum("from ray.serve.metrics import" in source for source in sources if source not in tellers) == 1


def test_documented_kinds_match_the_suffixes_of_the_names() -> None:
    assert {row.name.endswith("_total") for row in documented() if row.kind == "counter"} == {True}
    assert {row.name.endswith(("_total", "_bucket")) for row in documented() if row.kind != "counter"} == {False}
