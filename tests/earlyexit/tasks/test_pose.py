from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from earlyexit.network.boundary import Numbers
from tests.earlyexit.tasks.maps import BODY, peaks

NAN = math.nan


def places(*joints: tuple[float, float]) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    return np.array([joints], dtype=np.float32)


def test_a_joint_is_where_its_heatmap_is_highest_in_pixels_of_the_image() -> None:
    answer = BODY.answer(peaks((0, 0, 0.5), (2, 3, 0.9), (7, 7, 1.0)))
    assert answer.dtype == torch.float32
    assert answer[0].tolist() == [
        pytest.approx([1.5, 1.5, 0.5]),
        pytest.approx([9.5, 13.5, 0.9]),
        pytest.approx([29.5, 29.5, 1.0]),
    ]


def test_a_joint_lies_a_quarter_of_a_pixel_towards_the_higher_neighbour_each_way() -> None:
    maps = peaks((2, 3, 0.9), (2, 3, 0.9), (0, 7, 0.9))
    maps[0, 0, 3, 3] = 0.2  # right of it
    maps[0, 0, 2, 2] = 0.2  # above
    maps[0, 1, 3, 1] = maps[0, 1, 3, 3] = 0.2  # left and right alike
    maps[0, 1, 4, 2] = 0.1  # below
    maps[0, 2, 7, 1] = maps[0, 2, 6, 0] = 0.2  # at the edge nothing lies beyond
    assert BODY.answer(maps)[0, :, :2].tolist() == [[9.5 + 1, 13.5 - 1], [9.5, 13.5 + 1], [1.5, 29.5]]


def test_the_neighbours_of_a_pixel_at_the_end_of_a_line_are_not_those_of_the_next_line() -> None:
    maps = peaks((7, 3, 0.9), (0, 3, 0.9), (1, 1, 0.9))
    maps[0, 0, 4, 0] = maps[0, 1, 2, 7] = 0.5
    assert BODY.answer(maps)[0, :2, :2].tolist() == [[29.5, 13.5], [1.5, 13.5]]


def test_a_probability_is_the_peak_and_never_beyond_one_or_below_nothing() -> None:
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


def test_a_joint_counts_as_lost_beyond_the_tolerance_however_sure_it_is() -> None:
    right = places((10, 10), (20, 20), (5, 5))
    early = np.dstack([places((13, 10), (20, 24.1), (5, 5)), np.zeros((1, 3))])
    assert BODY.loss(early, right).tolist() == pytest.approx([1 / 3])
    assert BODY.loss(early[..., :2], np.dstack([right, np.ones((1, 3))])).tolist() == pytest.approx([1 / 3])
    assert BODY.loss(right, right).tolist() == [0.0]


def test_joints_that_cannot_be_seen_do_not_count() -> None:
    right = places((10, 10), (NAN, NAN), (5, 5))
    early = places((30, 30), (30, 30), (5, 5))
    assert BODY.loss(early, right).tolist() == [0.5]
    assert BODY.loss(early, places(*[(NAN, NAN)] * 3)).tolist() == [0.0]


def test_pck_is_of_all_joints_together_not_the_mean_of_the_inputs() -> None:
    right = np.concatenate([places((10, 10), (NAN, NAN), (NAN, NAN)), places((1, 1), (2, 2), (3, 3))])
    early = np.concatenate([places((30, 30), (0, 0), (0, 0)), places((1, 1), (2, 2), (3, 3))])
    tallies = BODY.tallies(early, right)
    assert tallies.tolist() == [[0, 1], [3, 3]]
    assert BODY.figures(tallies.sum(0)) == {"pck": 0.75}
    assert 1 - BODY.loss(early, right).mean() == 0.5


def test_targets_are_arrays_with_nan_where_a_joint_cannot_be_seen() -> None:
    rows = [[[0, 0], [31, 31], [NAN, NAN]], np.array([[-0.5, 31.5], [4.25, 5], [6, 7]])]
    targets = BODY.targets(rows)
    assert (targets.shape, targets.dtype.name) == ((2, 3, 2), "float32")
    assert targets[1].tolist() == [[-0.5, 31.5], [4.25, 5.0], [6.0, 7.0]]
    assert np.isnan(targets[0, 2]).all()


def test_in_a_mirror_left_is_right_and_the_heatmap_the_other_way_round() -> None:
    targets = BODY.targets([[[3, 4], [10, 20], [NAN, NAN]]])
    mirrored = BODY.mirrored(targets)
    assert mirrored[0, [0, 2]].tolist() == [[28.0, 4.0], [21.0, 20.0]]
    assert np.isnan(mirrored[0, 1]).all()
    maps, other = (BODY.heatmaps(torch.from_numpy(each)) for each in (targets, mirrored))
    torch.testing.assert_close(other[:, [0, 2, 1]], maps.flip(-1))
    np.testing.assert_array_equal(BODY.mirrored(mirrored), targets)


def test_training_asks_for_a_peak_of_one_at_each_joint() -> None:
    (head, hand, unseen) = BODY.heatmaps(torch.tensor([[[9.5, 13.5], [11.5, 13.5], [NAN, NAN]]]))[0]
    assert head[3, 2] == 1.0
    assert head[3, 4] == pytest.approx(math.exp(-(2**2) / (2 * 2.0**2)))
    assert hand[3, 2] == hand[3, 3] == pytest.approx(math.exp(-(0.5**2) / 8)), "between two pixels"
    assert not unseen.any()


def test_what_training_asks_for_answers_where_the_joint_is() -> None:
    targets = np.random.default_rng(0).uniform(4, 27, size=(20, 3, 2)).astype(np.float32)
    answers = BODY.answer(BODY.heatmaps(torch.from_numpy(targets)))[..., :2].numpy()
    assert np.abs(answers - targets).max() <= 1.0 + 1e-4, "a quarter of a heatmap's pixel is one of the image"


def test_joints_that_cannot_be_seen_teach_nothing() -> None:
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


def test_imitation_is_by_the_full_models_heatmaps() -> None:
    full = torch.rand(2, *BODY.output_shape)
    assert BODY.imitation_loss(full, full) == 0
    assert BODY.imitation_loss(full + 0.5, full) == pytest.approx(0.25)


def test_callers_get_every_joint_with_its_name() -> None:
    value = Numbers.of(np.array([[1, 2, 0.5], [3, 4, 0.25], [5.12345, 6, 1]], dtype=np.float32))
    columns = BODY.to_columns([value, value], [0.5, 0.25])
    keypoints = columns["keypoints"]
    assert isinstance(keypoints, np.ndarray)
    assert (keypoints.shape, keypoints.dtype.name) == ((2, *BODY.columns[0].shape), "float32")
    said = BODY.to_json(value, 0.5)
    assert said["keypoints"][2] == {"joint": "right hand", "x": 5.123, "y": 6.0, "score": 1.0}
    assert set(said) == set(BODY.json_schema)
