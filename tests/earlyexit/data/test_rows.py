from __future__ import annotations

import json
from collections import Counter
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from earlyexit.codecs.image import ImageCodec
from earlyexit.codecs.tensor import TensorCodec
from earlyexit.data.images import check_file
from earlyexit.data.rows import LabelledRows, has_labels, read_arrays, read_labelled, write_labelled
from earlyexit.data.text_tables import read_texts
from earlyexit.errors import DataError, PlanError

TEXTS, LABELS = ("pay my bill", 'a "b" c'), ("bills", "other")
CLINC = {"train": [["pay my bill", "bills"], ['a "b" c', "other"]], "test": [["hello", "greeting"], ["bye", "leave"]]}


def write(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))
    return path


@pytest.mark.parametrize(
    ("name", "content"),
    [
        pytest.param("d.csv", 'text,label\npay my bill,bills\n"a ""b"" c",other\n', id="csv"),
        pytest.param("d.tsv", 'text\tlabel\npay my bill\tbills\na "b" c\tother\n', id="tsv with bare quotes"),
        pytest.param("d.csv", 'id,label,text\n1,bills,pay my bill\n2,other,"a ""b"" c"\n', id="csv with more columns"),
        pytest.param(
            "d.jsonl",
            '{"text": "pay my bill", "label": "bills"}\n{"text": "a \\"b\\" c", "label": "other"}\n',
            id="jsonl",
        ),
        pytest.param("d.json", json.dumps(CLINC), id="clinc"),
        pytest.param("d.csv", '\ufefftext,label\npay my bill,bills\n"a ""b"" c",other\n', id="csv as Excel writes it"),
    ],
)
def test_texts_and_labels_are_read_in_file_order(tmp_path: Path, name: str, content: str) -> None:
    data = read_labelled(write(tmp_path, name, content))
    assert (data.texts, data.labels) == (TEXTS, LABELS)


def test_texts_without_labels_are_lines(tmp_path: Path) -> None:
    path = tmp_path / "texts.txt"
    path.write_text("play jazz\n\nstop\n", encoding="utf-8")
    assert read_texts(path) == ("play jazz", "stop")


def test_a_share_of_every_label_is_divided_off_at_random_but_never_all_of_it() -> None:
    texts = (*(f"{label}{row}" for label in "ab" for row in range(10)), "c0")
    whole = LabelledRows.of_texts(texts=texts, labels=(text[0] for text in texts))
    rest, held = whole.divide(0.3, seed=1)
    assert Counter(rest.labels) == {"a": 7, "b": 7, "c": 1}
    assert Counter(held.labels) == {"a": 3, "b": 3}
    assert sorted((*rest.texts, *held.texts)) == sorted(texts)
    assert [part.texts for part in whole.divide(0.3, seed=1)] == [rest.texts, held.texts]
    assert [part.texts for part in whole.divide(0.3, seed=2)] != [rest.texts, held.texts]


def test_texts_that_are_written_are_read_again(tmp_path: Path) -> None:
    texts = LabelledRows.of_texts(texts=('he said "no", twice', "b"), labels=("x", "y"))
    path = write_labelled(texts, tmp_path, "held_out")
    again = read_labelled(path)
    assert (path.name, again.texts, again.labels) == ("held_out.csv", texts.texts, texts.labels)


def test_pairs_are_two_columns(tmp_path: Path) -> None:
    path = write(tmp_path, "d.tsv", 'question\tsentence\tlabel\nis it "a"?\tb\tyes\n')
    data = read_labelled(path, text_column="question", pair_column="sentence")
    assert {name: column.tolist() for name, column in data.columns.items()} == {
        "text": ['is it "a"?'],
        "text_pair": ["b"],
    }
    again = read_labelled(write_labelled(data, tmp_path, "again"), pair_column="text_pair")
    assert again.columns["text_pair"].tolist() == ["b"]
    with pytest.raises(DataError, match="single texts are needed; the data holds text, text_pair"):
        _ = data.texts


def test_images_are_labelled_by_their_folders(tmp_path: Path) -> None:
    for name in ("train/cat/1.png", "train/dog/1.png", "train/cat/2.jpg"):
        (tmp_path / "set" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "set" / name).write_bytes((b"\x89PNG" if name.endswith("png") else b"\xff\xd8") + name.encode())
    data = read_labelled(tmp_path / "set", part="train")
    assert data.labels == ("cat", "cat", "dog")
    path = write_labelled(data.select([2, 1]), tmp_path, "held_out")
    again = read_labelled(path)
    assert (path.name, again.labels) == ("held_out.zip", ("cat", "dog"))
    assert again.columns["image"].tolist() == [b"\xff\xd8train/cat/2.jpg", b"\x89PNGtrain/dog/1.png"]


def test_arrays_have_a_label_for_each_row(tmp_path: Path) -> None:
    spectra = np.arange(12, dtype=np.float32).reshape(4, 3)
    np.savez(tmp_path / "d.npz", spectrum=spectra, labels=np.array([1, 2, 1, 2]))
    data = read_labelled(tmp_path / "d.npz")
    assert data.labels == ("1", "2", "1", "2")
    part = data.select([3, 0])
    again = read_labelled(write_labelled(part, tmp_path, "part"))
    assert again.labels == ("2", "1")
    assert np.array_equal(again.columns["spectrum"], spectra[[3, 0]])


