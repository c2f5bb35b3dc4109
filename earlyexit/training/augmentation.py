"""Random augmentation of images, and of their right answers, anew in each epoch.

Tensor legend: B images, H height, W width, C channels, J points in an image.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import radians

import torch
from torch import Tensor
from torch.nn.functional import affine_grid, grid_sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Moves:
    """The changes of each image: it is mirrored, rotated about its centre, scaled, and then shifted, in this order."""

    mirrored_B: Tensor
    """Whether each image is mirrored."""
    shift_B2: Tensor
    """Shift to the right and down, in pixels."""
    turn_B: Tensor
    """Clockwise rotation, in radians."""
    zoom_B: Tensor
    """Scale factor."""

    def of_images(self, images_BHWC: Tensor) -> Tensor:
        """Returns the moved images, in the same dtype."""
        maps_BCHW = self._mirrored(images_BHWC.permute(0, 3, 1, 2))
        only_shifts = not self.turn_B.any() and bool((self.zoom_B == 1).all())  # pixels map to whole pixels
        mode = "nearest" if only_shifts else "bilinear"
        moved_BCHW = self._sampled(maps_BCHW.float(), mode)
        if not images_BHWC.is_floating_point():
            moved_BCHW = moved_BCHW.round()
        return moved_BCHW.permute(0, 2, 3, 1).to(images_BHWC.dtype).contiguous()

    def of_classes(self, classes_BHW: Tensor, outside: int) -> Tensor:
        """Returns the moved maps of class ids. `outside`: the class of pixels from outside the image."""
        maps_B1HW = self._mirrored(classes_BHW[:, None]).float() - outside
        return (self._sampled(maps_B1HW, "nearest") + outside).round()[:, 0].to(classes_BHW.dtype)

    def of_points(self, places_BJ2: Tensor, height: int, width: int) -> Tensor:
        """Returns the moved points, x and y in pixels, without mirroring; NaN for points that leave the image.

        0 and side - 1 are the centres of the outer pixels, so the image extends half a pixel beyond them.
        """
        centre_2 = torch.tensor([width - 1, height - 1], dtype=places_BJ2.dtype) / 2
        turned_BJ2 = (places_BJ2 - centre_2) @ self._turned_B22.mT.to(places_BJ2.dtype)
        moved_BJ2 = turned_BJ2 + centre_2 + self.shift_B2[:, None].to(places_BJ2.dtype)
        inside_BJ = ((moved_BJ2 >= -0.5) & (moved_BJ2 <= 2 * centre_2 + 0.5)).all(-1)
        return torch.where(inside_BJ[..., None], moved_BJ2, torch.nan)

    @property
    def _turned_B22(self) -> Tensor:
        """The matrix that rotates and scales."""
        cos_B, sin_B = self.turn_B.cos() * self.zoom_B, self.turn_B.sin() * self.zoom_B
        return torch.stack([cos_B, -sin_B, sin_B, cos_B], dim=-1).view(-1, 2, 2)

    def _mirrored(self, maps_BCHW: Tensor) -> Tensor:
        return torch.where(self.mirrored_B[:, None, None, None].to(maps_BCHW.device), maps_BCHW.flip(3), maps_BCHW)

    def _sampled(self, maps_BCHW: Tensor, mode: str) -> Tensor:
        """Returns the rotated, scaled and shifted maps. Pixels from outside the image are 0."""
        *_, height, width = maps_BCHW.shape
        half_sides_2 = torch.tensor([width, height]) / 2
        # The inverse transformation: from a point of the result to the source, in torch's units of half a side.
        inverse_B22 = torch.linalg.inv(self._turned_B22)
        shift_B2 = -(inverse_B22 @ self.shift_B2[..., None])[..., 0] / half_sides_2
        inverse_B22 = inverse_B22 * half_sides_2 / half_sides_2[:, None]
        theta_B23 = torch.cat([inverse_B22, shift_B2[..., None]], dim=-1).to(maps_BCHW.device)
        grid_BHW2 = affine_grid(theta_B23, list(maps_BCHW.shape), align_corners=False)
        return grid_sample(maps_BCHW, grid_BHW2, mode=mode, padding_mode="zeros", align_corners=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Augmentation:
    """Ranges of random changes of images. Pixels from outside the image are black."""

    shift: float = 0.125
    """Largest shift in each direction, as a share of the side. 4 of 32 pixels are those of He et al. (2016, 4.2)."""
    mirror: bool = True
    """Whether every second image is mirrored horizontally."""
    turn: float = 0.0
    """Largest rotation in each direction, in degrees."""
    zoom: float = 0.0
    """Largest share by which images grow or shrink."""
    patch: float = 0.0
    """Share of the batches whose images get a rectangle of another image (CutMix, Yun et al. 2019). It requires
    distillation (`imitate`), because the right answers of these images are unknown."""

    def draw(self, num_images: int, height: int, width: int) -> Moves:
        """Returns random moves, drawn from torch's global generator."""
        largest_2 = torch.tensor([width, height]) * self.shift
        return Moves(
            mirrored_B=torch.rand(num_images) < 0.5 if self.mirror else torch.zeros(num_images, dtype=torch.bool),
            shift_B2=(_around_zero(num_images, 2) * largest_2).round(),
            turn_B=_around_zero(num_images) * radians(self.turn),
            zoom_B=1 + _around_zero(num_images) * self.zoom,
        )

    def patched(self, images_BHWC: Tensor) -> Tensor:
        """Returns the images. In a random share of batches, each image gets a rectangle of the next image."""
        chance, area = torch.rand(2).tolist()
        position_2 = torch.rand(2).tolist()
        if chance >= self.patch:
            return images_BHWC
        slices = []
        for side, position in zip(images_BHWC.shape[1:3], position_2, strict=True):
            length = round(side * area**0.5)
            first = round((side - length) * position)
            slices.append(slice(first, first + length))
        rectangle = (slice(None), *slices)
        patched = images_BHWC.clone()
        patched[rectangle] = images_BHWC.roll(1, 0)[rectangle]
        return patched


def _around_zero(*shape: int) -> Tensor:
    """Returns uniform random numbers from -1 to 1."""
    return torch.rand(shape) * 2 - 1
