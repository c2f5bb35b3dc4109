"""Image files of a folder or a zip archive, sorted by name. Each file is read on demand."""

from __future__ import annotations

import lzma
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from earlyexit.errors import DataError, InputError, raising


def check_file(path: Path, raises: type[InputError] = DataError, *, hint: str = "") -> None:
    """Raises `raises` for a folder, a path that cannot be read, and a missing file, with `hint` after the message."""
    # For example, the name is too long, or the folder is not accessible.
    with raising(raises, f"{path}: cannot be read", OSError):
        if path.is_dir():
            raise raises(f"{path}: is a folder, not a file")
        if not path.exists():  # not `is_file`, because pipes and devices are allowed
            raise raises(f"{path}: no such file{hint}")


SUFFIXES = (".jpg", ".jpeg", ".png", ".webp")
ALLOWED = "JPEG, PNG and WebP files (.jpg, .jpeg, .png, .webp)"
LARGEST_BYTES = 100_000_000
"""Maximum size of a file. A member of an archive may declare a small size and unpack to a larger one."""
UNREADABLE = (OSError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error, lzma.LZMAError)
"""Exceptions from reading a file or a member of an archive."""
IGNORED = ("__MACOSX", ".")
"""Prefixes of names of files that archivers and file managers create."""


@dataclass(frozen=True, slots=True)
class ImageFiles:
    """Names and bytes of images."""

    source: Path
    names: tuple[str, ...]
    """Paths inside the folder or archive, with `/` as the separator."""
    read_file: Callable[[str], bytes]

    def __len__(self) -> int:
        return len(self.names)

    def __iter__(self) -> Iterator[bytes]:
        return (self.read(k) for k in range(len(self)))

    def read(self, index: int) -> bytes:
        """Returns the bytes of one file; raises DataError if it cannot be read."""
        name = self.names[index]
        try:
            return self.read_file(name)
        except UNREADABLE as error:
            raise DataError(f"{self.source}: {name!r} cannot be read: {error}") from error

    @property
    def labels(self) -> tuple[str, ...]:
        """The label of each image, which is the name of its folder.

        Raises DataError if an image is in no folder, or if class folders are in several folders (train, test).
        """
        paths = [PurePosixPath(name) for name in self.names]
        if outside := next((path for path in paths if len(path.parts) < 2), None):
            raise DataError(f"{self.source}: {str(outside)!r} is in no class folder; one folder per label is needed")
        parts = sorted({str(path.parent.parent) for path in paths})
        if len(parts) > 1:
            raise DataError(f"{self.source}: class folders in {', '.join(parts[:5])}; choose one of them as the part")
        return tuple(path.parent.name for path in paths)


@contextmanager
def open_images(path: Path, *, part: str | None = None) -> Iterator[ImageFiles]:
    """Opens the images of a folder or a zip archive, or a single image. `part`: a folder inside; None for all files.

    Raises DataError for other paths, for files that are not images, and if there are no images.
    """
    if path.is_dir():
        files = sorted(file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file())
        yield _of(path, files, lambda name: _read_file(path / name), part)
    elif path.suffix.lower() in SUFFIXES and path.is_file():
        yield _of(path, [path.name], lambda name: _read_file(path.parent / name), part)
    elif not path.is_file():
        raise DataError(f"{path}: no such file or folder")
    else:
        try:
            opened = zipfile.ZipFile(path)
        except UNREADABLE as error:
            raise DataError(f"{path}: neither a folder nor a zip archive of images: {error}") from error
        with opened as archive:
            sizes = {info.filename: info.file_size for info in archive.infolist() if not info.is_dir()}

            def read(name: str) -> bytes:
                _check_size(sizes[name])
                with archive.open(name) as member:  # `archive.read` would unpack more than the declared size
                    return member.read(sizes[name])

            yield _of(path, sorted(sizes), read, part)


def is_images(path: Path) -> bool:
    """Returns whether a path is a folder, a zip archive, or an image, which `open_images` reads."""
    return path.is_dir() or path.suffix.lower() in (".zip", *SUFFIXES)


def _of(path: Path, files: list[str], read: Callable[[str], bytes], part: str | None) -> ImageFiles:
    names = [name for name in files if not any(part.startswith(IGNORED) for part in PurePosixPath(name).parts)]
    if other := next((name for name in names if PurePosixPath(name).suffix.lower() not in SUFFIXES), None):
        raise DataError(f"{path}: {other!r} is not an image; allowed are {ALLOWED}")
    inside = [name for name in names if part is None or name.startswith(f"{part.rstrip('/')}/")]
    if not inside:
        raise DataError(f"{path}: no images{'' if part is None else f' in {part!r}'}; allowed are {ALLOWED}")
    return ImageFiles(path, tuple(inside), read)


def _read_file(path: Path) -> bytes:
    _check_size(path.stat().st_size)
    return path.read_bytes()


def _check_size(size_bytes: int) -> None:
    if size_bytes > LARGEST_BYTES:
        raise OSError(f"{size_bytes} bytes; at most {LARGEST_BYTES} are allowed")
