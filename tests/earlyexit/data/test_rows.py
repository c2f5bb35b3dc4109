from __future__ import annotations

import json
import tracemalloc
import zipfile
from collections import Counter
from collections.abc import Callable, Mapping
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from earlyexit.codecs import make_codec
from earlyexit.codecs.image import ImageCodec, ImageSize
from earlyexit.codecs.tensor import TensorCodec
from earlyexit.data import source_file
from earlyexit.data.images import LARGEST_BYTES, check_file, is_images, open_images
from earlyexit.data.rows import LabelledRows, has_labels, read_arrays, read_labelled, scaled_joints, write_labelled
from earlyexit.data.source_file import Source, StrictDocument, line_of, read_source
from earlyexit.errors import DataError, PlanError
from earlyexit.tasks.pose import PoseTask
from earlyexit.tasks.segmentation import SegmentationTask
from tests.earlyexit.codecs.pictures import file_of
from tests.earlyexit.data.dense_data import CLASSES, JOINTS, write_image, write_poses, write_scenes, write_turned

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
            '\ufeff{"text": "pay my bill", "label": "bills"}\n\n{"text": "a \\"b\\" c", "label": "other"}\n\n',
            id="jsonl with a mark and blank lines",
        ),
        pytest.param("d.JSON", json.dumps(CLINC), id="clinc"),
        pytest.param("d.CSV", '\ufefftext,label\npay my bill,bills\n"a ""b"" c",other\n', id="csv as Excel writes it"),
    ],
)
def test_texts_and_labels_are_read_in_file_order(tmp_path: Path, name: str, content: str) -> None:
    data = read_labelled(write(tmp_path, name, content))
    assert (data.texts, data.labels) == (TEXTS, LABELS)


def test_labels_in_json_are_written_as_they_are_there(tmp_path: Path) -> None:
    lines = "".join(f'{{"text": "a", "label": {label}}}\n' for label in ("true", "1", '"1"', "0.5"))
    assert read_labelled(write(tmp_path, "d.jsonl", lines)).labels == ("true", "1", "1", "0.5")


@pytest.mark.parametrize(("name", "long"), [("texts.txt", "stop"), ("texts.CSV", "a b " * 50_000)])
def test_texts_without_labels_are_lines_or_cells_of_any_length(tmp_path: Path, name: str, long: str) -> None:
    path = write(tmp_path, name, f"\ufefftext\n\n{long}\n")
    assert read_labelled(path, label_column=None).texts == ("text", long)[name.endswith("CSV") :]


def test_a_random_share_of_every_label_but_never_all_is_split_off() -> None:
    texts = (*(f"{label}{row}" for label in "ab" for row in range(10)), "c0")
    whole = LabelledRows.of_texts(texts=texts, labels=(text[0] for text in texts))
    rest, held = whole.divide(0.3, seed=1)
    assert Counter(rest.labels) == {"a": 7, "b": 7, "c": 1}
    assert Counter(held.labels) == {"a": 3, "b": 3}
    assert sorted((*rest.texts, *held.texts)) == sorted(texts)
    assert [part.texts for part in whole.divide(0.3, seed=1)] == [rest.texts, held.texts]
    assert [part.texts for part in whole.divide(0.3, seed=2)] != [rest.texts, held.texts]


def test_texts_that_are_written_are_read_again(tmp_path: Path) -> None:
    texts = LabelledRows.of_texts(texts=('he said "no", twice', "b\rc"), labels=("x", "y"))
    path = write_labelled(texts, tmp_path, "held_out")
    again = read_labelled(path)
    assert (path.name, again.texts, again.labels) == ("held_out.csv", texts.texts, texts.labels)


def test_pairs_are_two_columns(tmp_path: Path) -> None:
    path = write(tmp_path, "d.tsv", 'question\tsentence\tlabel\nis it "a"?\tb\tyes\n')
    data = read_labelled(path, text_column="question", pair_column="sentence")
    again = read_labelled(write_labelled(data, tmp_path, "again"), pair_column="text_pair")
    for rows in (data, again):
        assert (rows.columns["text"].tolist(), rows.columns["text_pair"].tolist()) == (['is it "a"?'], ["b"])
    with pytest.raises(DataError, match="takes text, text_pair; the data has text; --pair-column names the second"):
        LabelledRows.of_texts(["a"], ["b"]).encode(make_codec({"name": "text_pair", "max_length": 8}))
    with pytest.raises(DataError, match="single texts are needed; the data has text, text_pair"):
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


