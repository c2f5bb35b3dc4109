"""Files that users write (plans, problems, profiles): plain data, and the line of each value.

Errors have the form `file:line: what is wrong` and the error class of the file's reader.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from earlyexit.data.images import check_file
from earlyexit.data.strict import StrictDocument as StrictDocument
from earlyexit.data.strict import fields_of as fields_of
from earlyexit.errors import InputError

MOST_REPEATED = 100_000
"""Most values that aliases may add to those that are written out."""


def _count(node: yaml.Node, says: dict[int, int | None]) -> int:
    """Returns the number of values in a node, aliases expanded, by the counts of nodes that were counted before.

    None marks a node that is being counted. Time and memory depend on what is written out, not on the expanded
    document. Raises yaml.MarkedYAMLError if an alias stands inside what it names, if aliases repeat too many values, or
    at the second of two equal keys of a mapping, of which PyYAML would use the last.
    """
    if id(node) in says:
        known = says[id(node)]
        if known is None:
            raise yaml.MarkedYAMLError(problem="an alias stands inside what it names", problem_mark=node.start_mark)
        return known
    says[id(node)] = None
    count = 1
    keys: set[str] = set()
    for key, inner in _inside(node):
        if isinstance(key, yaml.ScalarNode):
            if key.value in keys:
                words = f"{_shortened(key.value)} stands twice in one mapping"
                raise yaml.MarkedYAMLError(problem=words, problem_mark=key.start_mark)
            keys.add(key.value)
        count += sum(_count(each, says) for each in (key, inner) if each is not None)
        if count > len(says) + MOST_REPEATED:
            words = f"aliases repeat more than {MOST_REPEATED:,} values; so many are allowed"
            raise yaml.MarkedYAMLError(problem=words, problem_mark=node.start_mark)
    says[id(node)] = count
    return count


def _inside(node: yaml.Node) -> list[tuple[yaml.Node | None, yaml.Node]]:
    """Returns the keys and values of a mapping, or the items of a list, which have no keys."""
    if isinstance(node, yaml.MappingNode):
        return list(node.value)
    return [(None, each) for each in node.value] if isinstance(node, yaml.SequenceNode) else []


Document = TypeVar("Document", bound=StrictDocument)
MOST_MISTAKES = 50
"""Most mistakes that are examined to find the first and those inside it; a long list may be wrong throughout."""
SHOWN_CHARACTERS = 60
"""Characters of a wrong text that are shown in a message."""
SHOWN_BITS = 128
"""Largest integer that is shown in a message; of larger ones the number of bits is shown."""


class _Loader(yaml.SafeLoader):
    """A YAML loader that reads all of JSON's numbers: PyYAML alone reads 1e-05 and 1.25e9 as text."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Raise yaml.MarkedYAMLError with the line where PyYAML raises Python's own error."""
        try:
            return super().construct_object(node, deep)
        except (ValueError, KeyError, IndexError, AttributeError) as error:  # a date that is none, `!!bool 7`, `!!int`
            reason = str(error).partition(";")[0] if isinstance(error, ValueError) else f"no {node.tag.split(':')[-1]}"
            raise yaml.MarkedYAMLError(problem=reason, problem_mark=node.start_mark) from error


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def line_of(text: str, path: Sequence[str | int]) -> int:
    """Returns the line, from 1, of the value at `path` in YAML or JSON, or of the nearest value above it.

    Raises yaml.YAMLError where the text is no YAML, has aliases that cannot be expanded, or a key stands twice.
    """
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
    except RecursionError as error:
        raise yaml.MarkedYAMLError(problem="nested too deeply", problem_mark=loader.get_mark()) from error
    if node is None:
        return 1
    _count(node, {})
    for part in map(str, path):
        inside = enumerate(_inside(node))
        found = [inner for k, (key, inner) in inside if part == str(k if key is None else key.value)]
        if not found:
            break
        node = found[0]
    return node.start_mark.line + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Plain data, and the places of its values for error messages."""

    document: object
    where: str
    """The file, or a description if there is no file."""
    raises: type[InputError]
    text: str = ""
    """What the file holds, in which the lines of values are looked up."""

    def parse(self, shape: type[Document], *, called: str) -> Document:
        """Returns the data as a pydantic model; raises `raises`. `called`: the name of the document in messages."""
        try:
            return shape.model_validate(self.document)
        except ValidationError as error:
            at, message = _first_mistake(error, self.document)
            raise self.raises(f"{self._place(at)}: {'.'.join(at) or called}: {message}") from error

    @contextmanager
    def said_at(self, path: Sequence[str | int]) -> Iterator[None]:
        """Add file and line to the message of an error of the class `raises` that is raised inside."""
        try:
            yield
        except self.raises as error:
            raise self.raises(f"{self._place(path)}: {error}") from error

    def _place(self, path: Sequence[str | int]) -> str:
        try:
            return f"{self.where}:{line_of(self.text, path)}"
        except (yaml.YAMLError, RecursionError):  # JSON may nest deeper, and has characters that YAML has not
            return self.where


