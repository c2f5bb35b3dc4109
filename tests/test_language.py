"""Tests that texts use words of persons only for persons, and that sentences of user documents are short.

`python -m tests.test_language` prints every occurrence, per folder.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PERSONS = re.compile(r"\b(who|whom|whoever|nobody|somebody|anybody|everybody)\b", flags=re.IGNORECASE)
OF_PEOPLE = frozenset({"**For whom:** teams"})
"""Phrases that speak of people; words inside of them are not counted."""
FOLDERS = (
    *("README.md", "CHANGELOG.md", "docs", "examples", "experiments", "tests"),
    *("profiles", "cluster", "simulator", "offramp", "earlyexit", "deployments", "optimizer"),
)
SHORT = (
    "README.md",
    *(
        f"docs/{name}.md"
        for name in ("quickstart", "concepts", "models", "api", "deploy", "operate", "planning", "generation")
    ),
)
MOST_WORDS = 30


@dataclass(frozen=True, kw_only=True)
class Place:
    """A word of persons, with its file and line."""

    path: Path
    line: int
    word: str
    text: str

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}: {self.word}: {self.text.strip()}"


def texts_of_python(path: Path) -> Iterator[tuple[int, str]]:
    """Yields the comments and string constants of a module with their first lines, but not names."""
    source = path.read_text(encoding="utf-8")
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def texts_of(path: Path) -> Iterator[tuple[int, str]]:
    """Yields the prose of a file with line numbers: every line of Markdown, comments and strings of Python."""
    if path.suffix == ".py":
        yield from texts_of_python(path)
    else:
        yield from enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)


def files_of(name: str) -> list[Path]:
    path = ROOT / name
    if path.is_file():
        return [path]
    return sorted(each for each in path.rglob("*") if each.suffix in {".py", ".md"} and each != Path(__file__))


def places(name: str) -> list[Place]:
    """Returns every word of persons in a file or folder."""
    return [
        Place(path=path, line=start + index, word=found[0], text=line)
        for path in files_of(name)
        if PERSONS.search(path.read_text(encoding="utf-8"))
        for start, text in texts_of(path)
        if PERSONS.search(text)
        for index, line in enumerate(text.splitlines())
        for found in PERSONS.finditer(line)
        if not any(phrase in line for phrase in OF_PEOPLE)
    ]


def sentences(text: str) -> Iterator[str]:
    """Yields sentences of Markdown text, list items and cells; not code, link targets and generated tables."""
    text = re.sub(r"<!-- (\w+) -->.*?<!-- end -->|^```.*?^```|^    .*?$", "\n", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"`[^`]*`", "code", text)
    for block in re.split(r"\n\s*\n|\n(?=- |\d+\. |\||#)|\|", text):
        yield from (" ".join(each.split()) for each in re.split(r"(?<=[.?!])\s", block))


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_uses_words_of_persons_only_for_persons(name: str) -> None:
    assert [str(place) for place in places(name)] == []


@pytest.mark.parametrize("name", SHORT)
def test_sentences_of_user_documents_have_at_most_thirty_words(name: str) -> None:
    long = [each for each in sentences((ROOT / name).read_text(encoding="utf-8")) if len(each.split()) > MOST_WORDS]
    assert long == []


def test_only_comments_and_strings_are_searched(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text('"""Of whom."""\nwho = "nobody"  # everybody\nvalue = f"{who} and whoever"\n', encoding="utf-8")
    found = Counter(word[0] for _, text in texts_of_python(module) for word in PERSONS.finditer(text))
    assert found == {"whom": 1, "nobody": 1, "everybody": 1, "whoever": 1}


if __name__ == "__main__":
    for folder in FOLDERS:
        found = places(folder)
        print(*found, f"{folder}: {len(found)}", sep="\n")  # noqa: T201 - prints by design
