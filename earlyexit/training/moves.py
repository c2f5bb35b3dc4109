"""Images shifted, turned, mirrored, grown or shrunk, and places and maps of classes with them.

Tensor legend: B images, H rows, W columns, C channels, J places in an image.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import affine_grid, grid_sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Moves:
    """What becomes of each image: mirrored, turned about its middle, grown or shrunk, then shifted."""

    mirrored_B: Tensor
    shift_B2: Tensor
    """To the right and down, pixels."""
    turn_B: Tensor
    """Clockwise, radians."""
    zoom_B: Tensor
    """A factor."""

    @property
    def only_shifts(self) -> bool:
        """Then a pixel goes onto a pixel."""
        return not self.turn_B.any() and bool((self.zoom_B == 1).all())

    def of_images(self, images_BHWC: Tensor) -> Tensor:
        """The images so moved, of the same type."""
        maps_BCHW = self._mirrored(images_BHWC.permute(0, 3, 1, 2))
        mode = "nearest" if self.only_shifts else "bilinear"
        moved_BCHW = self._sampled(maps_BCHW.float(), mode)
        if not images_BHWC.is_floating_point():
            moved_BCHW = moved_BCHW.round()
        return moved_BCHW.permute(0, 2, 3, 1).to(images_BHWC.dtype).contiguous()

    def of_classes(self, classes_BHW: Tensor, outside: int) -> Tensor:
        """Maps of class ids so moved; `outside` is the class of what comes in."""
        maps_B1HW = self._mirrored(classes_BHW[:, None]).float() - outside
        return (self._sampled(maps_B1HW, "nearest") + outside).round()[:, 0].to(classes_BHW.dtype)

    def of_places(self, places_BJ2: Tensor, height: int, width: int) -> Tensor:
        """Places x, y in pixels so moved, but for mirroring; NaN for those that leave the image.

        An image's pixels reach half a pixel further than the middles of the outer ones, which 0 and the side - 1 are.
        """
        middle_2 = torch.tensor([width - 1, height - 1], dtype=places_BJ2.dtype) / 2
        cos_B, sin_B = (self.turn_B.cos() * self.zoom_B, self.turn_B.sin() * self.zoom_B)
        x_BJ, y_BJ = (places_BJ2 - middle_2).unbind(-1)
        turned_BJ2 = torch.stack(
            [x_BJ * cos_B[:, None] - y_BJ * sin_B[:, None], x_BJ * sin_B[:, None] + y_BJ * cos_B[:, None]], dim=-1
        )
        moved_BJ2 = turned_BJ2 + middle_2 + self.shift_B2[:, None].to(places_BJ2.dtype)
        inside_BJ = ((moved_BJ2 >= -0.5) & (moved_BJ2 <= 2 * middle_2 + 0.5)).all(-1)
        return torch.where(inside_BJ[..., None], moved_BJ2, torch.nan)

    def _mirrored(self, maps_BCHW: Tensor) -> Tensor:
        return torch.where(self.mirrored_B[:, None, None, None].to(maps_BCHW.device), maps_BCHW.flip(3), maps_BCHW)

    def _sampled(self, maps_BCHW: Tensor, mode: str) -> Tensor:
        """Each pixel from where it comes from; zeros from outside."""
        *_, height, width = maps_BCHW.shape
        sides_2 = torch.tensor([width, height]) / 2
        cos_B, sin_B = self.turn_B.cos() / self.zoom_B, self.turn_B.sin() / self.zoom_B
        # Back from a place of the result, in units of half a side from the middle, as torch has them.
        back_B22 = torch.stack([torch.stack([cos_B, sin_B], -1), torch.stack([-sin_B, cos_B], -1)], -2)
        shift_B2 = -(back_B22 @ self.shift_B2[..., None])[..., 0] / sides_2
        back_B22 = back_B22 * sides_2 / sides_2[:, None]
        theta_B23 = torch.cat([back_B22, shift_B2[..., None]], dim=-1).to(maps_BCHW.device)
        grid_BHW2 = affine_grid(theta_B23, list(maps_BCHW.shape), align_corners=False)
        return grid_sample(maps_BCHW, grid_BHW2, mode=mode, padding_mode="zeros", align_corners=False)
