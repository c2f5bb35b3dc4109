"""Image files of a folder or a zip archive, in the order of their names. Each is read when it is asked for."""

from __future__ import annotations

import lzma
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from earlyexit.errors import DataError, InputError


def check_file(path: Path, raises: type[InputError] = DataError, *, hint: str = "") -> None:
    """Raise `raises` if the file does not exist, with `hint` at the end; if it is a folder; or if it cannot be read."""
    try:
        if path.is_dir():
            raise raises(f"{path}: is a folder, not a file")
        if not path.exists():  # pipes and devices are read, too
            raise raises(f"{path}: no such file{hint}")
    except OSError as error:  # a name that is too long, a folder that may not be entered
        raise raises(f"{path}: cannot be read: {error.strerror}") from error


SUFFIXES = (".jpg", ".jpeg", ".png", ".webp")
ALLOWED = "JPEG, PNG and WebP files (.jpg, .jpeg, .png, .webp)"
LARGEST_BYTES = 100_000_000
"""Most bytes of one file. An archive's member may claim to be small and unpack to any size."""
UNREADABLE = (OSError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error, lzma.LZMAError)
"""The exceptions that reading a file or a member of an archive may raise."""
IGNORED = ("__MACOSX", ".")
"""Prefixes of files that archivers and file managers leave behind."""


@dataclass(frozen=True, slots=True)
class ImageFiles:
    """Names and bytes of images."""

    source: Path
    names: tuple[str, ...]
    """Paths inside the folder or archive, with `/`."""
    read_file: Callable[[str], bytes]

    def __len__(self) -> int:
        return len(self.names)

    def __iter__(self) -> Iterator[bytes]:
        return (self.read(k) for k in range(len(self)))

    def read(self, index: int) -> bytes:
        """Returns the bytes of one file; raises DataError if they cannot be read."""
        name = self.names[index]
        try:
            return self.read_file(name)
        except UNREADABLE as error:
            raise DataError(f"{self.source}: {name!r} cannot be read: {error}") from error

    @property
    def labels(self) -> tuple[str, ...]:
        """The name of each image's folder.

        Raises DataError if an image is in no folder, or if class folders are in different folders (train, test).
        """
        paths = [PurePosixPath(name) for name in self.names]
        loose = next((path for path in paths if len(path.parts) < 2), None)
        if loose is not None:
            raise DataError(f"{self.source}: {str(loose)!r} lies in no class folder; one folder per label is needed")
        parts = sorted({str(path.parent.parent) for path in paths})
        if len(parts) > 1:
            raise DataError(f"{self.source}: class folders in {', '.join(parts[:5])}; name one of them as the part")
        return tuple(path.parent.name for path in paths)


@contextmanager
def open_images(path: Path, *, part: str | None = None) -> Iterator[ImageFiles]:
    """Opens the images of a folder or a zip archive, or a single image; `part` names a folder inside.

    Raises DataError for any other path, for other files among the images, and if there are no images.
    """
    if path.is_dir():
        files = sorted(each.relative_to(path).as_posix() for each in path.rglob("*") if each.is_file())
        yield _of(path, files, lambda name: _read_file(path / name), part)
    elif path.suffix.lower() in SUFFIXES and path.is_file():
        yield _of(path, [path.name], lambda name: _read_file(path.parent / name), part)
    elif not path.is_file():
        raise DataError(f"{path}: no such file or folder")
    else:
        try:
            opened = zipfile.ZipFile(path)
        except (OSError, zipfile.BadZipFile) as error:
            raise DataError(f"{path}: neither a folder nor a zip archive of images: {error}") from error
        with opened as archive:
            sizes = {each.filename: each.file_size for each in archive.infolist() if not each.is_dir()}

            def read(name: str) -> bytes:
                _check_size(sizes[name])
                with archive.open(name) as member:  # unlike `archive.read`, unpacks no more than it is asked for
                    return member.read(sizes[name])

            yield _of(path, sorted(sizes), read, part)


def is_images(path: Path) -> bool:
    """Whether `open_images` reads a path: a folder, an archive, or an image."""
    return path.is_dir() or path.suffix.lower() in (".zip", *SUFFIXES)


def _of(path: Path, files: list[str], read: Callable[[str], bytes], part: str | None) -> ImageFiles:
    names = [name for name in files if not any(each.startswith(IGNORED) for each in PurePosixPath(name).parts)]
    other = next((name for name in names if PurePosixPath(name).suffix.lower() not in SUFFIXES), None)
    if other is not None:
        raise DataError(f"{path}: {other!r} is no image; taken are {ALLOWED}")
    inside = [name for name in names if part is None or name.startswith(f"{part.rstrip('/')}/")]
    if not inside:
        raise DataError(f"{path}: no images{'' if part is None else f' in {part!r}'}; taken are {ALLOWED}")
    return ImageFiles(path, tuple(inside), read)


def _read_file(path: Path) -> bytes:
    _check_size(path.stat().st_size)
    return path.read_bytes()


def _check_size(size_bytes: int) -> None:
    if size_bytes > LARGEST_BYTES:
        raise OSError(f"{size_bytes} bytes; at most {LARGEST_BYTES} are taken")
