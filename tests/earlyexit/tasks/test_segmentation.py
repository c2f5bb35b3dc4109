from __future__ import annotations

import base64
import io
import math
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from earlyexit.network.boundary import Numbers
from earlyexit.tasks import find_task
from earlyexit.training.augmentation import Moves
from tests.earlyexit.tasks.maps import STREET, ids, logits_of, png_chunks, png_of

ROAD, CAR, SKY, UNKNOWN = range(4)
MASK = ids([[SKY] * 6, [SKY, SKY, CAR, CAR, SKY, SKY], [ROAD, CAR, CAR, CAR, CAR, ROAD], [ROAD] * 6])


def test_a_map_is_the_likeliest_class_of_every_pixel_of_the_image() -> None:
    answer = STREET.answer(logits_of([[SKY, SKY, CAR], [ROAD, CAR, CAR]]))
    assert (answer.dtype, tuple(answer.shape)) == (torch.uint8, (1, STREET.height, STREET.width))
    assert answer[0].tolist() == [
        [SKY, SKY, SKY, SKY, CAR, CAR],
        [SKY, SKY, SKY, SKY, CAR, CAR],
        [ROAD, ROAD, CAR, CAR, CAR, CAR],
        [ROAD, ROAD, CAR, CAR, CAR, CAR],
    ]


def test_between_two_pixels_of_the_map_logits_count_not_classes() -> None:
    logits = torch.zeros(1, 4, 2, 3)
    logits[0, ROAD, :, 0], logits[0, CAR, :, 1:] = 1.0, 10.0
    # Between the first two pixels' middles: three quarters of 1 against a quarter of 10.
    assert STREET.answer(logits)[0, 0].tolist() == [ROAD, CAR, CAR, CAR, CAR, CAR]


def test_principal_values_are_the_highest_probability_of_every_pixel_of_the_map() -> None:
    values = STREET.principal_values(logits_of([[SKY, SKY, CAR], [ROAD, CAR, CAR]], probability=0.7))
    assert values.shape == (1, STREET.num_principal_values) == (1, 6)
    assert values[0].tolist() == pytest.approx([0.7] * 6)
    assert STREET.score(logits_of([[SKY, SKY, CAR]] * 2, probability=0.7)).tolist() == pytest.approx([0.7])
    assert STREET.principal_values(1e4 * torch.eye(4).reshape(1, 4, 2, 2)).tolist() == [[1.0] * 4], "no overflow"


def test_the_loss_is_the_share_of_pixels_of_another_class() -> None:
    early = MASK.copy()
    early[0, :3] = CAR
    assert STREET.loss(early[None], MASK[None]).tolist() == [3 / 24]
    assert STREET.loss(MASK[None], MASK[None]).tolist() == [0.0]


def test_pixels_whose_right_class_is_ignored_do_not_count() -> None:
    right, early = MASK.copy(), MASK.copy()
    right[0], early[0, 0], early[3, 0] = UNKNOWN, ROAD, UNKNOWN
    assert STREET.loss(early[None], right[None]).tolist() == [1 / 18]
    assert STREET.loss(early[None], np.full((1, 4, 6), UNKNOWN, dtype=np.uint8)).tolist() == [0.0]


def test_mean_iou_is_over_the_classes_of_all_pixels_together() -> None:
    right = ids([[ROAD] * 6, [ROAD] * 6, [CAR] * 6, [UNKNOWN] * 6])
    early = ids([[ROAD] * 6, [ROAD, ROAD, CAR, CAR, CAR, CAR], [CAR] * 6, [SKY] * 6])
    tallies = STREET.tallies(np.stack([early, right]), np.stack([right, right]))
    assert tallies.shape == (2, 12)
    figures = STREET.figures(tallies[0])
    # Road: 8 of 12; car: 6 of 10; sky is answered at ignored pixels only, and so nowhere.
    assert figures == {"pixel_accuracy": pytest.approx(14 / 18), "mean_iou": pytest.approx((8 / 12 + 6 / 10) / 2)}
    both = STREET.figures(tallies.sum(0))
    assert both["mean_iou"] == pytest.approx((20 / 24 + 12 / 16) / 2)
    assert STREET.figures(np.zeros(12, dtype=np.int64)) == {"pixel_accuracy": 0.0, "mean_iou": 0.0}


def test_a_class_that_is_answered_where_it_is_not_lowers_the_mean_iou() -> None:
    right, early = ids([[ROAD] * 6] * 4), ids([[ROAD] * 6] * 3 + [[SKY] * 6])
    assert STREET.figures(STREET.tallies(early[None], right[None])[0])["mean_iou"] == pytest.approx((18 / 24 + 0) / 2)
    early[3] = UNKNOWN  # an ignored class, which is left out of the mean
    assert STREET.figures(STREET.tallies(early[None], right[None])[0])["mean_iou"] == pytest.approx(18 / 24)


