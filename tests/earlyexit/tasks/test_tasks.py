from __future__ import annotations

import io
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose
from PIL import Image

from earlyexit.network.boundary import values_of
from earlyexit.policies.base import ExitOutput
from earlyexit.tasks import find_task
from earlyexit.tasks.base import Task
from earlyexit.tasks.label import LabelTask
from earlyexit.tasks.regression import RegressionTask
from earlyexit.tasks.token import TokenTask
from earlyexit.training.augmentation import Moves
from tests.earlyexit.codecs.pictures import file_of, png_chunks
from tests.earlyexit.tasks.maps import BODY, STREET, ids, logits_of, peaks

HERE = __name__
LABELS = LabelTask(("bad", "fair", "good"))
STARS = RegressionTask(scale=4.0, offset=3.0)
"""Answers around 3, of which one that is off by 4 is wholly wrong."""
TOKENS = TokenTask(80, ends=[2])
EVERY = pytest.mark.parametrize("task", [LABELS, STARS, BODY, STREET, TOKENS], ids=lambda task: task.name)


def stars(scale: float) -> RegressionTask:
    return RegressionTask(scale)


def test_the_answer_is_the_most_probable_label_with_its_probability() -> None:
    logits_BC = torch.tensor([[0.0, 0.0, math.log(2.0)], [math.log(6.0), 0.0, 0.0]])
    label_B, score_B = LABELS.answer(logits_BC), LABELS.score(logits_BC)
    assert label_B.tolist() == [2, 0]
    assert score_B.tolist() == pytest.approx([2 / 4, 6 / 8])
    assert LABELS.to_columns(values_of(label_B.numpy()), [0.5, 0.75]) == {
        "label": ["good", "bad"],
        "score": [0.5, 0.75],
    }
    assert LABELS.to_json(2, 0.12345678) == {"label": "good", "score": 0.123457}


def test_numbers_are_scaled_and_their_score_falls_with_the_expected_error() -> None:
    outputs_BC = torch.tensor([[0.0, 0.0], [0.5, math.log(3.0)], [-1.0, -100.0]])
    value_B, score_B = STARS.answer(outputs_BC), STARS.score(outputs_BC)
    assert value_B.tolist() == [3.0, 5.0, -1.0]
    assert score_B.tolist() == pytest.approx([1 / 2, 1 / (1 + 3), 1.0])
    assert STARS.to_columns([5.0], [0.25]) == {"value": [5.0], "score": [0.25]}
    assert STARS.to_json(5.0, 0.25) == {"value": 5.0, "score": 0.25}


@EVERY
def test_answers_match_the_declared_columns_and_schema(task: Task) -> None:
    output = ExitOutput(task, torch.zeros(2, *task.output_shape))
    values = values_of(output.value_B.numpy())
    names = {column.name for column in task.columns}
    assert set(task.to_columns(values, output.score_B.tolist())) == names
    assert set(task.to_json(values[0], 0.5)) == set(task.json_schema) >= names
    again = find_task(task.spec())
    assert again == task
    assert hash(again) == hash(task)


def test_the_loss_of_labels_is_0_or_1_and_of_numbers_their_distance_up_to_the_scale() -> None:
    loss_B = LABELS.loss(np.array([0, 1, 2]), np.array([0, 2, 2]))
    assert loss_B.tolist() == [0.0, 1.0, 0.0]
    assert loss_B.dtype == np.float64
    early, full = np.array([3.0, 4.0, 9.0, -50.0], dtype=np.float32), np.array([3.0, 3.0, 5.0, 3.0], dtype=np.float32)
    loss_B = STARS.loss(early, full)
    assert loss_B.tolist() == [0.0, 0.25, 1.0, 1.0]
    assert loss_B.dtype == np.float64