class Spectra(TensorCodec):
    """One column of three numbers, a second of one."""

    def __init__(self) -> None:
        columns = [("spectrum", "FP32", [3]), ("kind", "INT32", [])]
        super().__init__([{"name": name, "datatype": datatype, "shape": shape} for name, datatype, shape in columns])


def test_rows_are_encoded_in_the_codecs_datatypes() -> None:
    columns = {"kind": np.array([7, 8]), "spectrum": np.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])}
    encoded = LabelledRows(columns=columns, labels=("a", "b")).encode(Spectra())
    spectrum, kind = encoded[1].tensors
    assert (spectrum.tolist(), spectrum.dtype.name) == ([[4.0, 5.0, 6.0]], "float32")
    assert (kind.tolist(), kind.dtype.name) == ([8], "int32")


def test_whole_numbers_of_any_type_are_pixels_where_they_fit() -> None:
    wide = np.array([0, 255, 7] * 16).reshape(1, 4, 4, 3)
    assert wide.dtype == np.int64
    [encoded] = LabelledRows(columns={"image": wide}, labels=("a",)).encode(ImageCodec(4, 4))
    assert (encoded.tensors[0].tolist(), encoded.tensors[0].dtype.name) == (wide.tolist(), "uint8")
    with pytest.raises(DataError, match=r"'image' holds int64 .*: UINT8 holds 0 to 255, not 256"):
        LabelledRows(columns={"image": wide + 1}, labels=("a",)).encode(ImageCodec(4, 4))


def test_images_are_encoded_from_files_or_pixels() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (2, 4, 4, 3), dtype=np.uint8)
    files = np.empty(2, dtype=object)
    files[:] = [png(each) for each in pixels]
    of_files, of_pixels = (
        LabelledRows(columns={"image": column}, labels=("a", "b")).encode(ImageCodec(4, 4))
        for column in (files, pixels)
    )
    for one, another, expected in zip(of_files, of_pixels, pixels, strict=True):
        assert np.array_equal(one.tensors[0], another.tensors[0])
        assert np.array_equal(one.tensors[0][0], expected)


@pytest.mark.parametrize(
    ("broken", "message"),
    [pytest.param(b"\x89PNG broken", "", id="cut"), pytest.param(b"", "the image file is empty", id="empty")],
)
def test_a_broken_image_among_others_is_named_by_its_file(tmp_path: Path, broken: bytes, message: str) -> None:
    for label, content in (("cat", png(np.zeros((4, 4, 3), dtype=np.uint8))), ("dog", broken)):
        (tmp_path / "set" / label).mkdir(parents=True)
        (tmp_path / "set" / label / "1.png").write_bytes(content)
    with pytest.raises(DataError, match=rf"set: dog/1\.png: {message}"):
        read_labelled(tmp_path / "set").encode(ImageCodec(4, 4))


def png(pixels: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> bytes:
    file = BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


# Rows without labels


@pytest.mark.parametrize(
    ("name", "text", "labelled"),
    [
        ("rows.csv", "text,label\na,x\n", True),
        ("rows.csv", "text,mark\na,x\n", False),
        ("rows.tsv", "text\tlabel\na\tx\n", True),
        ("rows.jsonl", '{"text": "a"}\n', False),
        ("rows.jsonl", '{"text": "a", "label": "x"}\n', True),
        ("rows.txt", "a\n", False),
    ],
)
def test_files_say_whether_they_have_labels_and_are_read_without(
    tmp_path: Path, name: str, text: str, labelled: bool
) -> None:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    assert has_labels(path) == labelled
    rows = read_labelled(path, label_column=None)
    assert (rows.texts, rows.labels) == (("a",), ("",))
    assert rows.with_labels(["y"]).labels == ("y",)


# Files of arrays


def npz(compressed: bool = False) -> bytes:
    file = BytesIO()
    (np.savez_compressed if compressed else np.savez)(file, a=np.arange(1000))
    return file.getvalue()


def test_arrays_are_read_by_name_whatever_the_file_is_called(tmp_path: Path) -> None:
    (tmp_path / "a.npy").write_bytes(npz())
    assert list(read_arrays(tmp_path / "a.npy")) == ["a"]
    np.save(tmp_path / "b.npy", np.arange(3))
    one = (tmp_path / "b.npy").rename(tmp_path / "b.npz")
    assert {name: array.tolist() for name, array in read_arrays(one).items()} == {"": [0, 1, 2]}


def test_an_array_that_is_named_image_stays_an_array(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", image=np.arange(8, dtype=np.float32).reshape(4, 2), labels=np.array([*"abab"]))
    rows = read_labelled(tmp_path / "a.npz")
    assert rows.kind == ()
    kept = read_labelled(write_labelled(rows, tmp_path, "held_out"))
    assert kept.columns["image"].tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]


# Files that are not there


def test_what_is_not_there_is_told_from_a_folder_and_from_what_cannot_be_looked_at(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    check_file(tmp_path / "file")
    wrong = (
        (tmp_path / "gone", ": no such file; it is made elsewhere"),
        (tmp_path, ": is a folder, not a file"),
        (tmp_path / ("p" * 300), ": cannot be read: File name too long"),
    )
    for path, said in wrong:
        with pytest.raises(PlanError) as caught:
            check_file(path, PlanError, hint="; it is made elsewhere")
        assert str(caught.value) == f"{path}{said}"
