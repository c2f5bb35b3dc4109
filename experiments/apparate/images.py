"""Image streams that drift: frames of two videos, and CIFAR-10 under changing corruptions (Apparate section 5.1).

Apparate classifies objects in eight hours of traffic video. These streams use 30 s of cars and 139 s of people. No
available network was trained on them, so CIFAR-10's network classifies tiles of the frames, and ramps imitate it.
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
"""Shape (N, 32, 32, 3)."""

TRAIN = "cifar10/lossless/cifar10_train_10000_webp.zip"
TEST = "cifar10/lossless/cifar10_test_5000_webp.zip"
CARS = "video/car-detection.mp4"
PEOPLE = "video/one-by-one-person-detection.mp4"
FILES = (TRAIN, TEST, CARS, PEOPLE)
SIDE = 32
LEARNT = 3000
"""Number of images that train the ramps, if the beginning of the stream does not."""
CAR_TILES, PEOPLE_TILES = (4, 6), (2, 3)
"""Rows and columns of tiles per frame. Each tile is an input; those of a frame arrive together, in fixed order."""
DAYS = 3
"""Number of day and night cycles in a stream."""


def frames(path: Path) -> Iterator[Image.Image]:
    """Yields the frames of a video in order; raises InputError if PyAV, which decodes it, is missing."""
    try:
        import av
    except ImportError as error:
        raise InputError("videos need PyAV; run: pip install '.[video]'") from error
    with av.open(str(path)) as video:
        for frame in video.decode(video=0):
            yield frame.to_image()


def tiles(frame: Image.Image, rows: int, columns: int) -> Images:
    """Returns a frame cut into equal tiles, row by row, each scaled to the size of the network's images."""
    width, height = frame.width / columns, frame.height / rows
    boxes = [
        (width * column, height * row, width * (column + 1), height * (row + 1))
        for row in range(rows)
        for column in range(columns)
    ]
    size = (SIDE, SIDE)
    return np.stack([np.asarray(frame.resize(size, Image.Resampling.BOX, box).convert("RGB")) for box in boxes])


def video_tiles(name: str, grid: tuple[int, int]) -> Images:
    """Returns all tiles of all frames, in order."""
    return np.concatenate([tiles(frame, *grid) for frame in frames(require_data(name))])


def darker(image: Images, strength: float) -> Images:
    """Returns the image darkened, down to a tenth of its light at strength 1."""
    dark: Images = (image * (1 - 0.9 * strength)).astype(np.uint8)
    return dark


def blurred(image: Images, strength: float) -> Images:
    """Returns the image under a Gaussian blur of up to 1.5 pixels."""
    return np.asarray(Image.fromarray(image).filter(ImageFilter.GaussianBlur(1.5 * strength)))


def noisy(image: Images, strength: float, rng: np.random.Generator) -> Images:
    """Returns the image with Gaussian noise of up to 30 of 255."""
    return np.clip(image + rng.normal(0, 30 * strength, image.shape), 0, 255).astype(np.uint8)


def night(at: float) -> float:
    """Returns the darkness at a position of the stream, from 0 to 1. The first tenth of the stream is day."""
    return float(0.5 - 0.5 * np.cos(2 * np.pi * DAYS * max(0.0, at - 0.1) / 0.9))


def known_images(rng: np.random.Generator, number: int = LEARNT) -> Images:
    """Returns CIFAR-10 training images; no stream holds them."""
    return cifar_images(TRAIN, lambda count: rng.permutation(count)[:number])


def cifar_images(part: str, rows_of: Callable[[int], npt.NDArray[np.int64]] = np.arange) -> Images:
    """Returns lossless images of a part of CIFAR-10, by class; `rows_of` maps the number of images to those decoded."""
    files = read_labelled(require_data(part)).columns[IMAGE]
    return np.stack([np.asarray(Image.open(io.BytesIO(file)).convert("RGB")) for file in files[rows_of(len(files))]])


def twice(images: Images, rng: np.random.Generator, bootstrap_share: float) -> Images:
    """Returns every image twice, shuffled, but the first ones once: ramps must not learn from served inputs."""
    order = rng.permutation(len(images))
    first = round(2 * len(images) * bootstrap_share / (1 + bootstrap_share))
    chosen: Images = images[np.concatenate([order, rng.permutation(order[first:])])]
    return chosen


def weather(rng: np.random.Generator, bootstrap_share: float) -> Images:
    """Returns CIFAR-10 clear, then in turn dark, blurred, noisy and clear again."""
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
    """Returns CIFAR-10 over three days and nights, with growing noise."""
    images = twice(cifar_images(TEST), rng, bootstrap_share)
    return np.stack(
        [
            noisy(darker(image, 0.8 * night(k / len(images))), 0.5 * k / len(images), rng)
            for k, image in enumerate(images)
        ]
    )


def cars(_rng: np.random.Generator, _share: float) -> Images:
    """Returns a road seen from above, unchanged."""
    return video_tiles(CARS, CAR_TILES)


def people(_rng: np.random.Generator, _share: float) -> Images:
    """Returns people at a table, over three days and nights."""
    images = video_tiles(PEOPLE, PEOPLE_TILES)
    return np.stack([darker(image, 0.5 * night(k / len(images))) for k, image in enumerate(images)])


STREAMS: Mapping[str, Callable[[np.random.Generator, float], Images]] = {
    "weather": weather,
    "daylight": daylight,
    "cars": cars,
    "people": people,
}
OF_CIFAR = ("weather", "daylight")
"""Streams made of CIFAR-10 images."""
