"""Golden tables of refusals: named cases, one per rule, and a file with every message, word for word.

`python -m tests.refusals FOLDER` writes the file of `tests/FOLDER` again.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path

import pytest

Case = Callable[[], object]
FileCase = tuple[Callable[[Path], object], str, str | bytes | None]
"""A reader, the name of its file, and the file's contents; None if the file does not exist."""


@dataclass(frozen=True, kw_only=True)
class Refusals:
    """The cases of a test module; `refusals.txt` next to the module has their messages."""

    module: Path
    name: str
    """The module's `__name__`; messages contain HERE in its place."""
    cases: Mapping[str, Case]
    files: Mapping[str, FileCase]
    folders: Mapping[str, Callable[[Path], object]] = field(default_factory=dict)
    """Readers that write into the folder that they get."""

    @property
    def names(self) -> list[str]:
        return [*self.cases, *self.files, *self.folders]

    def message_of(self, name: str, folder: Path) -> str:
        """Returns the class and the message of a case's error; `folder` is an empty one."""
        try:
            if name in self.cases:
                self.cases[name]()
            elif name in self.folders:
                self.folders[name](folder)
            else:
                read, file_name, content = self.files[name]
                if content is not None:
                    (folder / file_name).write_bytes(content if isinstance(content, bytes) else content.encode())
                read(folder / file_name)
        except Exception as error:
            message = str(error).replace(str(folder), "FOLDER").replace(str(self.module), "THIS FILE")
            message = message.replace(str(self.module.parent), "TESTS")
            message = re.sub(r"FOLDER/tmp\w+", "FOLDER/TEMPORARY", message)
            message = re.sub(r"(?s)(does not fit model\.json: ).*", r"\1WHY", message)  # text of a library
            return f"{type(error).__name__}: {message}".replace("\n", " ").replace(self.name, "HERE")
        return "nothing is refused"

    def recorded(self) -> dict[str, str]:
        """Returns the messages of the golden file by case."""
        lines = self.module.with_name("refusals.txt").read_text(encoding="utf-8").splitlines()
        return dict(line.split(" => ", 1) for line in lines)

    def tests(self, *, but_for: str | None = None) -> tuple[Callable[[str, Path], None], Callable[[], None]]:
        """Returns the tests of the module: one per message, and one that exactly these cases are recorded.

        `but_for`: prefixes of cases that need a library which is not installed.
        """
        recorded = {
            name: text for name, text in self.recorded().items() if but_for is None or not name.startswith(but_for)
        }

        @pytest.mark.parametrize("case", self.names)
        def has_its_message(case: str, tmp_path: Path) -> None:
            assert self.message_of(case, tmp_path) == recorded[case]

        def are_all_refusals() -> None:
            assert list(recorded) == self.names
            assert "nothing is refused" not in recorded.values()

        return has_its_message, are_all_refusals

    def write(self) -> None:
        """Writes the golden file again."""
        with tempfile.TemporaryDirectory() as made:
            lines = list[str]()
            for name in self.names:
                (folder := Path(made, str(len(lines)))).mkdir()
                lines.append(f"{name} => {self.message_of(name, folder)}\n")
        self.module.with_name("refusals.txt").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    import_module(f"tests.{sys.argv[1]}.test_refusals").REFUSALS.write()
