"""A file that somebody names: there, and none of a folder's."""

from __future__ import annotations

from pathlib import Path

from earlyexit.errors import DataError, InputError


def check_file(path: Path, raises: type[InputError] = DataError, *, hint: str = "") -> None:
    """Raise `raises` where nothing is there, with `hint` behind it; for a folder; and for what cannot be looked at."""
    try:
        if path.is_dir():
            raise raises(f"{path}: is a folder, not a file")
        if not path.is_file():
            raise raises(f"{path}: no such file{hint}")
    except OSError as error:  # a name that is too long, a folder that may not be entered
        raise raises(f"{path}: cannot be read: {error.strerror}") from error
