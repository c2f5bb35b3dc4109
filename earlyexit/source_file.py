"""Files that people write (plans, problems, profiles): plain data, and the line on which each value stands.

Whatever is wrong with one is said as `file:line: what is wrong`, in the error class of the file's reader.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from earlyexit.errors import InputError

Document = TypeVar("Document", bound="StrictDocument")


class StrictDocument(BaseModel):
    """Base of what is read from files: no unknown keys, no silent conversions, no NaN."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class _Loader(yaml.SafeLoader):
    """YAML whose numbers are those of JSON too: PyYAML alone reads 1e-05 and 1.25e9 as text."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


class Lines:
    """Where in a text of YAML or JSON every value stands; searched for when first asked."""

    def __init__(self, text: str = "") -> None:
        self._text = text
        self._lines: dict[tuple[str, ...], int] | None = None

    def of(self, path: Sequence[str | int]) -> int:
        """Line, from 1, of the value at `path` or of the nearest one above it; raises yaml.YAMLError."""
        if self._lines is None:
            lines: dict[tuple[str, ...], int] = {}
            root = yaml.compose(self._text, Loader=_Loader)
            if root is not None:
                self._walk(root, (), (), lines)
            self._lines = lines
        for length in range(len(path), -1, -1):
            line = self._lines.get(tuple(map(str, path[:length])))
            if line is not None:
                return line
        return 1

    def _walk(
        self,
        node: yaml.Node,
        path: tuple[str, ...],
        above: tuple[yaml.Node, ...],
        lines: dict[tuple[str, ...], int],
    ) -> None:
        if any(node is each for each in above):
            raise yaml.MarkedYAMLError(problem="an alias stands inside what it names", problem_mark=node.start_mark)
        lines[path] = node.start_mark.line + 1
        if isinstance(node, yaml.MappingNode):
            # A key that is no scalar is refused when the file is loaded.
            inside = [(str(key.value), value) for key, value in node.value]
        elif isinstance(node, yaml.SequenceNode):
            inside = [(str(index), value) for index, value in enumerate(node.value)]
        else:
            return
        for name, value in inside:
            self._walk(value, (*path, name), (*above, node), lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Plain data, and how to say what is wrong with it."""

    document: object
    where: str
    """The file, or what stands for it where there is none."""
    raises: type[InputError]
    lines: Lines = field(default_factory=Lines)

    def parse(self, shape: type[Document], *, called: str) -> Document:
        """The data in a pydantic shape; raises `raises`. A mistake at the top is said of what the file is `called`."""
        try:
            return shape.model_validate(self.document)
        except ValidationError as error:
            at, message = _first_mistake(error, self.document)
            raise self.raises(f"{self._place(at)}: {'.'.join(at) or called}: {message}") from error

    @contextmanager
    def said_at(self, path: Sequence[str | int]) -> Iterator[None]:
        """Put file and line before the message of an error of `raises` raised inside."""
        try:
            yield
        except self.raises as error:
            raise self.raises(f"{self._place(path)}: {error}") from error

    def _place(self, path: Sequence[str | int]) -> str:
        try:
            return f"{self.where}:{self.lines.of(path)}"
        except (yaml.YAMLError, RecursionError):  # JSON nests deeper than YAML is read, and has characters YAML has not
            return self.where


def read_source(path: Path, raises: type[InputError]) -> Source:
    """Read a file as JSON where its name ends in .json, else as YAML; raises `raises` naming file and line."""
    if not path.is_file():
        raise raises(f"{path}: no such file")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise raises(f"{path}: not UTF-8 at byte {error.start}") from error
    try:
        return _read_json(text, path, raises) if path.suffix == ".json" else _read_yaml(text, path, raises)
    except RecursionError as error:
        raise raises(f"{path}: nested too deeply") from error


def _read_json(text: str, path: Path, raises: type[InputError]) -> Source:
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        raise raises(f"{path}:{error.lineno}: not JSON: {error.msg}") from error
    # JSON is YAML but for tabs, which JSON has only between values: the lines stay.
    return Source(document=document, where=str(path), raises=raises, lines=Lines(text.replace("\t", " ")))


def _read_yaml(text: str, path: Path, raises: type[InputError]) -> Source:
    lines = Lines(text)
    try:
        lines.of(())  # an alias inside what it names would not end when loaded
        document = yaml.load(text, Loader=_Loader)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise raises(f"{path}:{line}: not YAML: {error.reason}") from error
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise raises(f"{path}:{line}: not YAML: {error.problem}") from error
    except ValueError as error:  # a date that is none
        raise raises(f"{path}: not YAML: {error}") from error
    return Source(document=document, where=str(path), raises=raises, lines=lines)


def _first_mistake(error: ValidationError, document: object) -> tuple[list[str], str]:
    """Path and message; of a value that may be a number or a mapping, what is wrong deepest inside."""
    mistakes = [(_path_in(document, each["loc"], each["type"]), each["msg"]) for each in error.errors()]
    at, _ = mistakes[0]
    return max((each for each in mistakes if each[0][: len(at)] == at), key=lambda each: len(each[0]))


def _path_in(document: object, location: tuple[int | str, ...], kind: str) -> list[str]:
    """Pydantic's location without what is no place in the document, such as the member of a union that was tried."""
    path: list[str] = []
    here: Any = document
    for part in location:
        inside = _inside(here)
        if str(part) in inside:
            path.append(str(part))
            here = inside[str(part)]
    return [*path, str(location[-1])] if kind == "missing" else path


def _inside(value: object) -> dict[str, Any]:
    if isinstance(value, Mapping):
        return {str(key): inner for key, inner in value.items()}
    if isinstance(value, list):
        return {str(index): inner for index, inner in enumerate(value)}
    return {}
