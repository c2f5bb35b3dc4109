"""Class maps in answers as files of their own."""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from earlyexit.errors import InputError

PNG = base64.b64encode(b"\x89PNG\r\n\x1a\n")[:-2].decode()
"""What a PNG file in base64 begins with, but for the end, which depends on what follows."""


def is_png(value: object) -> bool:
    """Whether what is said of an input is a PNG file in base64."""
    return isinstance(value, str) and value.startswith(PNG)


class MapFiles:
    """A folder that pictures are put into, each under the name of the image that it is of."""

    def __init__(self, folder: Path, inputs: Iterable[Path] = ()) -> None:
        """Make the folder, where it is not there; raises InputError, also where it is, or holds, one of the inputs."""
        held = next((path for path in inputs if path.resolve().is_relative_to(folder.resolve())), None)
        if held is not None:
            raise InputError(f"--maps {folder}: {held} lies there, an input: class maps need another folder")
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"{folder}: {error.strerror}") from error
        self._folder = folder
        self._numbers: Counter[str] = Counter()

    def put(self, image: str, said: Mapping[str, Any]) -> dict[str, Any]:
        """What is said of an image, with every picture written and its path in its place."""
        return {name: self._write(image, value) if is_png(value) else value for name, value in said.items()}

    def _write(self, image: str, content: str) -> str:
        """Under the first name that no file has yet: images of one name lie in several folders, and none is lost."""
        stem = Path(image).stem
        while True:
            self._numbers[stem] += 1
            number = self._numbers[stem]
            path = self._folder / (f"{stem}.png" if number == 1 else f"{stem}-{number}.png")
            try:
                with path.open("xb") as file:
                    file.write(base64.b64decode(content))
            except FileExistsError:
                continue
            return str(path)