def test_labelled_arrays_are_read_as_they_were_written(tmp_path: Path) -> None:
    spectra = np.arange(12, dtype=np.float32).reshape(4, 3)
    np.savez(tmp_path / "d.npz", spectrum=spectra, labels=np.array([10, 2, 10, 2]))
    data = read_labelled(tmp_path / "d.npz")
    assert (data.labels, data.label_names) == (("10", "2", "10", "2"), ("2", "10")), "as a checkpoint's outputs are"
    np.savez(tmp_path / "floats.npz", spectrum=spectra, labels=np.array([10.0, 2.0, 10.0, 0.5]))
    assert read_labelled(tmp_path / "floats.npz").labels == ("10", "2", "10", "0.5")
    part = data.select([3, 0])
    again = read_labelled(write_labelled(part, tmp_path, "part"))
    assert again.labels == ("2", "10")
    assert np.array_equal(again.columns["spectrum"], spectra[[3, 0]])
    np.savez(tmp_path / "a.npz", image=np.arange(8, dtype=np.float32).reshape(4, 2), labels=np.array([b"a", b"b"] * 2))
    rows = read_labelled(tmp_path / "a.npz")
    assert (rows.kind, rows.labels) == ((), ("a", "b", "a", "b"))
    kept = read_labelled(write_labelled(rows, tmp_path, "held_out"))
    assert kept.columns["image"].tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_a_row_of_arrays_that_cannot_be_encoded_is_named_by_its_place_in_the_file(tmp_path: Path) -> None:
    np.savez(tmp_path / "d.npz", x=np.array([[1.0], [2.0], [np.nan]], np.float32), labels=np.array([*"aba"]))
    codec = TensorCodec([{"name": "x", "datatype": "FP32", "shape": [1]}])
    with pytest.raises(DataError, match=r"d\.npz: row 3: 'x' holds NaN or infinite numbers$"):
        read_labelled(tmp_path / "d.npz").select([1, 2]).encode(codec)


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


def test_images_are_encoded_from_files_or_pixels() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (2, 4, 4, 3), dtype=np.uint8)
    files = np.empty(2, dtype=object)
    files[:] = [file_of(each) for each in pixels]
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
    for label, content in (("cat", file_of(np.zeros((4, 4, 3), dtype=np.uint8))), ("dog", broken)):
        (tmp_path / "set" / label).mkdir(parents=True)
        (tmp_path / "set" / label / "1.png").write_bytes(content)
    with pytest.raises(DataError, match=rf"set: dog/1\.png: {message}"):
        read_labelled(tmp_path / "set").encode(ImageCodec(4, 4))


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
def test_files_say_whether_they_have_labels_or_not(tmp_path: Path, name: str, text: str, labelled: bool) -> None:
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


def test_labels_of_arrays_are_found_by_their_name_in_the_archive(tmp_path: Path) -> None:
    path = tmp_path / "rows.npz"
    np.savez(path, x=np.arange(3), labels=np.arange(3))
    assert has_labels(path)
    path.write_bytes(path.read_bytes().replace(b"labels.npy", b"target.npy"))
    assert not has_labels(path)
    path.write_bytes(b"no archive")
    assert not has_labels(path)


# Files that are not there


def test_missing_files_folders_and_unreadable_paths_have_different_errors(tmp_path: Path) -> None:
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


Maker = Callable[[Mapping[str, bytes]], Path]
TWO_CLASSES = {"cat/2.png": b"c2", "cat/10.jpg": b"c10", "dog/1.webp": b"d1"}


@pytest.fixture(params=["folder", "zip"])
def made(request: pytest.FixtureRequest, tmp_path: Path) -> Maker:
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


