"""Class maps in answers as files of their own."""

from __future__ import annotations

import base64
from collections.abc import Mapping
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

    def __init__(self, folder: Path) -> None:
        """Make the folder, where it is not there; raises InputError."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"{folder}: {error.strerror}") from error
        self._folder = folder
        self._names: set[str] = set()

    def put(self, image: str, said: Mapping[str, Any]) -> dict[str, Any]:
        """What is said of an image, with every picture written and its path in its place."""
        return {name: self._write(image, value) if is_png(value) else value for name, value in said.items()}

    def _write(self, image: str, content: str) -> str:
        path = self._folder / self._free(Path(image).stem)
        path.write_bytes(base64.b64decode(content))
        return str(path)

    def _free(self, stem: str) -> str:
        """Images of one name lie in several folders."""
        name, number = f"{stem}.png", 1
        while name in self._names:
            number += 1
            name = f"{stem}-{number}.png"
        self._names.add(name)
        return name
