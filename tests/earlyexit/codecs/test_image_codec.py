from __future__ import annotations

import base64
import resource
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import ExifTags, Image

from earlyexit.codecs import find_codec
from earlyexit.codecs.image import MAX_SCANS, ImageCodec, ImageRow, ImageSize, decode, to_pixels
from earlyexit.codecs.tensor import TensorCodec
from earlyexit.errors import UnprocessableInputError
from earlyexit.network.boundary import DATATYPES, cast_column, parse_numbers
from tests.earlyexit.codecs.pictures import Pixels, file_of, noise, png_header

PHOTO = noise(4, 6)
CODEC = ImageCodec(height=4, width=6)
SHARES = PHOTO.astype(np.float32) / 255


def in_base64(content: bytes) -> str:
    return base64.b64encode(content).decode()


@pytest.mark.parametrize(
    "row",
    [
        CODEC.from_columns({"image": [file_of(PHOTO)]})[0],
        CODEC.from_columns({"image": [in_base64(file_of(PHOTO))]})[0],
        CODEC.from_columns({"image": PHOTO[None]})[0],
        CODEC.from_columns({"image": SHARES[None]})[0],
        CODEC.from_columns({"image": SHARES[None].astype(np.float16)})[0],
        CODEC.from_json(in_base64(file_of(PHOTO)))[0][0],
        CODEC.from_json([in_base64(file_of(PHOTO, "WEBP", lossless=True))])[0][0],
        CODEC.from_content("image/png", file_of(PHOTO)),
    ],
    ids=["file", "base64 element", "uint8", "fp32", "fp16", "json", "webp in a json list", "body"],
)
def test_an_image_has_the_same_pixels_in_every_input_format(row: ImageRow) -> None:
    [encoded] = CODEC.encode([row])
    [pixels] = encoded.tensors
    assert (encoded.length, pixels.dtype) == (1, np.dtype(np.uint8))
    np.testing.assert_array_equal(pixels, PHOTO[None])


def test_files_and_many_pixels_are_decoded_in_a_thread() -> None:
    assert CODEC.is_slow([b"x"])
    assert not CODEC.is_slow([PHOTO])
    assert CODEC.is_slow([np.zeros((400, 900, 3), np.uint8)])
    assert [(each.name, each.datatypes, each.shape) for each in CODEC.inputs] == [
        ("image", ("BYTES",), ()),
        ("image", ("UINT8", "FP32", "FP16"), (4, 6, 3)),
    ]


def test_the_spec_of_an_image_codec_has_its_size() -> None:
    spec = {"name": "image", "height": 224, "width": 224, "shortest_edge": 256, "interpolation": "bicubic"}
    codec = find_codec(spec, Path())
    assert codec.spec() == spec


SMALL = ImageSize(height=4, width=6)


def reference(pixels: Pixels, size: ImageSize) -> Pixels:
    """Resizes and crops a PIL image as torchvision's Resize and CenterCrop do: the whole image is resized first."""
    assert size.shortest_edge is not None
    height, width, _ = pixels.shape
    shorter = min(width, height)
    resized_w, resized_h = (int(size.shortest_edge * side / shorter) for side in (width, height))
    image = Image.fromarray(pixels).resize((resized_w, resized_h), Image.Resampling.BICUBIC)
    left, top = round((resized_w - size.width) / 2), round((resized_h - size.height) / 2)
    return np.asarray(image.crop((left, top, left + size.width, top + size.height)))


def test_images_are_resized_to_the_exact_size() -> None:
    half = decode(file_of(np.repeat(PHOTO, 2, axis=1)), ImageSize(height=4, width=6, interpolation="box"), "it")
    np.testing.assert_array_equal(half, PHOTO)


def test_sixteen_bits_become_eight() -> None:
    grey = np.arange(24, dtype=np.uint16).reshape(4, 6) * 2048 + 255
    np.testing.assert_array_equal(decode(file_of(Image.fromarray(grey)), SMALL, "it")[..., 1], grey >> 8)


@pytest.mark.parametrize(("height", "width"), [(50, 70), (71, 50), (32, 32), (33, 97), (300, 41)])
def test_the_shortest_edge_is_resized_and_the_middle_cut_out(height: int, width: int) -> None:
    pixels, size = noise(height, width), ImageSize(height=28, width=24, shortest_edge=32, interpolation="bicubic")
    difference = decode(file_of(pixels), size, "it").astype(int) - reference(pixels, size)
    assert np.abs(difference).max() <= 1  # the cut is taken while resizing, so sums differ in their last bit


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied(orientation: int) -> None:
    turns = {2: "LR", 3: "180", 4: "TB", 5: "T", 6: "270", 7: "TV", 8: "90"}
    upright = {
        "LR": PHOTO[:, ::-1],
        "180": PHOTO[::-1, ::-1],
        "TB": PHOTO[::-1],
        "T": PHOTO.transpose(1, 0, 2),
        "270": np.rot90(PHOTO, -1),
        "TV": np.rot90(PHOTO, 2).transpose(1, 0, 2),
        "90": np.rot90(PHOTO),
    }
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    expected = upright[turns[orientation]] if orientation > 1 else PHOTO
    size = ImageSize(height=expected.shape[0], width=expected.shape[1])
    np.testing.assert_array_equal(decode(file_of(PHOTO, exif=exif), size, "it"), expected)


