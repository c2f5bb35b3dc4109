"""Reading of YAML and JSON files that users write (plans, problems, profiles), with line numbers in errors.

Errors have the form `file:line: what is wrong`, and the class that the caller chooses.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

import yaml
from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from earlyexit.data.images import check_file
from earlyexit.data.strict import REFUSED
from earlyexit.data.strict import StrictDocument as StrictDocument
from earlyexit.errors import InputError

MOST_REPEATED = 100_000
"""Maximum number of values that aliases may add to the values of a document."""


def _count(node: yaml.Node, counts: dict[int, int | None]) -> int:
    """Returns the number of values in a node with aliases expanded, without expanding them.

    `counts`: the counts of nodes by `id`; None marks a node that is being counted. Raises yaml.MarkedYAMLError for an
    alias inside its own anchor, for aliases that repeat too many values, and for a repeated key of a mapping.
    """
    if id(node) in counts:
        known = counts[id(node)]
        if known is None:
            raise yaml.MarkedYAMLError(problem="an alias is inside its own anchor", problem_mark=node.start_mark)
        return known
    counts[id(node)] = None
    count = 1
    keys: set[str] = set()
    for key, inner in _items(node):
        if isinstance(key, yaml.ScalarNode):
            if key.value in keys:
                problem = f"{_shortened(key.value)} occurs twice in one mapping"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            keys.add(key.value)
        count += sum(_count(child, counts) for child in (key, inner) if child is not None)
        if count > len(counts) + MOST_REPEATED:
            problem = f"aliases repeat more than {MOST_REPEATED:,} values"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
    counts[id(node)] = count
    return count


def _items(node: yaml.Node | None) -> list[tuple[yaml.Node | None, yaml.Node]]:
    """Returns the keys and values of a mapping, or the items of a list with None for keys."""
    if isinstance(node, yaml.MappingNode):
        return list(node.value)
    return [(None, item) for item in node.value] if isinstance(node, yaml.SequenceNode) else []


Document = TypeVar("Document")
MOST_MISTAKES = 50
"""Maximum number of mistakes that are examined to find the first one, because a long list may be wrong throughout."""
SHOWN_CHARACTERS = 60
"""Maximum characters of a wrong text in a message."""
NOT_DECIMAL = re.compile(r":|^[-+]?0[0-9_]")
"""Found in numbers that YAML 1.1 reads to base 60 (1:30 is 90) or 8 (010 is 8)."""
SHOWN_BITS = 128
"""Maximum size of an integer in a message. For larger integers, the message has the number of bits."""


class _Loader(yaml.SafeLoader):
    """A YAML loader that reads all JSON numbers. PyYAML alone reads 1e-05 and 1.25e9 as strings."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Raises yaml.MarkedYAMLError with the line, where PyYAML raises an error without it."""
        try:
            if node.tag.endswith((":int", ":float")) and NOT_DECIMAL.search(str(node.value)):
                raise ValueError(f"{node.value} is not a decimal number")
            return super().construct_object(node, deep)
        except (ValueError, KeyError, IndexError, AttributeError) as error:  # invalid dates, `!!bool 7`, `!!int`
            reason = str(error).partition(";")[0] if isinstance(error, ValueError) else f"no {node.tag.split(':')[-1]}"
            raise yaml.MarkedYAMLError(problem=reason, problem_mark=node.start_mark) from error

    def get_single_node(self) -> yaml.Node | None:
        """Returns the root. Aliases are checked before they are expanded, which might not end, or fill the memory."""
        try:
            if (node := super().get_single_node()) is not None:
                _count(node, {})
        except RecursionError as error:
            raise yaml.MarkedYAMLError(problem="nested too deeply", problem_mark=self.get_mark()) from error
        return node


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def line_of(text: str, path: Sequence[str | int]) -> int:
    """Returns the line, from 1, of the value at `path` in YAML or JSON, or of its nearest existing parent.

    Raises yaml.YAMLError if the text is not YAML, has aliases that cannot be expanded, or repeats a key.
    """
    node = _Loader(text).get_single_node()
    for part in map(str, path):
        children = {str(k if key is None else key.value): child for k, (key, child) in enumerate(_items(node))}
        if part not in children:
            break
        node = children[part]
    return 1 if node is None else node.start_mark.line + 1


