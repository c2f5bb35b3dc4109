from __future__ import annotations

import tracemalloc
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from earlyexit.data.images import LARGEST_BYTES, is_images, open_images
from earlyexit.errors import DataError

Source = Callable[[Mapping[str, bytes]], Path]
TWO_CLASSES = {"cat/2.png": b"c2", "cat/10.jpg": b"c10", "dog/1.webp": b"d1"}


@pytest.fixture(params=["folder", "zip"])
def made(request: pytest.FixtureRequest, tmp_path: Path) -> Source:
    def folder(files: Mapping[str, bytes]) -> Path:
        for name, content in files.items():
            (tmp_path / "images" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "images" / name).write_bytes(content)
        return tmp_path / "images"

    def archive(files: Mapping[str, bytes]) -> Path:
        with zipfile.ZipFile(tmp_path / "images.zip", "w") as file:
            for name, content in files.items():
                file.writestr(name, content)
        return tmp_path / "images.zip"

    return folder if request.param == "folder" else archive


def test_images_come_in_the_order_of_their_names_with_their_folders_as_labels(made: Source) -> None:
    with open_images(made(TWO_CLASSES)) as images:
        assert images.names == ("cat/10.jpg", "cat/2.png", "dog/1.webp")
        assert images.labels == ("cat", "cat", "dog")
        assert list(images) == [b"c10", b"c2", b"d1"]


def test_a_part_is_one_of_the_folders_inside(made: Source) -> None:
    path = made({"train/cat/1.png": b"t", "test/cat/2.png": b"e"})
    with open_images(path, part="test") as images:
        assert (images.names, images.labels) == (("test/cat/2.png",), ("cat",))
    with open_images(path) as images, pytest.raises(DataError, match="class folders in test, train; name one"):
        _ = images.labels


def test_images_outside_class_folders_have_no_labels(made: Source) -> None:
    with (
        open_images(made({"1.png": b"x"})) as images,
        pytest.raises(DataError, match=r"'1\.png' lies in no class folder"),
    ):
        _ = images.labels


def test_what_archivers_and_file_managers_leave_behind_is_no_file(made: Source) -> None:
    with open_images(made(TWO_CLASSES | {"__MACOSX/cat/._2.png": b"x", "cat/.DS_Store": b"x"})) as images:
        assert len(images) == 3


def test_no_images_are_refused(made: Source) -> None:
    with pytest.raises(DataError, match="no images in 'val'"), open_images(made(TWO_CLASSES), part="val"):
        pass


def test_one_image_is_taken_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "photo.JPG").write_bytes(b"x")
    with open_images(tmp_path / "photo.JPG") as images:
        assert (images.names, list(images)) == (("photo.JPG",), [b"x"])


def one_image(folder: Path, content: bytes, method: int = zipfile.ZIP_STORED, *, says: int | None = None) -> Path:
    """An archive of `1.png`; its directory `says` how many bytes that has."""
    with zipfile.ZipFile(folder / "images.zip", "w", method) as file:
        file.writestr("1.png", content)
        if says is not None:
            file.filelist[0].file_size = says
    return folder / "images.zip"


def test_a_broken_member_is_named(tmp_path: Path) -> None:
    path = one_image(tmp_path, b"0123456789")
    path.write_bytes(path.read_bytes().replace(b"0123456789", b"0123x56789"))
    with open_images(path) as images, pytest.raises(DataError, match=r"'1\.png' cannot be read: Bad CRC"):
        images.read(0)


def test_a_member_that_unpacks_to_too_much_is_refused(tmp_path: Path) -> None:
    path = one_image(tmp_path, bytes(LARGEST_BYTES + 1), zipfile.ZIP_DEFLATED)
    with open_images(path) as images, pytest.raises(DataError, match="at most 100000000 are taken"):
        images.read(0)


def test_a_member_that_lies_about_its_size_unpacks_to_no_more_than_that(tmp_path: Path) -> None:
    with open_images(one_image(tmp_path, bytes(20_000_000), zipfile.ZIP_DEFLATED, says=10)) as images:
        tracemalloc.start()
        try:
            with pytest.raises(DataError, match=r"'1\.png' cannot be read: Bad CRC"):
                images.read(0)
            _, peak_bytes = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert peak_bytes < 1_000_000


@pytest.mark.parametrize(("name", "expected"), [("a.zip", True), ("a.PNG", True), ("a.csv", False), ("a.npy", False)])
def test_names_tell_images_from_other_data(tmp_path: Path, name: str, expected: bool) -> None:
    assert is_images(tmp_path / name) is expected
    assert is_images(tmp_path)
