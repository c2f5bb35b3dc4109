"""The metrics that are documented are those that the source declares."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.metrics_page import documented

ROOT = Path(__file__).parents[1]
Declared = list[tuple[str, str, frozenset[str]]]


@pytest.fixture(scope="module")
def declared() -> Declared:
    """Name, kind and labels of every instrument that some process of a service makes."""
    command = [sys.executable, "-m", "tests.declared_metrics"]
    printed = subprocess.run(command, check=True, capture_output=True, cwd=ROOT, timeout=60).stdout
    return [(name, kind, frozenset(labels)) for name, kind, labels in json.loads(printed)]


def test_every_metric_is_documented_with_its_kind_and_labels_and_no_other_is(declared: Declared) -> None:
    rows = [(row.declared, row.kind, row.labels) for row in documented()]
    assert sorted(rows, key=str) == sorted(declared, key=str)


def test_no_instrument_is_made_elsewhere(declared: Declared) -> None:
    source = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "deployments").rglob("*.py"))
    made = re.findall(r'(?:Counter|Gauge|[hH]istogram)\(\s*"(\w+)"', source)
    assert sorted(made) == sorted(name for name, _, _ in declared)


def test_what_the_documents_say_of_kinds_is_what_the_names_end_in() -> None:
    assert {row.name.endswith("_total") for row in documented() if row.kind == "counter"} == {True}
    assert {row.name.endswith(("_total", "_bucket")) for row in documented() if row.kind != "counter"} == {False}