def test_a_broken_exif_block_and_several_pictures_are_accepted() -> None:
    for exif in (b"Exif\0\0II*\0\xff\xff\xff\xff", b"Exif\0\0garbage"):
        np.testing.assert_array_equal(decode(file_of(PHOTO, exif=exif), SMALL, "it"), PHOTO)
    other = Image.fromarray(noise(4, 6, seed=1))
    several = file_of(Image.fromarray(PHOTO), "MPO", save_all=True, append_images=[other], quality=100)
    one = file_of(PHOTO, "JPEG", quality=100)
    np.testing.assert_array_equal(decode(several, SMALL, "it"), decode(one, SMALL, "it"))


def test_grey_palettes_alpha_and_cmyk_become_rgb() -> None:
    grey, palette = Image.fromarray(PHOTO).convert("L"), Image.fromarray(PHOTO).convert("P")
    np.testing.assert_array_equal(decode(file_of(grey), SMALL, "it")[..., 2], np.asarray(grey))
    colours = np.asarray(palette.convert("RGB"))
    np.testing.assert_array_equal(decode(file_of(palette, transparency=b"\x10\xff\x30"), SMALL, "it"), colours)
    alpha = np.dstack([PHOTO, np.full((4, 6), 9, np.uint8)])
    np.testing.assert_array_equal(decode(file_of(Image.fromarray(alpha)), SMALL, "it"), PHOTO)
    plain = np.full((4, 6, 3), (250, 120, 10), np.uint8)
    cmyk = decode(file_of(Image.fromarray(plain).convert("CMYK"), "JPEG", quality=100), SMALL, "it")
    assert np.abs(cmyk.astype(int) - plain).max() <= 6


def test_an_image_with_too_many_pixels_is_refused_before_it_is_decoded() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    tracemalloc.start()
    for width, height in ((50_000, 50_000), (9_000, 9_000), (12_000, 12_000), (40_000, 1)):
        with pytest.raises(
            UnprocessableInputError, match="pixels; JPEG, PNG and WebP files of one frame are supported"
        ):
            decode(png_header(width, height), SMALL, "it")
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 1_000_000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20_000  # kilobytes


def test_a_jpeg_with_too_many_scans_is_refused() -> None:
    jpeg = file_of(noise(16, 16), "JPEG", progressive=True)
    last = jpeg.rindex(b"\xff\xda")
    with pytest.raises(UnprocessableInputError, match=f"it has more than {MAX_SCANS} scans"):
        decode(jpeg[:-2] + jpeg[last:-2] * MAX_SCANS + jpeg[-2:], SMALL, "it")


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP"])
def test_a_truncated_file_is_refused(form: str) -> None:
    content = file_of(noise(64, 64), form)
    for length in (0, 1, 10, 20, len(content) // 2):
        with pytest.raises(UnprocessableInputError, match="JPEG, PNG and WebP files of one frame"):
            decode(content[:length], SMALL, "it")


FILES = [
    file_of(noise(9, 7), "JPEG"),
    file_of(
        noise(9, 7), "JPEG", progressive=True, exif=b"Exif\0\0II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\x01\0\0\0\x06\0\0\0"
    ),
    file_of(noise(9, 7)),
    file_of(Image.fromarray(noise(9, 7)).convert("P"), transparency=b"\x10\xff\x30"),
    file_of(noise(9, 7), "WEBP"),
    file_of(noise(9, 7), "WEBP", lossless=True),
]


@settings(max_examples=150)
@given(
    content=st.sampled_from(FILES),
    changes=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.binary(max_size=6)), max_size=5),
    end=st.floats(0.1, 1),
)
@example(content=FILES[0], changes=[], end=1.0)
def test_any_file_becomes_pixels_or_is_refused(content: bytes, changes: list[tuple[float, bytes]], end: float) -> None:
    mutated = bytearray(content[: int(len(content) * end)])
    for where, new in changes:
        at = int(where * len(mutated))
        mutated[at : at + len(new)] = new
    try:
        pixels = decode(bytes(mutated), SMALL, "it")
    except UnprocessableInputError:
        return
    assert pixels.shape == (4, 6, 3)
    assert pixels.dtype == np.uint8


