"""Files whose aliases say more than is written out."""

from __future__ import annotations

from pathlib import Path

import pytest

from earlyexit.data import source_file as yaml_aliases
from earlyexit.data.source_file import read_source
from earlyexit.errors import PlanError


def written(folder: Path, text: str) -> Path:
    path = folder / "plan.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def repeated(levels: int, begin: str, each: str) -> str:
    """Each level names the one before nine times; 9 to the power of the levels values altogether."""
    names = [", ".join([f"*a{level}"] * 9) for level in range(levels - 1)]
    return "\n".join(
        [f"a0: &a0 {begin}", *(f"a{level}: &a{level} {each.format(nine)}" for level, nine in enumerate(names, start=1))]
    )


@pytest.mark.parametrize(
    ("begin", "each"), [("[lol]", "[{}]"), ("{k: 1}", "{{<<: [{}]}}")], ids=["lists", "merged mappings"]
)
def test_a_small_file_of_aliases_that_says_billions_of_values_is_refused_where_they_become_too_many(
    tmp_path: Path, begin: str, each: str
) -> None:
    text = repeated(12, begin, each)
    assert len(text) < 1_000
    with pytest.raises(PlanError, match=r"plan\.yaml:6: not YAML: aliases repeat more than 100,000 values"):
        read_source(written(tmp_path, text), PlanError)


def test_aliases_that_repeat_little_say_what_they_name(tmp_path: Path) -> None:
    source = read_source(written(tmp_path, "a: &a {x: 1, y: [2, 3]}\nb: [*a, *a]\nc: {<<: *a, x: 4}\n"), PlanError)
    a = {"x": 1, "y": [2, 3]}
    assert source.document == {"a": a, "b": [a, a], "c": {"x": 4, "y": [2, 3]}}
    assert source.lines.of(("b", 1, "y", 0)) == 1


def test_a_long_file_without_aliases_is_no_concern(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(yaml_aliases, "MOST_REPEATED", 1_000)
    source = read_source(written(tmp_path, "rows: [" + "1, " * 1_500 + "2]"), PlanError)
    assert isinstance(source.document, dict)
    assert len(source.document["rows"]) == 1_501
