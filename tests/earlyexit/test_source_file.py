from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import Field

from earlyexit.errors import DataError, InputError, PlanError
from earlyexit.source_file import Lines, Source, StrictDocument, read_source


class Point(StrictDocument):
    x: float
    names: int | dict[str, int] = 0
    rest: dict[str, Any] = Field(default_factory=dict)


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
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


def test_a_key_that_is_missing_is_named_at_the_line_of_what_lacks_it(tmp_path: Path) -> None:
    source = read_source(write(tmp_path / "a.yaml", "# a point\nrest: {}\n"), DataError)
    with pytest.raises(DataError, match=r"a\.yaml:2: x: Field required"):
        source.parse(Point, called="the point")


def test_of_a_value_of_two_kinds_the_deepest_mistake_is_named_by_its_place_in_the_file(tmp_path: Path) -> None:
    source = read_source(write(tmp_path / "a.yaml", "x: 1\nnames:\n  one: 1\n  two: b\n"), DataError)
    with pytest.raises(DataError, match=r"a\.yaml:4: names\.two: Input should be a valid integer"):
        source.parse(Point, called="the point")


def test_the_line_of_what_is_not_there_is_that_of_the_nearest_above() -> None:
    lines = Lines("a:\n  b:\n    - 1\n    - 2\n")
    assert [lines.of(path) for path in (("a", "b", 1), ("a", "b", 7), ("a", "c"), ("z",), ())] == [4, 3, 2, 1, 1]
    assert Lines().of(("a",)) == 1


def test_json_is_read_as_json_where_the_name_says_so(tmp_path: Path) -> None:
    text = '{\n\t"x": 1e-05,\n\t"rest": {"face": "\\ud83d\\ude00"}\n}'
    source = read_source(write(tmp_path / "a.json", text), DataError)
    assert source.document == {"x": 1e-05, "rest": {"face": "\U0001f600"}}
    assert source.lines.of(("rest", "face")) == 3


def test_json_that_is_none_is_refused_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a\.json:2: not JSON: Expecting value"):
        read_source(write(tmp_path / "a.json", '{"x":\n}'), DataError)


@pytest.mark.parametrize(
    "rest",
    [
        pytest.param('{"a": ' * 600 + "1" + "}" * 600, id="too deep for YAML"),
        pytest.param('{"a": "\x7f"}', id="a character that YAML has not"),
    ],
)
def test_json_without_lines_is_refused_by_its_name(tmp_path: Path, rest: str) -> None:
    source = read_source(write(tmp_path / "a.json", f'{{"x": "far", "rest": {rest}}}'), DataError)
    with pytest.raises(DataError, match=r"a\.json: x: Input should be a valid number"):
        source.parse(Point, called="the point")


@pytest.mark.parametrize("name", ["a.json", "a.yaml"])
def test_a_file_that_nests_too_deeply_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError, match=f"{name}: nested too deeply"):
        read_source(write(tmp_path / name, "[" * 3000 + "]" * 3000), DataError)
