from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import Field

from earlyexit.data import source_file
from earlyexit.data.source_file import LineNumbers, Source, StrictDocument, read_source
from earlyexit.errors import DataError, InputError, PlanError


class Point(StrictDocument):
    x: float
    names: int | dict[str, int] = 0
    rest: dict[str, Any] = Field(default_factory=dict)


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@pytest.mark.parametrize("text", ["1.25e9", "1e5", "1E+5", "1e-05", "-2e-3", "3.", "0.5", "7"])
def test_numbers_are_the_same_in_yaml_and_in_python(tmp_path: Path, text: str) -> None:
    source = read_source(write(tmp_path / "a.yaml", f"x: {text}\n"), DataError)
    assert source.document == {"x": float(text)}


@pytest.mark.parametrize("text", ["e5", "1e", "1e5s", "v1.5e3", "1-2e3", "2026-10-17e1"])
def test_words_that_look_like_numbers_stay_words(tmp_path: Path, text: str) -> None:
    assert read_source(write(tmp_path / "a.yaml", f"x: {text}\n"), DataError).document == {"x": text}


@pytest.mark.parametrize("raises", [DataError, PlanError])
def test_what_is_wrong_is_raised_as_the_readers_error(tmp_path: Path, raises: type[InputError]) -> None:
    source = read_source(write(tmp_path / "a.yaml", "rest: {}\nx: far\n"), raises)
    with pytest.raises(raises, match=r"a\.yaml:2: x: Input should be a valid number"):
        source.parse(Point, called="the point")
    with pytest.raises(raises, match=r"a\.yaml:2: too far"), source.said_at(("x",)):
        raise raises("too far")


def test_another_error_is_left_as_it_is() -> None:
    with pytest.raises(PlanError) as kept, Source(document={}, where="a", raises=DataError).said_at(("x",)):
        raise PlanError("no plan")
    assert str(kept.value) == "no plan"


def test_the_line_of_what_is_not_there_is_that_of_the_nearest_above() -> None:
    lines = LineNumbers("a:\n  b:\n    - 1\n    - 2\n")
    assert [lines.of(path) for path in (("a", "b", 1), ("a", "b", 7), ("a", "c"), ("z",), ())] == [4, 3, 2, 1, 1]
    assert LineNumbers().of(("a",)) == 1


def test_json_is_read_as_json_where_the_name_says_so(tmp_path: Path) -> None:
    text = '{\n\t"x": 1e-05,\n\t"rest": {"face": "\\ud83d\\ude00"}\n}'
    source = read_source(write(tmp_path / "a.json", text), DataError)
    assert source.document == {"x": 1e-05, "rest": {"face": "\U0001f600"}}
    assert source.lines.of(("rest", "face")) == 3


def test_keys_that_a_merge_replaces_do_not_stand_twice(tmp_path: Path) -> None:
    text = "rest:\n  a: &a {b: 1, c: 2}\n  d: {<<: *a, c: 3}\n"
    assert read_source(write(tmp_path / "a.yaml", text), DataError).document == {
        "rest": {"a": {"b": 1, "c": 2}, "d": {"b": 1, "c": 3}}
    }


def test_of_a_list_that_is_wrong_throughout_the_first_mistake_is_named() -> None:
    class Many(StrictDocument):
        xs: list[float]

    with pytest.raises(DataError, match=r"^a:1: xs\.0: Input should be a valid number, not 'b'$"):
        Source(document={"xs": ["b"] * 20_000}, where="a", raises=DataError).parse(Many, called="all of it")


# Aliases


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
        read_source(write(tmp_path / "plan.yaml", text), PlanError)


def test_few_aliases_say_what_they_name_and_long_files_may_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = read_source(
        write(tmp_path / "plan.yaml", "a: &a {x: 1, y: [2, 3]}\nb: [*a, *a]\nc: {<<: *a, x: 4}\n"), PlanError
    )
    a = {"x": 1, "y": [2, 3]}
    assert source.document == {"a": a, "b": [a, a], "c": {"x": 4, "y": [2, 3]}}
    assert source.lines.of(("b", 1, "y", 0)) == 1
    monkeypatch.setattr(source_file, "MOST_REPEATED", 1_000)
    source = read_source(write(tmp_path / "plan.yaml", "rows: [" + "1, " * 1_500 + "2]"), PlanError)
    assert isinstance(source.document, dict)
    assert len(source.document["rows"]) == 1_501