@given(st.lists(st.tuples(st.floats(-1e6, 1e6, width=32), st.floats(-1e6, 1e6, width=32)), min_size=1))
def test_a_loss_is_at_most_1_and_0_if_answers_agree(pairs: list[tuple[float, float]]) -> None:
    early, full = np.array(pairs, dtype=np.float32).T
    loss_B = STARS.loss(early, full)
    assert ((loss_B >= 0) & (loss_B <= 1)).all()
    assert_allclose(loss_B, STARS.loss(full, early))
    assert not STARS.loss(early, early).any()


def test_targets_are_those_of_the_label_column() -> None:
    assert LABELS.targets(["good", "bad", "good"]).tolist() == [2, 0, 2]
    assert STARS.targets(["4.5", "-1", "3e0"]).tolist() == [4.5, -1.0, 3.0]


def test_the_loss_of_numbers_is_smallest_if_the_width_is_the_mean_absolute_error() -> None:
    # Errors of 1, 2 and 6 in units of the scale, so 3 on average: the negative log likelihood is 1 + ln 3.
    targets_B = torch.tensor([3.0 + 4, 3.0 + 8, 3.0 - 24])
    losses = {
        width: float(STARS.training_loss(torch.tensor([[0.0, math.log(width)]] * 3), targets_B)) for width in (2, 3, 4)
    }
    assert min(losses, key=losses.__getitem__) == 3
    assert losses[3] == pytest.approx(1 + math.log(3))


@EVERY
def test_an_answer_does_not_depend_on_other_inputs(task: Task) -> None:
    outputs_BC = torch.randn(5, *task.output_shape, generator=torch.Generator().manual_seed(0))
    for row in range(5):
        alone = outputs_BC[row : row + 1]
        torch.testing.assert_close(task.answer(outputs_BC)[row], task.answer(alone)[0])
        torch.testing.assert_close(task.score(outputs_BC)[row], task.score(alone)[0])
        if task.num_principal_values:
            torch.testing.assert_close(
                task.principal_values(outputs_BC)[row].sort().values, task.principal_values(alone)[0].sort().values
            )


class FiveStars(RegressionTask):
    def __init__(self) -> None:
        super().__init__(scale=4.0, offset=3.0)


def test_a_users_own_task_is_named_by_its_function() -> None:
    assert FiveStars().spec() == STARS.spec(), "by the constructor of the class that has the name"
    assert find_task({"name": f"{HERE}:stars", "scale": 2.0}) == RegressionTask(2.0)


