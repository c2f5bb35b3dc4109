from __future__ import annotations

import json
from collections import Counter
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from earlyexit.codecs.image import ImageCodec
from earlyexit.codecs.tensor import TensorCodec
from earlyexit.data.rows import LabelledRows, has_labels, objects, read_labelled, write_labelled
from earlyexit.data.text_tables import read_texts
from earlyexit.errors import DataError

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


def test_columns_can_have_other_names(tmp_path: Path) -> None:
    path = write(tmp_path, "d.tsv", "sentence\tclass\ngood\t1\nbad\t0\n")
    data = read_labelled(path, text_column="sentence", label_column="class")
    assert (data.texts, data.labels) == (("good", "bad"), ("1", "0"))


def test_a_part_of_clinc_can_be_chosen(tmp_path: Path) -> None:
    assert read_labelled(write(tmp_path, "d.json", json.dumps(CLINC)), part="test").texts == ("hello", "bye")


def test_label_names_are_sorted() -> None:
    data = LabelledRows.of_texts(texts=("x", "y", "z"), labels=("b", "a", "b"))
    assert (data.label_names, len(data)) == (("a", "b"), 3)


REFUSED = {
    "csv, no text": ("d.csv", "words,label\na,x\n", ": no column 'text'; there are words, label"),
    "tsv, no label": ("d.tsv", "text\tclass\na\tx\n", ": no column 'label'; there are text, class"),
    "column twice": ("d.csv", "text,label,text\na,x,b\n", ":1: 'text' heads more than one column"),
    "short row": ("d.csv", "text,label\na,x\nb\n", ":3: the row does not have 2 columns"),
    "long row": ("d.csv", "text,label\na,x,y\n", ":2: the row does not have 2 columns"),
    "empty text": ("d.csv", "text,label\na,x\n  ,y\n", ":3: the text is empty"),
    "empty label": ("d.csv", "text,label\na,x\nb, \n", ":3: the label is empty"),
    "header only": ("d.csv", "text,label\n", ": no rows"),
    "empty file": ("d.csv", "", ": no column 'text'"),
    "not UTF-8": ("d.csv", b"text,label\na,x\nb\xff,y\n", ":3: not UTF-8"),
    "not UTF-8, far in": ("d.csv", b"text,label\n" + b"a,x\n" * 9999 + b"\xff,y\n", ":10001: not UTF-8"),
    "clinc, not UTF-8": ("d.json", b'{"train": [["\xff", "x"]]}', ":1: not UTF-8"),
    "ending": ("d.txt", "a x\n", ": unknown ending '.txt'; known: .csv, .tsv, .jsonl, .json"),
    "endless field": ("d.csv", f"text,label\na,x\n{'b' * 200_000},y\n", ":3: field larger"),
    "broken JSON line": ("d.jsonl", '{"text": "a", "label": "x"}\n{"text"\n', ":2: not JSON"),
    "JSON line is a list": ("d.jsonl", '["a", "x"]\n', ":1: a JSON object is needed"),
    "JSON, no label": ("d.jsonl", '{"text": "a"}\n', ":1: no column 'label'; there are text"),
    "text is a number": ("d.jsonl", '{"text": 3, "label": "x"}\n', ":1: 'text' is not a string"),
    "label is null": ("d.jsonl", '{"text": "a", "label": null}\n', ":1: 'label' is neither a string nor a number"),
    "label is a list": ("d.jsonl", '{"text": "a", "label": []}\n', ":1: 'label' is neither a string nor a number"),
    "label is empty": ("d.jsonl", '{"text": "a", "label": ""}\n', ":1: the label is empty"),
    "clinc, broken": ("d.json", '{"train": [\n["a", "x"],\n]}', ":3: not JSON"),
    "clinc, no train": ("d.json", '{"val": []}', ": no list 'train'; the file has val"),
    "clinc, a list": ("d.json", "[1]", ": no list 'train'"),
    "clinc, part is a number": ("d.json", '{"train": 3}', ": 'train' is not a list"),
    "clinc, item": ("d.json", '{"train": [["a", "x"], ["b"]]}', ": item 2 of 'train' is not a pair"),
}


@pytest.mark.parametrize(("name", "content", "message"), REFUSED.values(), ids=REFUSED)
def test_what_is_no_labelled_text_is_refused_with_file_and_line(
    tmp_path: Path, name: str, content: str | bytes, message: str
) -> None:
    with pytest.raises(DataError) as refused:
        read_labelled(write(tmp_path, name, content))
    assert str(refused.value).startswith(f"{tmp_path / name}{message}")


def test_texts_of_one_class_are_read_for_whoever_does_not_train_on_them(tmp_path: Path) -> None:
    assert read_labelled(write(tmp_path, "d.csv", "text,label\na,x\nb,x\n")).label_names == ("x",)