@pytest.mark.parametrize(
    "label",
    [
        pytest.param(MASK, id="array"),
        pytest.param(png_of(MASK), id="grey"),
        pytest.param(png_of(MASK, "P"), id="palette"),
    ],
)
def test_targets_are_arrays_or_index_images(label: Any) -> None:
    targets = STREET.targets([label, MASK])
    assert targets.dtype == np.uint8
    assert targets.tolist() == [MASK.tolist()] * 2


def of_palette(mask: Any) -> bytes:
    """A file whose palette has the colours in another order than the ids."""
    image = Image.fromarray(mask)
    image.putpalette([200, 0, 0, 0, 200, 0, 0, 0, 200, 9, 9, 9])
    file = io.BytesIO()
    image.save(file, format="PNG", bits=2)
    return file.getvalue()


def grey(bits: int) -> bytes:
    return png_chunks((6, 4, bits, 0), [bytes(-(-6 * bits // 8))] * 4)


def test_ids_of_four_bits_into_a_palette_are_taken() -> None:
    rows = [bytes(row[k] << 4 | row[k + 1] for k in (0, 2, 4)) for row in MASK.tolist()]
    file = png_chunks((6, 4, 4, 3), rows, (b"PLTE", bytes(48)))
    assert STREET.targets([file])[0].tolist() == MASK.tolist()


def test_the_colours_of_a_palette_say_nothing() -> None:
    assert STREET.targets([of_palette(MASK)]).tolist() == [MASK.tolist()]


def test_in_a_mirror_maps_are_the_other_way_round() -> None:
    assert STREET.mirrored(MASK[None])[0, 2].tolist() == [ROAD, CAR, CAR, CAR, CAR, ROAD]
    one = ids([[ROAD, CAR, SKY, SKY, SKY, SKY]] * 4)
    assert STREET.mirrored(one[None])[0, 0].tolist() == [SKY, SKY, SKY, SKY, CAR, ROAD]


def test_the_training_loss_is_that_of_the_right_class_where_it_counts() -> None:
    # A pixel of the map learns the class of the image's pixel in the middle of its four: right and below.
    right = ids([[9] * 6, [9, SKY, 9, UNKNOWN, 9, CAR], [9] * 6, [9, ROAD, 9, ROAD, 9, UNKNOWN]])
    right[right == 9] = UNKNOWN
    logits = logits_of([[SKY, SKY, SKY], [ROAD, ROAD, ROAD]], probability=0.7)
    targets = torch.from_numpy(right[None])
    # Of six pixels two are ignored, three have 0.7 and one has 0.1.
    expected = -(3 * math.log(0.7) + math.log(0.1)) / 4
    assert float(STREET.training_loss(logits, targets)) == pytest.approx(expected, rel=1e-5)
    assert STREET.training_loss(logits, torch.full((1, 4, 6), UNKNOWN, dtype=torch.uint8)) == 0
    assert STREET.training_loss(logits, targets, label_smoothing=0.1) != pytest.approx(expected)


def test_an_ignored_class_needs_no_pixel_and_fills_what_moves_leave_empty() -> None:
    STREET.check_taught(MASK[None])
    none_B, right_B2 = torch.zeros(1), torch.tensor([[6.0, 0.0]])
    away = Moves(mirrored_B=none_B.bool(), shift_B2=right_B2, turn_B=none_B, zoom_B=none_B + 1)
    assert (STREET.moved(torch.from_numpy(MASK[None]), away) == UNKNOWN).all()


def test_callers_get_a_map_of_bytes_or_a_png_file() -> None:
    value = Numbers.of(MASK)
    class_map = STREET.to_columns([value, value], [0.5, 0.25])["class_map"]
    assert isinstance(class_map, np.ndarray)
    assert (class_map.shape, class_map.dtype.name) == ((2, *STREET.columns[0].shape), "uint8")
    said = STREET.to_json(value, 0.5)
    file = Image.open(io.BytesIO(base64.b64decode(said["class_map"])))
    assert np.asarray(file).tolist() == MASK.tolist()
    assert set(said) == set(STREET.json_schema)


def test_a_card_makes_an_equal_segmentation() -> None:
    assert find_task(STREET.spec()) == STREET
    assert STREET.output_shape == (4, 2, 3)
    assert find_task({**STREET.spec(), "height": 5}).output_shape == (4, 3, 3), "the last row of pixels has one as well"