def test_the_answer_is_the_most_probable_tokens_with_log_probabilities() -> None:
    task = find_task({"name": "token", "vocab_size": 5, "ends": [2]})
    logits_BC = torch.log(torch.tensor([[1.0, 5.0, 2.0, 1.0, 1.0], [4.0, 1.0, 3.0, 1.0, 1.0]])) + 7.0
    answer_B2k = task.answer(logits_BC)
    assert answer_B2k[:, 0].tolist() == [[1, 2, 0, 3, 4], [0, 2, 1, 3, 4]]
    assert TOKENS.answer(torch.arange(80)[None] // 2 * 1.0)[0, 0].tolist() == [k ^ 1 for k in range(79, 15, -1)]
    assert_allclose(answer_B2k[:, 1, :2].exp(), [[0.5, 0.2], [0.4, 0.3]], rtol=1e-5)
    assert_allclose(task.score(logits_BC), [0.3, 0.1], atol=1e-6)
    early, full = answer_B2k.numpy(), answer_B2k.flip(0).numpy()
    assert task.loss(early, full).tolist() == [1.0, 1.0]
    assert task.loss(early, early).tolist() == [0.0, 0.0]
    assert task.targets([4, 0]).tolist() == [4, 0]


NAN = math.nan


def places(*joints: tuple[float, float]) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    return np.array([joints], dtype=np.float32)


def test_a_joint_is_the_peak_of_its_heatmap_moved_towards_the_higher_neighbours() -> None:
    answer = BODY.answer(peaks((0, 0, 0.5), (2, 3, 0.9), (7, 7, 1.0)))
    assert answer.dtype == torch.float32
    assert answer[0].tolist() == [
        pytest.approx([1.5, 1.5, 0.5]),
        pytest.approx([9.5, 13.5, 0.9]),
        pytest.approx([29.5, 29.5, 1.0]),
    ]
    maps = peaks((2, 3, 0.9), (2, 3, 0.9), (0, 7, 0.9))
    maps[0, 0, 3, 3] = 0.2  # right of it
    maps[0, 0, 2, 2] = 0.2  # above
    maps[0, 1, 3, 1] = maps[0, 1, 3, 3] = 0.2  # left and right alike
    maps[0, 1, 4, 2] = 0.1  # below
    maps[0, 2, 7, 1] = maps[0, 2, 6, 0] = 0.2  # at the edge nothing lies beyond
    assert BODY.answer(maps)[0, :, :2].tolist() == [[9.5 + 1, 13.5 - 1], [9.5, 13.5 + 1], [1.5, 29.5]]
    # The neighbours of a pixel at the end of a line are not those of the next line.
    maps = peaks((7, 3, 0.9), (0, 3, 0.9), (1, 1, 0.9))
    maps[0, 0, 4, 0] = maps[0, 1, 2, 7] = 0.5
    assert BODY.answer(maps)[0, :2, :2].tolist() == [[29.5, 13.5], [1.5, 13.5]]
    # A probability is the peak, and never beyond one or below nothing.
    maps = peaks((1, 1, 1.5), (1, 1, 0.25), (1, 1, 0.75))
    maps[0, 1] -= 1
    assert BODY.answer(maps)[0, :, 2].tolist() == [1.0, 0.0, 0.75]


def test_principal_values_are_the_highest_of_each_heatmap() -> None:
    maps = peaks((1, 1, 1.5), (1, 1, 0.5), (1, 1, 0.75))
    maps[0, 1, 2, 2], maps[0, 1, 3, 3], maps[0, 2] = 0.25, 0.125, maps[0, 2] - 1
    values = BODY.principal_values(maps)
    assert values.shape == (1, BODY.num_principal_values) == (1, 6)
    assert sorted(values[0].tolist()) == [0.0, 0.0, 0.0, 0.25, 0.5, 1.0]
    assert BODY.score(maps).tolist() == pytest.approx([1.75 / 6])


def test_the_loss_is_the_share_of_visible_joints_beyond_the_tolerance() -> None:
    right = places((10, 10), (20, 20), (5, 5))
    early = np.dstack([places((13, 10), (20, 24.1), (5, 5)), np.zeros((1, 3))])
    assert BODY.loss(early, right).tolist() == pytest.approx([1 / 3])
    assert BODY.loss(early[..., :2], np.dstack([right, np.ones((1, 3))])).tolist() == pytest.approx([1 / 3])
    assert BODY.loss(right, right).tolist() == [0.0]
    right = places((10, 10), (NAN, NAN), (5, 5))
    early = places((30, 30), (30, 30), (5, 5))
    assert BODY.loss(early, right).tolist() == [0.5]
    assert BODY.loss(early, places(*[(NAN, NAN)] * 3)).tolist() == [0.0]
    right = np.concatenate([places((10, 10), (NAN, NAN), (NAN, NAN)), places((1, 1), (2, 2), (3, 3))])
    early = np.concatenate([places((30, 30), (0, 0), (0, 0)), places((1, 1), (2, 2), (3, 3))])
    tallies = BODY.tallies(early, right)
    assert tallies.tolist() == [[0, 1], [3, 3]]
    assert BODY.figures(tallies.sum(0)) == {"pck": 0.75}
    assert 1 - BODY.loss(early, right).mean() == 0.5


def test_targets_are_arrays_with_nan_for_joints_that_are_not_visible() -> None:
    rows = [[[0, 0], [31, 31], [NAN, NAN]], np.array([[-0.5, 31.5], [4.25, 5], [6, 7]])]
    targets = BODY.targets(rows)
    assert (targets.shape, targets.dtype.name) == ((2, 3, 2), "float32")
    assert targets[1].tolist() == [[-0.5, 31.5], [4.25, 5.0], [6.0, 7.0]]
    assert np.isnan(targets[0, 2]).all()


def test_mirroring_swaps_left_and_right_joints_and_flips_heatmaps() -> None:
    targets = BODY.targets([[[3, 4], [10, 20], [NAN, NAN]]])
    mirrored = BODY.mirrored(targets)
    assert mirrored[0, [0, 2]].tolist() == [[28.0, 4.0], [21.0, 20.0]]
    assert np.isnan(mirrored[0, 1]).all()
    maps, other = (BODY.heatmaps(torch.from_numpy(each)) for each in (targets, mirrored))
    torch.testing.assert_close(other[:, [0, 2, 1]], maps.flip(-1))
    np.testing.assert_array_equal(BODY.mirrored(mirrored), targets)


def test_training_heatmaps_have_a_peak_of_1_at_each_joint() -> None:
    (head, hand, unseen) = BODY.heatmaps(torch.tensor([[[9.5, 13.5], [11.5, 13.5], [NAN, NAN]]]))[0]
    assert head[3, 2] == 1.0
    assert head[3, 4] == pytest.approx(math.exp(-(2**2) / (2 * 2.0**2)))
    assert hand[3, 2] == hand[3, 3] == pytest.approx(math.exp(-(0.5**2) / 8)), "between two pixels"
    assert not unseen.any()
    targets = np.random.default_rng(0).uniform(4, 27, size=(20, 3, 2)).astype(np.float32)
    answers = BODY.answer(BODY.heatmaps(torch.from_numpy(targets)))[..., :2].numpy()
    assert np.abs(answers - targets).max() <= 1.0 + 1e-4, "a quarter of a heatmap's pixel is one of the image"


def test_invisible_joints_have_no_loss() -> None:
    targets = torch.tensor([[[9.5, 13.5], [NAN, NAN], [NAN, NAN]]])
    right = BODY.heatmaps(targets)
    noisy = right.clone()
    noisy[0, 1:] = 7.0
    noisy.requires_grad_(True)
    loss = BODY.training_loss(noisy, targets)
    loss.backward()  # type: ignore[no-untyped-call] # torch leaves it untyped
    assert loss == 0
    assert noisy.grad is not None
    assert not noisy.grad.any()
    assert BODY.training_loss(right + 0.5, targets) == pytest.approx(0.25), "of the one joint that is seen"
    assert BODY.training_loss(right + 0.5, torch.full((1, 3, 2), NAN)) == 0
    full = torch.rand(2, *BODY.output_shape)
    assert BODY.imitation_loss(full, full, 2.0) == 0
    assert BODY.imitation_loss(full + 0.5, full, 2.0) == pytest.approx(0.25)


ROAD, CAR, SKY, UNKNOWN = range(4)
MASK = ids([[SKY] * 6, [SKY, SKY, CAR, CAR, SKY, SKY], [ROAD, CAR, CAR, CAR, CAR, ROAD], [ROAD] * 6])


@pytest.mark.parametrize("probability", [0.9, 1.0], ids=["finite logits", "logits of -inf for all other classes"])
def test_a_map_has_the_most_probable_class_of_every_pixel(probability: float) -> None:
    answer = STREET.answer(logits_of([[SKY, SKY, CAR], [ROAD, CAR, CAR]], probability))
    assert (answer.dtype, tuple(answer.shape)) == (torch.uint8, (1, STREET.height, STREET.width))
    assert answer[0].tolist() == [
        [SKY, SKY, SKY, SKY, CAR, CAR],
        [SKY, SKY, SKY, SKY, CAR, CAR],
        [ROAD, ROAD, CAR, CAR, CAR, CAR],
        [ROAD, ROAD, CAR, CAR, CAR, CAR],
    ]
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


def test_the_loss_is_the_share_of_wrong_pixels_without_ignored_ones() -> None:
    early = MASK.copy()
    early[0, :3] = CAR
    assert STREET.loss(early[None], MASK[None]).tolist() == [3 / 24]
    assert STREET.loss(MASK[None], MASK[None]).tolist() == [0.0]
    right, early = MASK.copy(), MASK.copy()
    right[0], early[0, 0], early[3, 0] = UNKNOWN, ROAD, UNKNOWN
    assert STREET.loss(early[None], right[None]).tolist() == [1 / 18]
    assert STREET.loss(early[None], np.full((1, 4, 6), UNKNOWN, dtype=np.uint8)).tolist() == [0.0]


def test_mean_iou_is_over_classes_that_are_predicted_or_right_for_some_pixel() -> None:
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
    right, early = ids([[ROAD] * 6] * 4), ids([[ROAD] * 6] * 3 + [[SKY] * 6])
    assert STREET.figures(STREET.tallies(early[None], right[None])[0])["mean_iou"] == pytest.approx((18 / 24 + 0) / 2)
    early[3] = UNKNOWN  # an ignored class, which is left out of the mean
    assert STREET.figures(STREET.tallies(early[None], right[None])[0])["mean_iou"] == pytest.approx(18 / 24)


FOUR_BITS = [bytes(row[k] << 4 | row[k + 1] for k in (0, 2, 4)) for row in MASK.tolist()]


def of_palette(mask: Any) -> bytes:
    """A file whose palette has the colours in another order than the ids."""
    image = Image.fromarray(mask)
    image.putpalette([200, 0, 0, 0, 200, 0, 0, 0, 200, 9, 9, 9])
    file = io.BytesIO()
    image.save(file, format="PNG", bits=2)
    return file.getvalue()


@pytest.mark.parametrize(
    "label",
    [
        pytest.param(MASK, id="array"),
        pytest.param(file_of(MASK), id="grey"),
        pytest.param(file_of(Image.fromarray(MASK).convert("P")), id="palette"),
        pytest.param(of_palette(MASK), id="a palette in another order, which says nothing"),
        pytest.param(png_chunks((6, 4, 4, 3), FOUR_BITS, (b"PLTE", bytes(48))), id="four bits into a palette"),
    ],
)
def test_targets_are_arrays_or_index_images(label: Any) -> None:
    targets = STREET.targets([label, MASK])
    assert targets.dtype == np.uint8
    assert targets.tolist() == [MASK.tolist()] * 2


def test_the_training_loss_leaves_out_ignored_pixels() -> None:
    # A pixel of the map learns the class of the image's pixel in the middle of its four: right and below.
    right = ids([[9] * 6, [9, SKY, 9, UNKNOWN, 9, CAR], [9] * 6, [9, ROAD, 9, ROAD, 9, UNKNOWN]])
    right[right == 9] = UNKNOWN
    logits = logits_of([[SKY, SKY, SKY], [ROAD, ROAD, ROAD]], probability=0.7)
    targets = torch.from_numpy(right[None])
    # Of six pixels two are ignored, three have 0.7 and one has 0.1.
    expected = -(3 * math.log(0.7) + math.log(0.1)) / 4
    assert float(STREET.training_loss(logits, targets)) == pytest.approx(expected, rel=1e-5)
    assert STREET.training_loss(logits, torch.full((1, 4, 6), UNKNOWN, dtype=torch.uint8)) == 0


def test_an_ignored_class_fills_the_pixels_that_a_move_leaves_empty() -> None:
    STREET.check_coverage(MASK[None])
    none_B, right_B2 = torch.zeros(1), torch.tensor([[6.0, 0.0]])
    away = Moves(mirrored_B=none_B.bool(), shift_B2=right_B2, turn_B=none_B, zoom_B=none_B + 1)
    assert (STREET.moved(torch.from_numpy(MASK[None]), away) == UNKNOWN).all()


def test_a_segmentations_outputs_have_a_pixel_for_every_stride() -> None:
    assert STREET.output_shape == (4, 2, 3)
    assert find_task({**STREET.spec(), "height": 5}).output_shape == (4, 3, 3), "the last row of pixels has one as well"