def read_source(path: Path, raises: type[InputError], *, hint: str = "") -> Source:
    """Reads a file as JSON if its name ends in .json, else as YAML; raises `raises` with file and line.

    `hint`: the end of the message "no such file", such as the command that makes the file.
    """
    check_file(path, raises, hint=hint)
    try:
        stored = path.read_bytes()
        text = stored.decode("utf-8")
    except OSError as error:  # a file that may not be read
        raise raises(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        line = stored.count(b"\n", 0, error.start) + 1
        raise raises(f"{path}:{line}: not UTF-8 at byte {error.start}") from error
    try:
        return _read_json(text, path, raises) if path.suffix == ".json" else _read_yaml(text, path, raises)
    except RecursionError as error:
        raise raises(f"{path}: nested too deeply") from error


def _read_json(text: str, path: Path, raises: type[InputError]) -> Source:
    # JSON is YAML but for tabs, which JSON has only between values: the lines stay.
    as_yaml = text.replace("\t", " ")
    try:
        document = json.loads(text, object_pairs_hook=_mapping)
    except json.JSONDecodeError as error:
        raise raises(f"{path}:{error.lineno}: not JSON: {error.msg}") from error
    except ValueError as error:  # a key that stands twice, or an integer of more digits than Python reads
        raise raises(f"{path}{_line_of_second(as_yaml)}: not JSON: {str(error).partition('; use sys.')[0]}") from error
    return Source(document=document, where=str(path), raises=raises, text=as_yaml)


def _mapping(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns a JSON mapping; raises ValueError where a key occurs twice, of which Python would use the last."""
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        second = next(key for index, key in enumerate(keys) if key in keys[:index])
        raise ValueError(f"{_shortened(second)} stands twice in one mapping")
    return found


def _line_of_second(text: str) -> str:
    """Returns the line of a key that occurs twice, found by the YAML reader, as `:LINE`."""
    try:
        line_of(text, ())
    except yaml.MarkedYAMLError as error:
        return f":{error.problem_mark.line + 1}" if error.problem_mark else ""
    except (yaml.YAMLError, RecursionError):  # as in Source
        return ""
    return ""


def _read_yaml(text: str, path: Path, raises: type[InputError]) -> Source:
    try:
        line_of(text, ())  # an alias inside what it names would not end when loaded, and aliases of aliases fill memory
        document = yaml.load(text, Loader=_Loader)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise raises(f"{path}:{line}: not YAML: {error.reason}") from error
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise raises(f"{path}:{line}: not YAML: {error.problem}") from error
    return Source(document=document, where=str(path), raises=raises, text=text)


def _first_mistake(error: ValidationError, document: object) -> tuple[list[str], str]:
    """Returns the path and message of the first mistake; of a union's alternatives, the deepest one."""
    mistakes = [
        (_path_in(document, each["loc"], each["type"]), _message(each)) for each in error.errors()[:MOST_MISTAKES]
    ]
    at, _ = mistakes[0]
    return max((each for each in mistakes if each[0][: len(at)] == at), key=lambda each: len(each[0]))


def _message(mistake: ErrorDetails) -> str:
    """Returns pydantic's message about what is allowed, and the value that is not."""
    message, given = mistake["msg"], mistake["input"]
    if mistake["type"] == "dict_type":
        message = "Input should be a mapping"
    if not message.startswith("Input should") or isinstance(given, Mapping | list):
        return message
    return f"{message}, not {_shown(given)}"


def _shown(value: object) -> str:
    """Returns a value as in its file, on one line."""
    if isinstance(value, int) and not isinstance(value, bool):
        bits = value.bit_length()
        return str(value) if bits <= SHOWN_BITS else f"an integer of {bits} bits"
    if isinstance(value, str):
        return _shortened(value)
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)


def _shortened(text: str) -> str:
    return repr(text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}...")


def _path_in(document: object, location: tuple[int | str, ...], kind: str) -> list[str]:
    """Returns pydantic's location without parts that are not in the document, such as a union's alternative."""
    path: list[str] = []
    here: Any = document
    for part in location:
        keyed = here.items() if isinstance(here, Mapping) else enumerate(here) if isinstance(here, list) else ()
        inside = {str(key): inner for key, inner in keyed}
        if str(part) in inside:
            path.append(str(part))
            here = inside[str(part)]
    return [*path, str(location[-1])] if kind == "missing" else path