def test_pixels_in_floating_point_are_shares_of_255() -> None:
    for dtype in (np.float32, np.float16, np.float64):
        levels = np.arange(256, dtype=np.uint8).reshape(8, 32)
        np.testing.assert_array_equal(to_pixels((levels / np.float64(255)).astype(dtype), "it"), levels)


SPECTRUM = TensorCodec([{"name": "spectrum", "datatype": "FP32", "shape": [2, 3]}])
ROW = TensorCodec([{"name": "age", "datatype": "INT8", "shape": []}, {"name": "w", "datatype": "FP64", "shape": [2]}])
NUMBERS = [[1, 2.5, 3], [4, 5, 6]]


def test_each_column_is_a_tensor_of_an_input() -> None:
    rows = ROW.from_columns({"w": np.array([[1.0, 2.0], [3.0, 4.0]]), "age": np.array([7, 8], np.int8)})
    assert [[array.tolist() for array in each.tensors] for each in ROW.encode(rows)] == [
        [[7], [[1.0, 2.0]]],
        [[8], [[3.0, 4.0]]],
    ]
    [row] = SPECTRUM.from_columns({"spectrum": np.array([NUMBERS], np.float32)})
    [encoded] = SPECTRUM.encode([row])
    assert encoded.length == 1
    assert [(array.dtype, array.tolist()) for array in encoded.tensors] == [(np.dtype(np.float32), [NUMBERS])]
    assert not SPECTRUM.is_slow([(np.zeros((2, 3), np.float32),)])
    assert SPECTRUM.is_slow([(np.zeros((500, 501), np.float32),)])


def test_json_is_nested_lists_or_objects() -> None:
    assert SPECTRUM.from_json(NUMBERS)[1] is False
    rows, many = SPECTRUM.from_json([NUMBERS, NUMBERS])
    assert (many, len(rows), rows[1][0].tolist()) == (True, 2, NUMBERS)
    [(age, w)], many = ROW.from_json({"w": [1, 2], "age": 3})
    assert not many
    assert (age.dtype.name, age.tolist(), w.dtype.name, w.tolist()) == ("int8", 3, "float64", [1.0, 2.0])
    assert ROW.from_json([{"w": [1, 2], "age": 3}])[1] is True


@pytest.mark.parametrize("datatype", [name for name in DATATYPES if name != "BYTES"])
def test_every_datatype_is_accepted(datatype: str) -> None:
    codec = TensorCodec([{"name": "x", "datatype": datatype, "shape": [2]}])
    [[array]], _ = codec.from_json([True, False] if datatype == "BOOL" else [1, 0])
    assert array.dtype == DATATYPES[datatype]
    [encoded] = codec.encode([(array,)])
    assert encoded.tensors[0].tolist() == [[1, 0]]


# Codecs of users


def spectrum(bins: int) -> TensorCodec:
    return TensorCodec([{"name": "spectrum", "datatype": "FP32", "shape": [bins]}])


def test_a_card_has_the_columns_or_names_a_users_own_codec() -> None:
    [column] = find_codec({"name": f"{__name__}:spectrum", "bins": 40}, Path()).inputs
    assert column.shape == (40,)
    spec = SPECTRUM.spec()
    assert spec == {"name": "tensor", "columns": [{"name": "spectrum", "datatype": "FP32", "shape": [2, 3]}]}
    assert find_codec(spec, Path()).spec() == spec


def test_numbers_of_json_become_an_array_of_their_datatype() -> None:
    given = parse_numbers([[1, 2.5], [3, 4]], "FP32")
    assert (given.dtype, given.tolist()) == (np.dtype(np.float32), [[1.0, 2.5], [3.0, 4.0]])
    assert parse_numbers([2**64 - 1, 1], "UINT64").tolist() == [2**64 - 1, 1]
    assert parse_numbers([[], []], "FP32").shape == (2, 0)


def test_a_long_text_among_numbers_is_refused_before_it_costs_memory() -> None:
    value = [1.5] * 20_000 + ["x" * 100_000]  # as strings of one length: 8 GB
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="not all FP32"):
            parse_numbers(value, "FP32")
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 1_000_000


@pytest.mark.parametrize(
    ("column", "datatype"),
    [
        pytest.param(np.array([0, 255], dtype=np.uint16), "UINT8", id="uint16"),
        pytest.param(np.array([-(2**31), 2**31 - 1]), "INT32", id="ends"),
        pytest.param(np.array([], dtype=np.int64), "UINT8", id="none"),
        pytest.param(np.array([1, 2]), "FP32", id="whole numbers as fractions"),
    ],
)
def test_numbers_that_fit_keep_their_values(column: Any, datatype: str) -> None:
    assert cast_column(column, datatype).tolist() == column.tolist()
