from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import Field

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


DEEP = '{"a": ' * 600 + "1" + "}" * 600
NUMBER, TWICE = "x: Input should be a valid number", "stands twice in one mapping"
REFUSED = {
    "key twice": ("a.yaml", "x: 1\nrest:\n  a: 1\n  a: 2\n", f":4: not YAML: 'a' {TWICE}"),
    "key twice at the top": ("a.yaml", "x: 1\nx: 2\n", f":2: not YAML: 'x' {TWICE}"),
    "a date that is none": ("a.yaml", "rest: {}\nx: 2026-13-45\n", ":2: not YAML: month must be in 1..12"),
    "a tag that does not fit": ("a.yaml", "rest: {}\nx: !!bool 7\n", ":2: not YAML: no bool"),
    "a tag without a value": ("a.yaml", "rest: {}\nx: !!int\n", ":2: not YAML: no int"),
    "long": (
        "a.yaml",
        "rest: {}\nx: " + "9" * 5000,
        ":2: not YAML: Exceeds the limit (4300 digits) for integer string",
    ),
    "too deep": ("a.yaml", "\n" + "[" * 3000 + "]" * 3000, ":2: not YAML: nested too deeply"),
    "JSON that is none": ("a.json", '{"x":\n}', ":2: not JSON: Expecting value"),
    "JSON, key twice": ("a.json", '{\n"x": 1,\n"x": 2}', f":3: not JSON: 'x' {TWICE}"),
    "JSON, key twice, no YAML": ("a.json", '{"x": 1, "x": "\x7f"}', f": not JSON: 'x' {TWICE}"),
    "JSON, long": ("a.json", '{"x": ' + "9" * 5000 + "}", ": not JSON: Exceeds the limit (4300 digits) for int"),
    "JSON, too deep": ("a.json", "\n" + "[" * 3000 + "]" * 3000, ": nested too deeply"),
    "JSON, too deep for YAML": ("a.json", f'{{"x": "far", "rest": {DEEP}}}', f": {NUMBER}"),
    "JSON, a character that YAML has not": ("a.json", '{"x": "far", "rest": {"a": "\x7f"}}', f": {NUMBER}"),
    "a key that is missing": ("a.yaml", "# a point\nrest: {}\n", ":2: x: Field required"),
    "of two kinds, the deepest": (
        "a.yaml",
        "x: 1\nnames:\n  one: 1\n  two: b\n",
        ":4: names.two: Input should be a valid integer",
    ),
}
WRONG = {
    "not UTF-8": ("a.yaml", b"# x\nx: \xff\n", ":2: not UTF-8 at byte 7"),
    "a word": ("a.yaml", "x: far", f":1: {NUMBER}, not 'far'"),
    "null": ("a.yaml", "x: null", f":1: {NUMBER}, not null"),
    "true": ("a.yaml", "x: true", f":1: {NUMBER}, not true"),
    "a date": ("a.yaml", "x: 2026-01-02", f":1: {NUMBER}, not 2026-01-02"),
    "a list": ("a.yaml", "x: [1]", f":1: {NUMBER}"),
    "a long word": ("a.yaml", f"x: {'a' * 99}", f":1: {NUMBER}, not '{'a' * 60}...'"),
    "a long integer": ("a.yaml", f"x: 0x1{'0' * 5000}", f":1: {NUMBER}, not an integer of 20001 bits"),
    "no mapping": ("a.yaml", "x: 1\nrest: 7", ":2: rest: Input should be a mapping, not 7"),
    "no mapping at the top": ("a.yaml", "- 1", ":1: the point: Input should be a mapping with x, names and rest"),
}


@pytest.mark.parametrize(("name", "content", "said"), REFUSED.values(), ids=REFUSED)
def test_what_is_wrong_is_said_with_its_line(tmp_path: Path, name: str, content: str, said: str) -> None:
    assert refused(write(tmp_path / name, content)).startswith(said)


@pytest.mark.parametrize(("name", "content", "said"), WRONG.values(), ids=WRONG)
def test_a_wrong_value_is_said_with_what_is_allowed(tmp_path: Path, name: str, content: str | bytes, said: str) -> None:
    assert refused(write(tmp_path / name, content)) == said


def test_keys_that_a_merge_replaces_do_not_stand_twice(tmp_path: Path) -> None:
    text = "rest:\n  a: &a {b: 1, c: 2}\n  d: {<<: *a, c: 3}\n"
    assert read_source(write(tmp_path / "a.yaml", text), DataError).document == {
        "rest": {"a": {"b": 1, "c": 2}, "d": {"b": 1, "c": 3}}
    }


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
