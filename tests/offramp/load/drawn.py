"""Arrivals as the command line asks for them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from offramp.load.arrivals import parse_arrivals
from offramp.load.processes import FloatArray


def draw(spec: str, duration_s: float, seed: int = 0) -> FloatArray:
    """Their seconds."""
    return parse_arrivals(spec).draw(duration_s, np.random.default_rng(seed))


def trace(folder: Path, text: str, name: str = "trace") -> str:
    """The words for a trace in a file."""
    (folder / name).write_text(text, encoding="utf-8")
    return f"trace:{folder / name}"


def per_second(arrivals_s_N: FloatArray, duration_s: int) -> list[int]:
    """How many come in each second."""
    return [int(count) for count in np.bincount(arrivals_s_N.astype(np.int64), minlength=duration_s)]