@cache
def adapter_of(shape: Any) -> TypeAdapter[Any]:
    """Returns pydantic's adapter of a type, which validates and dumps values."""
    return TypeAdapter(shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Plain data from a file, with the text of the file to find the lines of values for error messages."""

    document: object
    where: str
    """The path of the file, or a description if there is no file."""
    raises: type[InputError]
    """The class of errors."""
    text: str = ""
    """The content of the file."""

    def parse(self, shape: type[Document], *, called: str, folder: Path | None = None) -> Document:
        """Returns the data as a `StrictDocument` or as a dataclass that is `FromFile`; raises `raises`.

        `called`: name of the document in messages. `folder`: folder of files in the document, for validators.
        """
        try:
            document: Document = adapter_of(cast("Any", shape)).validate_python(self.document, context=folder)
        except ValidationError as error:
            at, details = _first_mistake(error, self.document)
            if details["type"] == REFUSED:
                raise self._error(details["ctx"]["error"], at) from error
            raise self.raises(f"{self._place(at)}: {'.'.join(at) or called}: {_message(details)}") from error
        return document

    @contextmanager
    def errors_at(self, path: Sequence[str | int] = ()) -> Iterator[None]:
        """Adds the file and the line to errors about the value at `path` that are raised in the block.

        These are errors of the class `raises`, and InputErrors with a path `at`, which is inside that value.
        """
        try:
            yield
        except InputError as error:
            if not (error.at or isinstance(error, self.raises)):
                raise
            raise self._error(error, (*path, *error.at)) from error

    @contextmanager
    def located(self) -> Iterator[None]:
        """Adds the file and the line to InputErrors with a path `at`. Other errors are not changed."""
        try:
            yield
        except InputError as error:
            if not error.at:
                raise
            raise self._error(error, error.at) from error

    def _error(self, error: InputError, path: Sequence[str | int]) -> InputError:
        """Returns the error with the file and the line of a path. Errors of other classes do not name the value."""
        named = "" if type(error) is self.raises or not path else f"{'.'.join(map(str, path))}: "
        return self.raises(f"{self._place(path)}: {named}{error}")

    def _place(self, path: Sequence[str | int]) -> str:
        try:
            return f"{self.where}:{line_of(self.text, path)}"
        except yaml.YAMLError:  # JSON can nest deeper than YAML, and allows more characters
            return self.where


def read_source(path: Path, raises: type[InputError], *, hint: str = "") -> Source:
    """Reads a file as JSON if its suffix is .json, else as YAML. Raises `raises` with file and line.

    `hint`: appended to the message for a missing file, such as the command that creates the file.
    """
    check_file(path, raises, hint=hint)
    try:
        content = path.read_bytes()
        text = content.decode("utf-8-sig")
    except OSError as error:  # for example, no permission
        raise raises(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise raises(f"{path}:{line}: not UTF-8 at byte {error.start}") from error
    try:
        return _read_json(text, path, raises) if path.suffix == ".json" else _read_yaml(text, path, raises)
    except RecursionError as error:
        raise raises(f"{path}: nested too deeply") from error


def _read_json(text: str, path: Path, raises: type[InputError]) -> Source:
    # The YAML reader finds the lines of values. JSON is YAML except for tabs, which occur only between values.
    as_yaml = text.replace("\t", " ")
    try:
        document = json.loads(text, object_pairs_hook=mapping_of)
    except json.JSONDecodeError as error:
        raise raises(f"{path}:{error.lineno}: not JSON: {error.msg}") from error
    except ValueError as error:  # a repeated key, or an integer with more digits than Python converts
        raise raises(f"{path}{_line_of_repeat(as_yaml)}: not JSON: {str(error).partition('; use sys.')[0]}") from error
    return Source(document=document, where=str(path), raises=raises, text=as_yaml)


def mapping_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns a JSON mapping; raises ValueError for a repeated key, for which Python would use the last value."""
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        repeated = next(key for index, (key, _) in enumerate(pairs) if key in dict(pairs[:index]))
        raise ValueError(f"{_shortened(repeated)} occurs twice in one mapping")
    return mapping


def _line_of_repeat(text: str) -> str:
    """Returns the line of the first repeated key as `:LINE`; empty if the YAML reader does not find it."""
    try:
        line_of(text, ())
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        return f":{mark.line + 1}" if mark else ""
    return ""


def _read_yaml(text: str, path: Path, raises: type[InputError]) -> Source:
    try:
        document = yaml.load(text, Loader=_Loader)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise raises(f"{path}:{line}: not YAML: {error.reason}") from error
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise raises(f"{path}:{line}: not YAML: {error.problem}") from error
    return Source(document=document, where=str(path), raises=raises, text=text)


def _first_mistake(error: ValidationError, document: object) -> tuple[list[str], ErrorDetails]:
    """Returns path and details of the first mistake. In a union, it is the deepest mistake of all alternatives."""
    mistakes = [
        (_path_in(document, details["loc"], details["type"]), details) for details in error.errors()[:MOST_MISTAKES]
    ]
    first, _ = mistakes[0]
    inside_first = [(path, details) for path, details in mistakes if path[: len(first)] == first]
    return max(inside_first, key=lambda mistake: len(mistake[0]))


def _message(details: ErrorDetails) -> str:
    """Returns pydantic's message about what is allowed, with the wrong value."""
    message, value = details["msg"], details["input"]
    if details["type"] in ("dict_type", "tuple_type", "too_short", "too_long"):
        message = message.replace("valid dictionary", "mapping").replace("Dictionary", "Mapping")
        message = message.replace("tuple", "list").replace("Tuple", "List").replace(" after validation", "")
    if not message.startswith("Input should") or isinstance(value, Mapping | list):
        return message
    return f"{message}, not {_shown(value)}"


def _shown(value: object) -> str:
    """Returns a value as it is written in a file, on one line."""
    if isinstance(value, int) and not isinstance(value, bool):
        bits = value.bit_length()
        return str(value) if bits <= SHOWN_BITS else f"an integer of {bits} bits"
    if isinstance(value, str):
        return _shortened(value)
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)


def _shortened(text: str) -> str:
    return repr(text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}...")


def _path_in(document: object, location: tuple[int | str, ...], kind: str) -> list[str]:
    """Returns pydantic's location without the parts that are not in the document, such as a union's alternative."""
    path: list[str] = []
    current: Any = document
    for part in location:
        if isinstance(current, list):
            current = dict(enumerate(current))
        children = {str(key): child for key, child in current.items()} if isinstance(current, Mapping) else {}
        if str(part) in children:
            path.append(str(part))
            current = children[str(part)]
    return [*path, str(location[-1])] if kind == "missing" else path