def test_images_come_in_the_order_of_their_names_with_their_folders_as_labels(made: Maker) -> None:
    left_behind = {"__MACOSX/cat/._2.png": b"x", "cat/.DS_Store": b"x"}  # by archivers and file managers
    with open_images(made(TWO_CLASSES | left_behind)) as images:
        assert images.names == ("cat/10.jpg", "cat/2.png", "dog/1.webp")
        assert images.labels == ("cat", "cat", "dog")
        assert list(images) == [b"c10", b"c2", b"d1"]


def test_a_part_is_one_of_the_folders_inside(made: Maker) -> None:
    path = made({"train/cat/1.png": b"t", "test/cat/2.png": b"e"})
    with open_images(path, part="test") as images:
        assert (images.names, images.labels) == (("test/cat/2.png",), ("cat",))


def test_a_single_image_is_accepted(tmp_path: Path) -> None:
    (tmp_path / "photo.JPG").write_bytes(b"x")
    assert is_images(tmp_path / "photo.JPG")
    with open_images(tmp_path / "photo.JPG") as images:
        assert (images.names, list(images)) == (("photo.JPG",), [b"x"])


def one_image(folder: Path, content: bytes, method: int = zipfile.ZIP_STORED, **says: int) -> Path:
    """An archive of `1.png`; its directory `says` other things about it."""
    with zipfile.ZipFile(folder / "images.zip", "w", method) as file:
        file.writestr("1.png", content)
        for name, value in says.items():
            setattr(file.filelist[0], name, value)
    return folder / "images.zip"


def test_a_broken_or_too_large_member_of_an_archive_is_refused(tmp_path: Path) -> None:
    path = one_image(tmp_path, b"0123456789")
    path.write_bytes(path.read_bytes().replace(b"0123456789", b"0123x56789"))
    with open_images(path) as images, pytest.raises(DataError, match=r"'1\.png' cannot be read: Bad CRC"):
        images.read(0)
    path = one_image(tmp_path, bytes(LARGEST_BYTES + 1), zipfile.ZIP_DEFLATED)
    with open_images(path) as images, pytest.raises(DataError, match="at most 100000000 are allowed"):
        images.read(0)
    with pytest.raises(DataError, match=r"of images: zip file version 10\.0"):
        read_labelled(one_image(tmp_path, b"", extract_version=100))


def test_a_member_unpacks_to_at_most_its_declared_size(tmp_path: Path) -> None:
    with open_images(one_image(tmp_path, bytes(20_000_000), zipfile.ZIP_DEFLATED, file_size=10)) as images:
        tracemalloc.start()
        try:
            with pytest.raises(DataError, match=r"'1\.png' cannot be read: Bad CRC"):
                images.read(0)
            _, peak_bytes = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert peak_bytes < 1_000_000


POSE = PoseTask(JOINTS, heatmap_side=8, image_side=32, tolerance=3)
SCENES = SegmentationTask(CLASSES, height=24, width=32, ignored=["Unlabelled"])


def test_joints_are_read_in_the_order_of_the_first_image_divided_and_picked(tmp_path: Path) -> None:
    table = write_poses(tmp_path / "set")
    rows = read_labelled(tmp_path / "set", joints=table, part="train")
    assert len(rows) == 6
    assert rows.part_names == JOINTS
    assert rows.label_names == ()
    targets = rows.targets(POSE, ImageCodec(32, 32))
    assert targets.shape == (6, 3, 2)
    assert np.isnan(targets[0, 2]).all()
    assert np.isnan(targets).any((1, 2)).tolist() == [True, False, False, True, False, False]
    image = np.asarray(Image.open(tmp_path / "set/train/im1.png"))
    for joint, (x, y) in enumerate(targets[1].astype(int)):
        assert image[y, x, joint] == 255
    kept, held = rows.divide(1 / 3, seed=0)
    assert (len(kept), len(held)) == (4, 2)
    assert kept.sides == ((32, 32),) * 4
    last = rows.select([5])
    assert last.labels[0] is rows.labels[5]


