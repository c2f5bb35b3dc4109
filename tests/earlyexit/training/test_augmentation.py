from __future__ import annotations

from dataclasses import replace
from math import radians

import pytest
import torch
from torch import Tensor

from earlyexit.training.augmentation import Augmentation, Moves

STILL = Moves(mirrored_B=torch.tensor([False]), shift_B2=torch.zeros(1, 2), turn_B=torch.zeros(1), zoom_B=torch.ones(1))
IMAGE = torch.arange(1, 13, dtype=torch.uint8).view(1, 3, 4, 1)
"""Three rows of four pixels: 1 2 3 4, 5 6 7 8, 9 10 11 12."""


def rows(image: Tensor) -> list[list[int]]:
    return [list(map(int, row)) for row in image[0, :, :, 0].tolist()]


MOVED: dict[str, tuple[Moves, list[list[int]]]] = {
    "still": (STILL, [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]]),
    "mirrored": (replace(STILL, mirrored_B=torch.tensor([True])), [[4, 3, 2, 1], [8, 7, 6, 5], [12, 11, 10, 9]]),
    "to the right": (replace(STILL, shift_B2=torch.tensor([[1.0, 0]])), [[0, 1, 2, 3], [0, 5, 6, 7], [0, 9, 10, 11]]),
    "up": (replace(STILL, shift_B2=torch.tensor([[0.0, -1]])), [[5, 6, 7, 8], [9, 10, 11, 12], [0, 0, 0, 0]]),
    "half a turn": (replace(STILL, turn_B=torch.tensor([radians(180)])), [[12, 11, 10, 9], [8, 7, 6, 5], [4, 3, 2, 1]]),
}


@pytest.mark.parametrize("name", MOVED)
def test_images_are_moved(name: str) -> None:
    moves, expected = MOVED[name]
    assert rows(moves.of_images(IMAGE)) == expected


def test_points_move_with_their_pixels() -> None:
    """A bright spot of a dark image is found where its place is said to be, whatever the turn and the size."""
    torch.manual_seed(0)
    height, width, count = 24, 32, 40
    moves = Augmentation(shift=0.2, mirror=False, turn=40, zoom=0.25).draw(count, height, width)
    place_2 = torch.tensor([20, 9])
    images = torch.zeros(count, height, width, 1)
    images[:, 8:11, 19:22] = 100.0
    moved = moves.of_images(images)
    found = moves.of_points(place_2.float().expand(count, 1, 2), height, width)
    inside = ~found[:, 0, 0].isnan()
    assert inside.sum() > 20
    for image, place in zip(moved[inside], found[inside, 0], strict=True):
        x, y = place.round().int().clamp(max=torch.tensor([width - 1, height - 1]))
        assert image[y, x, 0] > 40


@pytest.mark.parametrize(("x", "stays"), [(-0.6, False), (-0.3, True), (3.4, True), (3.6, False)])
def test_points_within_the_outer_pixels_are_in_the_image(x: float, stays: bool) -> None:
    found = STILL.of_points(torch.tensor([[[x, 1.0], [1.0, 2.4]]]), 3, 4)
    assert found[0, 0].isnan().any() != stays
    assert found[0, 1].tolist() == pytest.approx([1, 2.4])


def test_maps_of_classes_are_moved_with_their_image_and_filled() -> None:
    moves = replace(STILL, shift_B2=torch.tensor([[1.0, 0]]), mirrored_B=torch.tensor([True]))
    classes = torch.tensor([[[0, 1, 2], [3, 4, 5]]], dtype=torch.uint8)
    assert moves.of_classes(classes, outside=11).tolist() == [[[11, 2, 1], [11, 5, 4]]]


def test_random_moves_stay_within_their_ranges() -> None:
    torch.manual_seed(0)
    moves = Augmentation(shift=0.125, turn=30, zoom=0.2).draw(1000, 32, 64)
    assert moves.shift_B2.abs().max(0).values.tolist() == [8, 4]
    assert moves.shift_B2.equal(moves.shift_B2.round())
    assert radians(29) < moves.turn_B.abs().max() <= radians(30)
    assert 0.8 <= moves.zoom_B.min() < 0.81
    assert 0.4 < moves.mirrored_B.float().mean() < 0.6


def test_a_patch_is_of_the_next_image() -> None:
    torch.manual_seed(0)
    images = torch.arange(3).view(3, 1, 1, 1).expand(3, 8, 8, 1)
    patched = [Augmentation(patch=1.0).patched(images)[1, ..., 0] for _ in range(20)]
    assert {int(value) for each in patched for value in each.flatten()} == {0, 1}
    whole = Augmentation(patch=0.0).patched(images)
    assert whole.equal(images)
