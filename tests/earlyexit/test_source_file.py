from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import Field

from earlyexit.errors import DataError, InputError, PlanError
from earlyexit.source_file import LineNumbers, Source, StrictDocument, read_source


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
    lines = LineNumbers("a:\n  b:\n    - 1\n    - 2\n")
    assert [lines.of(path) for path in (("a", "b", 1), ("a", "b", 7), ("a", "c"), ("z",), ())] == [4, 3, 2, 1, 1]
    assert LineNumbers().of(("a",)) == 1


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


@pytest.mark.parametrize(("name", "said"), [("a.json", ": nested"), ("a.yaml", ":2: not YAML: nested")])
def test_a_file_that_nests_too_deeply_is_refused(tmp_path: Path, name: str, said: str) -> None:
    with pytest.raises(DataError, match=f"{name}{said} too deeply"):
        read_source(write(tmp_path / name, "\n" + "[" * 3000 + "]" * 3000), DataError)


def refused(path: Path) -> str:
    """What is said of a file, after its name."""
    with pytest.raises(DataError) as caught:
        read_source(path, DataError).parse(Point, called="the point")
    said = str(caught.value)
    assert said.startswith(str(path))
    return said.removeprefix(str(path))


@pytest.mark.parametrize(
    ("path", "said"),
    [
        pytest.param(Path("/no/such.yaml"), ": no such file", id="absent"),
        pytest.param(Path("/"), ": is a folder, not a file", id="folder"),
        pytest.param(Path("a" * 300), ": cannot be read: File name too long", id="long name"),
        pytest.param(Path("/proc/self/mem"), ": cannot be read: Input/output error", id="unreadable"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused_with_the_reason(path: Path, said: str) -> None:
    assert refused(path) == said


def test_a_file_that_is_not_utf_8_is_refused_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_bytes(b"# x\nx: \xff\n")
    assert refused(tmp_path / "a.yaml") == ":2: not UTF-8 at byte 7"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        pytest.param("x: 1\nrest:\n  a: 1\n  a: 2\n", ":4: not YAML: 'a' stands twice in one mapping", id="key twice"),
        pytest.param("x: 1\nx: 2\n", ":2: not YAML: 'x' stands twice in one mapping", id="key twice at the top"),
        pytest.param("rest: {}\nx: 2026-13-45\n", ":2: not YAML: month must be in 1..12", id="a date that is none"),
        pytest.param("rest: {}\nx: !!bool 7\n", ":2: not YAML: no bool", id="a tag that does not fit"),
        pytest.param("rest: {}\nx: !!int\n", ":2: not YAML: no int", id="a tag without a value"),
        pytest.param(
            "rest: {}\nx: " + "9" * 5000,
            ":2: not YAML: Exceeds the limit (4300 digits) for integer string conv",
            id="long",
        ),
    ],
)
def test_yaml_that_would_be_misread_is_refused_with_its_line(tmp_path: Path, text: str, said: str) -> None:
    assert refused(write(tmp_path / "a.yaml", text)).startswith(said)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        pytest.param('{\n"x": 1,\n"x": 2}', ":3: not JSON: 'x' stands twice in one mapping", id="key twice"),
        pytest.param('{"x": 1, "x": "\x7f"}', ": not JSON: 'x' stands twice in one mapping", id="key twice, no YAML"),
        pytest.param('{"x": ' + "9" * 5000 + "}", ": not JSON: Exceeds the limit (4300 digits) for int", id="long"),
    ],
)
def test_json_that_would_be_misread_is_refused(tmp_path: Path, text: str, said: str) -> None:
    assert refused(write(tmp_path / "a.json", text)).startswith(said)


def test_keys_that_a_merge_replaces_do_not_stand_twice(tmp_path: Path) -> None:
    text = "rest:\n  a: &a {b: 1, c: 2}\n  d: {<<: *a, c: 3}\n"
    assert read_source(write(tmp_path / "a.yaml", text), DataError).document == {
        "rest": {"a": {"b": 1, "c": 2}, "d": {"b": 1, "c": 3}}
    }


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x: far", ":1: x: Input should be a valid number, not 'far'"),
        ("x: null", ":1: x: Input should be a valid number, not null"),
        ("x: true", ":1: x: Input should be a valid number, not true"),
        ("x: 2026-01-02", ":1: x: Input should be a valid number, not 2026-01-02"),
        ("x: [1]", ":1: x: Input should be a valid number"),
        (f"x: {'a' * 99}", f":1: x: Input should be a valid number, not '{'a' * 60}...'"),
        (f"x: 0x1{'0' * 5000}", ":1: x: Input should be a valid number, not an integer of 20001 bits"),
        ("x: 1\nrest: 7", ":2: rest: Input should be a mapping, not 7"),
        ("- 1", ":1: the point: Input should be a mapping with x, names and rest"),
    ],
)
def test_a_wrong_value_is_said_with_what_is_allowed(tmp_path: Path, text: str, said: str) -> None:
    assert refused(write(tmp_path / "a.yaml", text)) == said


class Versioned(StrictDocument):
    schema_version: Literal[1] = 1


def test_true_is_no_schema_version(tmp_path: Path) -> None:
    source = read_source(write(tmp_path / "a.yaml", "schema_version: true\n"), DataError)
    with pytest.raises(DataError, match="schema_version: Input should be a valid integer, not true"):
        source.parse(Versioned, called="all of it")
    assert Source(document={"schema_version": 1}, where="a", raises=DataError).parse(Versioned, called="it")


def test_of_a_list_that_is_wrong_throughout_the_first_mistake_is_named() -> None:
    class Many(StrictDocument):
        xs: list[float]

    with pytest.raises(DataError, match=r"^a:1: xs\.0: Input should be a valid number, not 'b'$"):
        Source(document={"xs": ["b"] * 20_000}, where="a", raises=DataError).parse(Many, called="all of it")