def test_joints_are_resized_with_their_image(tmp_path: Path) -> None:
    table = write_poses(tmp_path / "set", width=64, height=48)
    rows = read_labelled(tmp_path / "set", joints=table)
    targets = rows.targets(POSE, ImageCodec(32, 32))
    x, y = rows.labels[1][0]
    assert targets[1, 0].tolist() == pytest.approx([(x + 0.5) / 2 - 0.5, (y + 0.5) * 32 / 48 - 0.5])


def test_joints_that_are_cropped_are_not_visible() -> None:
    """The middle 32 x 32 of 64 x 32 pixels are kept."""
    size = ImageSize(height=32, width=32, shortest_edge=32)
    found = scaled_joints(np.array([[15, 3], [16, 3], [47, 31], [48, 31]], dtype=np.float32), (64, 32), size)
    assert np.isnan(found[[0, 3]]).all()
    assert found[[1, 2]].tolist() == [[0, 3], [31, 31]]


def test_class_maps_are_matched_to_images_by_path(tmp_path: Path) -> None:
    table = write_scenes(tmp_path / "set")
    rows = read_labelled(tmp_path / "set", classes=table, part="train")
    assert rows.part_names == CLASSES
    targets = rows.targets(SCENES, ImageCodec(24, 32))
    assert targets.shape == (4, 24, 32)
    for k, classes in enumerate(targets):
        image = np.asarray(Image.open(tmp_path / f"set/train/image/im{k}.png"))
        assert ((image[..., 0] < 100) == (classes == 1)).all()
    for scene, known in (("s1", 0), ("s2", 1)):
        write_image(tmp_path / f"set/seq/image/{scene}/1.png", np.zeros((24, 32, 3), np.uint8))
        write_image(tmp_path / f"set/seq/label/{scene}/1.png", np.full((24, 32), known, np.uint8))
    rows = read_labelled(tmp_path / "set", classes=table, part="seq")
    assert rows.targets(SCENES, ImageCodec(24, 32))[:, 0, 0].tolist() == [0, 1]
    # Of 24 x 32 pixels less than the middle third is kept.
    cropped = ImageCodec(16, 24, shortest_edge=30, interpolation="nearest")
    rng = np.random.default_rng(0)
    for k in range(4):
        classes = rng.integers(0, 3, (24, 32), dtype=np.uint8)
        write_image(tmp_path / f"set/train/label/im{k}.png", classes)
        write_image(tmp_path / f"set/train/image/im{k}.png", np.repeat(classes[..., None], 3, 2))
    rows = read_labelled(tmp_path / "set", classes=table, part="train")
    seen = [np.asarray(each.tensors[0])[0, ..., 0] for each in rows.encode(cropped)]
    targets = rows.targets(SegmentationTask(CLASSES, height=16, width=24), cropped)
    assert targets.tolist() == np.stack(seen).tolist()


