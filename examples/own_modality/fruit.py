"""An example of a custom input type: grades the ripeness of a fruit from the spectrum of the light that it reflects.

An input is a spectrum (128 numbers), and an answer is one of five grades. The loss grows with the distance of two
grades: 0.25 for neighbours, 1 for the first and the last. Calibration bounds the mean of this loss.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from earlyexit.families.own import TensorBackbone
from earlyexit.network.boundary import TensorSpec
from earlyexit.tasks.label import LabelTask

POINTS = 128
GRADES = ("1 unripe", "2 early", "3 ripe", "4 late", "5 spoiled")


class Channels(nn.Module):
    """Maps a spectrum (B, L) to channels (B, C, L)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(1, width, kernel_size=9, padding=4)

    def forward(self, spectrum_BL: Tensor) -> Tensor:
        return torch.relu(self.convolution(spectrum_BL[:, None]))


class Halving(nn.Module):
    """A convolution with stride 2: (B, C, L) to (B, more C, L / 2)."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(width, out, kernel_size=5, padding=2, stride=2)
        self.norm = nn.BatchNorm1d(out)

    def forward(self, map_BCL: Tensor) -> Tensor:
        return torch.relu(self.norm(self.convolution(map_BCL)))


def build(width: int = 16, depth: int = 4) -> TensorBackbone:
    """Returns the network; `--backbone fruit:build`. Training calls it without arguments, loading with `config`."""
    widths = [width + k * width // 2 for k in range(depth + 1)]
    return TensorBackbone(
        embed=Channels(width),
        blocks=[Halving(before, after) for before, after in pairwise(widths)],
        inputs=(TensorSpec(name="spectrum", shape=(POINTS,)),),
        config={"width": width, "depth": depth},
    )


class Grades(LabelTask):
    """Ordered labels. The loss of an answer grows with its distance from the full model's answer."""

    name = "fruit:grades"
    zero_one = False

    def __init__(self, label_names: Sequence[str] = GRADES) -> None:
        super().__init__(label_names)

    def loss(self, early: npt.NDArray[Any], full: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
        return np.asarray(np.abs(np.asarray(early) - full) / (len(self.label_names) - 1), dtype=np.float64)


def grades(**settings: Any) -> Grades:
    """Returns the task; `--task fruit:grades`."""
    return Grades(**settings)


def spectra(count: int, seed: int) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.str_]]:
    """Returns generated spectra and labels: as a fruit ripens, one absorption band fades and another one grows."""
    rng = np.random.default_rng(seed)
    age = rng.uniform(0, len(GRADES), count)
    at = np.linspace(0, 1, POINTS)[None]
    unripe = np.exp(-(((at - 0.35) / 0.05) ** 2)) * (1 - age / len(GRADES))[:, None]
    ripe = np.exp(-(((at - 0.55) / 0.08) ** 2)) * (age / len(GRADES))[:, None]
    light = 1 - 0.6 * unripe - 0.5 * ripe + rng.normal(0, 0.08, (count, POINTS)) + rng.normal(0, 0.2, (count, 1))
    return light.astype(np.float32), np.array([GRADES[int(each)] for each in age])


def main(path: Path, count: int = 6000) -> None:
    """Writes labelled spectra in the format that `offramp train --data` reads."""
    path.parent.mkdir(parents=True, exist_ok=True)
    spectrum, labels = spectra(count, seed=0)
    np.savez_compressed(path, spectrum=spectrum, labels=labels)
    print(f"{count} spectra of {len(GRADES)} grades: {path}")  # noqa: T201 - it is a command


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
