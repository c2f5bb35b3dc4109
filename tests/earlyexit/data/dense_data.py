"""Tiny data sets of poses and of maps of classes, as folders."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import ExifTags, Image

JOINTS = ("left knee", "right knee", "neck")
CLASSES = ("sky", "road", "Unlabelled")


def write_image(path: Path, pixels: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


def write_turned(path: Path, pixels: np.ndarray) -> None:
    """Writes an image as a camera held sideways does: viewers turn it right by 90 degrees."""
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path, exif=exif)


def write_poses(folder: Path, *, count: int = 6, width: int = 32, height: int = 32, part: str = "train") -> Path:
    """Images with a bright spot at each joint; the table's path. In every third image the neck cannot be seen."""
    rng = np.random.default_rng(0)
    table = folder.parent / "joints.csv"
    lines = ["image,joint,x,y,visible"]
    for k in range(count):
        name = f"{part}/im{k}.png"
        pixels = rng.integers(0, 40, (height, width, 3), dtype=np.uint8)
        for joint in JOINTS:
            x, y = int(rng.integers(2, width - 2)), int(rng.integers(2, height - 2))
            seen = joint != "neck" or k % 3 != 0
            pixels[y - 1 : y + 2, x - 1 : x + 2, JOINTS.index(joint)] = 255
            lines.append(f"{name},{joint},{x},{y},1" if seen else f"{name},{joint},,,0")
        write_image(folder / name, pixels)
    table.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return table


def write_scenes(
    folder: Path, *, count: int = 4, width: int = 32, height: int = 24, part: str = "train", ids: Sequence[int] = (0, 1)
) -> Path:
    """Bright sky above a dark road, the edge somewhere; the table's path."""
    rng = np.random.default_rng(0)
    for k in range(count):
        edge = int(rng.integers(4, height - 4))
        pixels = np.full((height, width, 3), 220, dtype=np.uint8)
        pixels[edge:] = 30
        classes = np.full((height, width), ids[0], dtype=np.uint8)
        classes[edge:] = ids[1]
        write_image(folder / part / "image" / f"im{k}.png", pixels)
        write_image(folder / part / "label" / f"im{k}.png", classes)
    table = folder.parent / "classes.csv"
    rows = "".join(f"{k},{name}\n" for k, name in enumerate(CLASSES))
    table.write_text("id,name\n" + rows, encoding="utf-8")
    return table
