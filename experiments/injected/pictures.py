"""Pictures of text, set in the fonts that matplotlib brings, turned by quarters of a circle."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from earlyexit.dataset import IMAGE, LabelledRows, objects

FONTS = ("DejaVuSans", "DejaVuSans-Bold", "DejaVuSans-Oblique", "DejaVuSerif", "DejaVuSerif-Bold", "DejaVuSansMono")
PAGE = (224, 224)
LINE = (192, 48)
NOISE = 12.0
"""Standard deviation of what is added to every pixel from 0 to 255."""


def turned_pages(texts: Sequence[str], seed: int) -> LabelledRows:
    """A page of each text, upright or turned to the left by one to three quarters; the label is by how many degrees."""
    return _turned(texts, PAGE, (0, 90, 180, 270), seed)


def turned_lines(texts: Sequence[str], seed: int) -> LabelledRows:
    """The beginning of each text as one line, upright or upside down."""
    return _turned(texts, LINE, (0, 180), seed)


def _turned(texts: Sequence[str], size: tuple[int, int], angles: Sequence[int], seed: int) -> LabelledRows:
    rng = np.random.default_rng(seed)
    turns = rng.choice(angles, len(texts))
    images = [_encoded(_set(text, size, rng).rotate(int(turn)), rng) for text, turn in zip(texts, turns, strict=True)]
    return LabelledRows(columns={IMAGE: objects(images)}, labels=tuple(str(turn) for turn in turns))


def _set(text: str, size: tuple[int, int], rng: np.random.Generator) -> Image.Image:
    width, height = size
    lines = height >= width
    font_size = int(rng.integers(10, 22) if lines else rng.integers(18, 36))
    paper, ink = rng.integers(170, 256), rng.integers(0, 90)
    image = Image.new("RGB", size, (int(paper),) * 3)
    font = ImageFont.truetype(str(_fonts() / f"{rng.choice(FONTS)}.ttf"), font_size)
    start = int(rng.integers(0, max(1, len(text) // 2)))
    shown = textwrap.fill(text[start:], max(4, int(1.7 * width / font_size))) if lines else text[start:]
    at = tuple(rng.integers(2, 12, 2).tolist()) if lines else (int(rng.integers(2, 8)), (height - font_size) // 2 - 2)
    ImageDraw.Draw(image).text(at, shown, fill=(int(ink),) * 3, font=font)
    return image


def _encoded(image: Image.Image, rng: np.random.Generator) -> bytes:
    noisy = np.asarray(image, dtype=np.float32) + rng.normal(0, NOISE, (image.height, image.width, 1))
    file = io.BytesIO()
    Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=85)
    return file.getvalue()


def _fonts() -> Path:
    import matplotlib

    return Path(matplotlib.get_data_path()) / "fonts" / "ttf"
