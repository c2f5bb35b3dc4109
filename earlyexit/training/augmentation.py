"""Random changes of images, and of their right answers, each time that training uses them.

Tensor legend: B images, H rows, W columns, C channels.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import radians

import torch
from torch import Tensor

from earlyexit.errors import ModelFolderError
from earlyexit.network.boundary import Boundary, takes_images
from earlyexit.tasks.base import Task
from earlyexit.training.moves import Moves


@dataclass(frozen=True, slots=True, kw_only=True)
class Augmentation:
    """The largest changes of images. Pixels from outside the image are black."""

    shift: float = 0.125
    """Largest shift in each direction, as a share of the side, in whole pixels. An eighth of 32 is the four pixels of
    He et al. (2016, section 4.2)."""
    mirror: bool = True
    """Whether every second image is mirrored horizontally."""
    turn: float = 0.0
    """Largest rotation in each direction, in degrees."""
    zoom: float = 0.0
    """Largest share by which images grow or shrink."""
    patch: float = 0.0
    """Share of the batches whose images get a rectangle of another image (CutMix, Yun et al. 2019). The right answers
    of such images are unknown, so it is only for exits that imitate."""

    def check(self, inputs: Boundary) -> None:
        """Raise ModelFolderError for a network whose inputs are not images."""
        if not takes_images(inputs):
            raise ModelFolderError("augmentation is of images; the model takes something else")

    def draw(self, num_images: int, height: int, width: int) -> Moves:
        """Returns random moves from torch's generator."""
        mirrored_B = torch.rand(num_images) < 0.5 if self.mirror else torch.zeros(num_images, dtype=torch.bool)
        half = torch.tensor([width, height]) * self.shift
        shift_B2 = (_around_zero(num_images, 2) * half).round()
        return Moves(
            mirrored_B=mirrored_B,
            shift_B2=shift_B2,
            turn_B=_around_zero(num_images) * radians(self.turn),
            zoom_B=1 + _around_zero(num_images) * self.zoom,
        )

    def patched(self, images_BHWC: Tensor) -> Tensor:
        """Returns the images; in some batches a rectangle of each image is replaced by that of the next image."""
        share, where = torch.rand(2).tolist(), torch.rand(2).tolist()
        if share[0] >= self.patch:
            return images_BHWC
        (top, end), (left, right) = (
            _stretch(side, share[1] ** 0.5, at) for side, at in zip(images_BHWC.shape[1:3], where, strict=True)
        )
        patched = images_BHWC.clone()
        patched[:, top:end, left:right] = images_BHWC.roll(1, 0)[:, top:end, left:right]
        return patched


def augmented(augmentation: Augmentation, task: Task, images_BHWC: Tensor, targets_B: Tensor) -> tuple[Tensor, Tensor]:
    """Returns images and their right answers after the same random moves."""
    _, height, width, _ = images_BHWC.shape
    moves = augmentation.draw(len(images_BHWC), height, width)
    return augmentation.patched(moves.of_images(images_BHWC)), task.moved(targets_B, moves)


def _around_zero(*shape: int) -> Tensor:
    """Returns uniform numbers from -1 to 1."""
    return torch.rand(shape) * 2 - 1


def _stretch(side: int, share: float, at: float) -> tuple[int, int]:
    """Returns the first pixel and the end of a share of a side, at a position from 0 to 1."""
    length = round(side * share)
    first = round((side - length) * at)
    return first, first + length