def test_joints_are_places_in_the_upright_image(tmp_path: Path) -> None:
    pixels = np.zeros((20, 40, 3), np.uint8)
    pixels[3, 35] = 255
    write_turned(tmp_path / "set/a.png", pixels)
    table = tmp_path / "joints.csv"
    table.write_text("image,joint,x,y,visible\na.png,neck,16,35,1\n", encoding="utf-8")
    rows = read_labelled(tmp_path / "set", joints=table)
    codec = ImageCodec(40, 20)
    (x, y), image = rows.labels[0][0].astype(int), np.asarray(rows.encode(codec)[0].tensors[0])[0]
    assert image[y, x].tolist() == [255] * 3
    assert scaled_joints(rows.labels[0], (rows.sides or ())[0], codec.size).tolist() == [[16, 35]]
    table.write_text("image,joint,x,y,visible\na.png,neck,35,3,1\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"joint 'neck' at \(35, 3\) is outside its image of 20 x 40 pixels"):
        read_labelled(tmp_path / "set", joints=table)


@pytest.mark.parametrize("text", ["1.25e9", "1e5", "1E+5", "1e-05", "-2e-3", "3.", "0.5", "7"])
def test_numbers_are_the_same_in_yaml_and_in_python(tmp_path: Path, text: str) -> None:
    source = read_source(write(tmp_path, "a.yaml", f"x: {text}\n"), DataError)
    assert source.document == {"x": float(text)}


@pytest.mark.parametrize("text", ["e5", "1e", "1e5s", "v1.5e3", "1-2e3", "2026-10-17e1"])
def test_texts_that_look_like_numbers_stay_texts(tmp_path: Path, text: str) -> None:
    assert read_source(write(tmp_path, "a.yaml", f"x: {text}\n"), DataError).document == {"x": text}


def test_errors_of_other_classes_are_not_changed() -> None:
    with pytest.raises(PlanError) as kept, Source(document={}, where="a", raises=DataError).errors_at(("x",)):
        raise PlanError("no plan")
    assert str(kept.value) == "no plan"


def test_the_line_of_a_missing_value_is_that_of_its_nearest_parent() -> None:
    text = "a:\n  b:\n    - 1\n    - 2\n"
    assert [line_of(text, path) for path in (("a", "b", 1), ("a", "b", 7), ("a", "c"), ("z",), ())] == [4, 3, 2, 1, 1]
    assert line_of("", ("a",)) == 1


def test_files_named_json_are_read_as_json(tmp_path: Path) -> None:
    text = '{\n\t"x": 1e-05,\n\t"rest": {"face": "\\ud83d\\ude00"}\n}'
    source = read_source(write(tmp_path, "a.json", text), DataError)
    assert source.document == {"x": 1e-05, "rest": {"face": "\U0001f600"}}
    assert line_of(source.text, ("rest", "face")) == 3


def test_keys_that_a_merge_replaces_are_not_duplicates(tmp_path: Path) -> None:
    text = "rest:\n  a: &a {b: 1, c: 2}\n  d: {<<: *a, c: 3}\n"
    assert read_source(write(tmp_path, "a.yaml", text), DataError).document == {
        "rest": {"a": {"b": 1, "c": 2}, "d": {"b": 1, "c": 3}}
    }


def test_the_first_mistake_of_a_long_wrong_list_is_named() -> None:
    class Many(StrictDocument):
        xs: list[float]

    with pytest.raises(DataError, match=r"^a:1: xs\.0: Input should be a valid number, not 'b'$"):
        Source(document={"xs": ["b"] * 20_000}, where="a", raises=DataError).parse(Many, called="all of it")


# Aliases


def repeated(levels: int, begin: str, each: str) -> str:
    """Each level names the one before nine times; 9 to the power of the levels values altogether."""
    names = [", ".join([f"*a{level}"] * 9) for level in range(levels - 1)]
    return "\n".join(
        [f"a0: &a0 {begin}", *(f"a{level}: &a{level} {each.format(nine)}" for level, nine in enumerate(names, start=1))]
    )


@pytest.mark.parametrize(
    ("begin", "each"), [("[lol]", "[{}]"), ("{k: 1}", "{{<<: [{}]}}")], ids=["lists", "merged mappings"]
)
def test_a_small_file_whose_aliases_expand_to_billions_of_values_is_refused(
    tmp_path: Path, begin: str, each: str
) -> None:
    text = repeated(12, begin, each)
    assert len(text) < 1_000
    with pytest.raises(PlanError, match=r"plan\.yaml:6: not YAML: aliases repeat more than 100,000 values"):
        read_source(write(tmp_path, "plan.yaml", text), PlanError)


def test_few_aliases_and_long_files_are_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = read_source(
        write(tmp_path, "plan.yaml", "a: &a {x: 1, y: [2, 3]}\nb: [*a, *a]\nc: {<<: *a, x: 4}\n"), PlanError
    )
    a = {"x": 1, "y": [2, 3]}
    assert source.document == {"a": a, "b": [a, a], "c": {"x": 4, "y": [2, 3]}}
    assert line_of(source.text, ("b", 1, "y", 0)) == 1
    monkeypatch.setattr(source_file, "MOST_REPEATED", 1_000)
    source = read_source(write(tmp_path, "plan.yaml", "rows: [" + "1, " * 1_500 + "2]"), PlanError)
    assert isinstance(source.document, dict)
    assert len(source.document["rows"]) == 1_501
