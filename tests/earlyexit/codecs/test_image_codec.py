from __future__ import annotations

import base64
from pathlib import Path

import numpy as np
import pytest

from earlyexit.codecs import find_codec
from earlyexit.codecs.image import ImageCodec, ImageRow
from earlyexit.errors import ModelFolderError
from tests.earlyexit.codecs.pictures import file_of, noise

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
def test_an_image_is_the_same_pixels_however_it_comes(row: ImageRow) -> None:
    [encoded] = CODEC.encode([row])
    [pixels] = encoded.tensors
    assert (encoded.length, pixels.dtype) == (1, np.dtype(np.uint8))
    np.testing.assert_array_equal(pixels, PHOTO[None])


def test_files_and_many_pixels_leave_the_event_loop() -> None:
    assert CODEC.is_slow([b"x"])
    assert not CODEC.is_slow([PHOTO])
    assert CODEC.is_slow([np.zeros((400, 900, 3), np.uint8)])


def test_its_inputs_are_files_or_pixels_of_the_size() -> None:
    assert [(each.name, each.datatypes, each.shape) for each in CODEC.inputs] == [
        ("image", ("BYTES",), ()),
        ("image", ("UINT8", "FP32", "FP16"), (4, 6, 3)),
    ]


def test_a_card_says_how_an_image_comes_to_its_size() -> None:
    spec = {"name": "image", "height": 224, "width": 224, "shortest_edge": 256, "interpolation": "bicubic"}
    codec = find_codec(spec, Path())
    assert codec.spec() == spec
    with pytest.raises(ModelFolderError, match="interpolation 'best'; known: nearest"):
        find_codec({**spec, "interpolation": "best"}, Path())
