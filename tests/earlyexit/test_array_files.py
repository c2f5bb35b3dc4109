from __future__ import annotations

from io import BytesIO
from pathlib import Path

import numpy as np
import pytest

from earlyexit.data.rows import read_arrays, read_labelled, write_labelled
from earlyexit.errors import DataError


def written(compressed: bool = False) -> bytes:
    file = BytesIO()
    (np.savez_compressed if compressed else np.savez)(file, a=np.arange(1000))
    return file.getvalue()


def test_arrays_are_read_by_name_whatever_the_file_is_called(tmp_path: Path) -> None:
    (tmp_path / "a.npy").write_bytes(written())
    assert list(read_arrays(tmp_path / "a.npy")) == ["a"]
    np.save(tmp_path / "b.npy", np.arange(3))
    one = (tmp_path / "b.npy").rename(tmp_path / "b.npz")
    assert {name: array.tolist() for name, array in read_arrays(one).items()} == {"": [0, 1, 2]}


def flipped(content: bytes) -> bytes:
    """With other bytes in the middle."""
    middle = len(content) // 2
    return content[:middle] + bytes(255 - byte for byte in content[middle : middle + 20]) + content[middle + 20 :]


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"PK", id="nearly a zip"),
        pytest.param(flipped(written(compressed=True)), id="broken"),
        pytest.param(written()[:-40], id="cut"),
    ],
)
def test_what_holds_no_arrays_is_refused_in_one_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.npz").write_bytes(content)
    with pytest.raises(DataError, match=r"a\.npz: no file of arrays: .+$"):
        read_arrays(tmp_path / "a.npz")


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"gone\.npz: no such file"):
        read_arrays(tmp_path / "gone.npz")


def test_an_array_that_is_named_image_stays_an_array(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", image=np.arange(8, dtype=np.float32).reshape(4, 2), labels=np.array([*"abab"]))
    rows = read_labelled(tmp_path / "a.npz")
    assert rows.kind == ()
    kept = read_labelled(write_labelled(rows, tmp_path, "held_out"))
    assert kept.columns["image"].tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
