"""Files that were cut off, or changed on the way."""

from __future__ import annotations

import numpy as np


def broken(whole: bytes, seed: int) -> bytes:
    """Cut off somewhere, or some bytes changed: anywhere, or in the second half alone."""
    rng = np.random.default_rng(seed)
    changed = bytearray(whole)
    if seed % 3 == 0:
        return whole[: rng.integers(len(whole))]
    start = 0 if seed % 3 == 1 else len(whole) // 2
    for place in rng.integers(start, len(whole), rng.integers(1, 20)):
        changed[place] = rng.integers(256)
    return bytes(changed)