def test_a_part_that_clinc_does_not_have_is_refused_with_those_it_has(tmp_path: Path) -> None:
    path = write(tmp_path, "d.json", json.dumps(CLINC))
    with pytest.raises(DataError, match="no list 'oos'; the file has train, test"):
        read_labelled(path, part="oos")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"gone\.csv: no such file"):
        read_labelled(tmp_path / "gone.csv")


def test_texts_without_labels_are_lines(tmp_path: Path) -> None:
    path = tmp_path / "texts.txt"
    path.write_text("play jazz\n\nstop\n", encoding="utf-8")
    assert read_texts(path) == ("play jazz", "stop")


@pytest.mark.parametrize(
    ("content", "message"),
    [pytest.param(b"\n \n", "no texts", id="blank"), pytest.param(b"a\n\xff", ":2: not UTF-8", id="latin")],
)
def test_texts_that_cannot_be_read_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "texts.txt"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_texts(path)


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
    path = write(tmp_path, "d.tsv", 'question\tsentence\tlabel\nwho "a"?\tb\tyes\n')
    data = read_labelled(path, text_column="question", pair_column="sentence")
    assert {name: column.tolist() for name, column in data.columns.items()} == {
        "text": ['who "a"?'],
        "text_pair": ["b"],
    }
    again = read_labelled(write_labelled(data, tmp_path, "again"), pair_column="text_pair")
    assert again.columns["text_pair"].tolist() == ["b"]
    with pytest.raises(DataError, match="single texts are needed; the data holds text, text_pair"):
        _ = data.texts


def test_a_pair_with_one_side_missing_is_refused_at_its_line(tmp_path: Path) -> None:
    path = write(tmp_path, "d.csv", "a,b,label\nx,y,1\nx, ,1\n")
    with pytest.raises(DataError, match=r"d\.csv:3: the b is empty"):
        read_labelled(path, text_column="a", pair_column="b")


def test_the_form_of_clinc_holds_no_pairs(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds single texts"):
        read_labelled(write(tmp_path, "d.json", json.dumps(CLINC)), pair_column="b")


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


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        pytest.param({"x": np.zeros((2, 3))}, "'labels', one for each row, and at least one other", id="no labels"),
        pytest.param({"labels": np.zeros(2)}, "'labels', one for each row, and at least one other", id="no inputs"),
        pytest.param({"x": np.zeros((3, 1)), "labels": np.zeros(2)}, r"'x' has the shape \[3, 1\]; 2 rows", id="rows"),
        pytest.param({"x": np.zeros((0, 1)), "labels": np.zeros(0)}, "no rows", id="empty"),
        pytest.param({"x": np.array([{}]), "labels": np.zeros(1)}, "no file of arrays", id="objects"),
    ],
)
def test_arrays_that_are_no_labelled_rows_are_refused(tmp_path: Path, arrays: dict[str, Any], message: str) -> None:
    np.savez(tmp_path / "d.npz", allow_pickle=True, **arrays)
    with pytest.raises(DataError, match=message):
        read_labelled(tmp_path / "d.npz")


def test_a_file_that_only_says_it_holds_arrays_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no file of arrays"):
        read_labelled(write(tmp_path, "d.npz", "PK"))


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


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        pytest.param({"image": np.zeros(1)}, "the model takes spectrum, kind; the data holds image", id="names"),
        pytest.param(
            {"spectrum": np.zeros((1, 4)), "kind": np.zeros(1, dtype=np.int8)},
            r"'spectrum' holds float64 of the shape \[4\]; the model takes FP32 of the shape \[3\]",
            id="shape",
        ),
        pytest.param(
            {"spectrum": np.zeros((1, 3)), "kind": np.zeros(1)},
            r"'kind' holds float64 of the shape \[\]; the model takes INT32 of the shape \[\]",
            id="datatype",
        ),
    ],
)
def test_rows_of_another_kind_than_the_models_are_refused(columns: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        LabelledRows(columns=columns, labels=("a",)).encode(Spectra())


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


def test_images_and_arrays_are_read_without_labels(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "1.png").write_bytes(b"pixels")
    np.savez(tmp_path / "rows.npz", x=np.zeros((2, 3)))
    for path, count in ((tmp_path / "images", 1), (tmp_path / "rows.npz", 2)):
        assert not has_labels(path)
        assert read_labelled(path, label_column=None).labels == ("",) * count


@pytest.mark.parametrize("label", ["a/b", "..", "../../up", "", ".git"])
def test_a_label_that_is_no_folder_of_an_archive_is_refused(tmp_path: Path, label: str) -> None:
    data = LabelledRows(columns={"image": objects([b"x"])}, labels=(label,))
    with pytest.raises(DataError, match="cannot be the name of a folder"):
        write_labelled(data, tmp_path, "rows")
    assert not list(tmp_path.iterdir())


def test_an_empty_label_among_arrays_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "d.npz", x=np.zeros((3, 2)), labels=np.array(["a", " ", "b"]))
    with pytest.raises(DataError, match=r"d\.npz: the label of row 2 is empty"):
        read_labelled(tmp_path / "d.npz")
