"""Image streams that drift: frames of two videos, and CIFAR-10 under corruptions that change (Apparate section 5.1).

Apparate classifies objects in eight hours of traffic video. At hand are 30 s of cars and 139 s of people, and no
network that was trained on either: CIFAR-10's sees the frames' tiles, and its ramps are to say what it says.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageFilter

from earlyexit.data.rows import IMAGE, read_labelled
from earlyexit.errors import InputError
from experiments.data import require_data

Images = npt.NDArray[np.uint8]
"""(N, 32, 32, 3)."""

TRAIN = "cifar10/lossless/cifar10_train_10000_webp.zip"
TEST = "cifar10/lossless/cifar10_test_5000_webp.zip"
CARS = "video/car-detection.mp4"
PEOPLE = "video/one-by-one-person-detection.mp4"
FILES = (TRAIN, TEST, CARS, PEOPLE)
SIDE = 32
LEARNT = 3000
"""Images that ramps learn from, where they are not the stream's beginning."""
CAR_TILES, PEOPLE_TILES = (4, 6), (2, 3)
"""Rows and columns of tiles that a frame is cut into, each an input; a frame's come together, in one order."""
DAYS = 3
"""How often it becomes dark and light again in a stream."""


def frames(path: Path) -> Iterator[Image.Image]:
    """Of a video, in order; raises InputError where PyAV, which decodes it, is missing."""
    try:
        import av
    except ImportError as error:
        raise InputError("videos need PyAV; run: pip install 'offramp[video]'") from error
    with av.open(str(path)) as video:
        for frame in video.decode(video=0):
            yield frame.to_image()


def tiles(frame: Image.Image, rows: int, columns: int) -> Images:
    """A frame cut into equal tiles, row by row, each as small as the network's images."""
    width, height = frame.width / columns, frame.height / rows
    boxes = [
        (width * column, height * row, width * (column + 1), height * (row + 1))
        for row in range(rows)
        for column in range(columns)
    ]
    size = (SIDE, SIDE)
    return np.stack([np.asarray(frame.resize(size, Image.Resampling.BOX, box).convert("RGB")) for box in boxes])


def video_tiles(name: str, grid: tuple[int, int]) -> Images:
    """All tiles of all frames, in order."""
    return np.concatenate([tiles(frame, *grid) for frame in frames(require_data(name))])


def darker(image: Images, strength: float) -> Images:
    """Down to a tenth of its light."""
    dark: Images = (image * (1 - 0.9 * strength)).astype(np.uint8)
    return dark


def blurred(image: Images, strength: float) -> Images:
    """By a Gaussian of up to 1.5 pixels."""
    return np.asarray(Image.fromarray(image).filter(ImageFilter.GaussianBlur(1.5 * strength)))


def noisy(image: Images, strength: float, rng: np.random.Generator) -> Images:
    """With Gaussian noise of up to 30 of 255."""
    return np.clip(image + rng.normal(0, 30 * strength, image.shape), 0, 255).astype(np.uint8)


def night(at: float) -> float:
    """How dark it is at a place of the stream, from 0 to 1: first it is day for a tenth of the stream."""
    return float(0.5 - 0.5 * np.cos(2 * np.pi * DAYS * max(0.0, at - 0.1) / 0.9))


def known_images(rng: np.random.Generator) -> Images:
    """Of CIFAR-10's train images, which no stream holds."""
    images = cifar_images(TRAIN)
    return images[rng.permutation(len(images))[:LEARNT]]


def cifar_images(part: str) -> Images:
    """The lossless images of a part of CIFAR-10, by class."""
    files = read_labelled(require_data(part)).columns[IMAGE]
    return np.stack([np.asarray(Image.open(io.BytesIO(file)).convert("RGB")) for file in files])


def twice(images: Images, rng: np.random.Generator, bootstrap_share: float) -> Images:
    """Every image two times in random orders, but those of the beginning once: ramps are not to know what comes."""
    order = rng.permutation(len(images))
    first = round(2 * len(images) * bootstrap_share / (1 + bootstrap_share))
    chosen: Images = images[np.concatenate([order, rng.permutation(order[first:])])]
    return chosen


def weather(rng: np.random.Generator, bootstrap_share: float) -> Images:
    """CIFAR-10: clear, then in turn dark, blurred, noisy and clear again."""
    images = twice(cifar_images(TEST), rng, bootstrap_share)
    kinds: tuple[Callable[[Images], Images], ...] = (
        lambda image: image,
        lambda image: darker(image, 0.6),
        lambda image: blurred(image, 0.6),
        lambda image: noisy(image, 0.5, rng),
    )
    phases = (0, 0, 1, 2, 0, 3, 1, 0, 2, 3)
    return np.stack([kinds[phases[len(phases) * k // len(images)]](image) for k, image in enumerate(images)])


def daylight(rng: np.random.Generator, bootstrap_share: float) -> Images:
    """CIFAR-10 through three days, ever noisier."""
    images = twice(cifar_images(TEST), rng, bootstrap_share)
    return np.stack(
        [
            noisy(darker(image, 0.8 * night(k / len(images))), 0.5 * k / len(images), rng)
            for k, image in enumerate(images)
        ]
    )


def cars(_rng: np.random.Generator, _share: float) -> Images:
    """A road seen from above, as it was filmed."""
    return video_tiles(CARS, CAR_TILES)


def people(_rng: np.random.Generator, _share: float) -> Images:
    """People at a table, through three days and nights."""
    images = video_tiles(PEOPLE, PEOPLE_TILES)
    return np.stack([darker(image, 0.5 * night(k / len(images))) for k, image in enumerate(images)])


STREAMS: Mapping[str, Callable[[np.random.Generator, float], Images]] = {
    "weather": weather,
    "daylight": daylight,
    "cars": cars,
    "people": people,
}
OF_CIFAR = ("weather", "daylight")
"""Streams of CIFAR-10's images."""
