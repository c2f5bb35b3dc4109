"""Builds latency profiles for tests from only the values that matter."""

from __future__ import annotations

from typing import Any

import numpy as np

from profiles.latency import LatencyProfile
from profiles.table import LatencyTable


def latency_profile(*, num_blocks: int = 3, ramps: tuple[int, ...] = (0, 1), **changes: Any) -> LatencyProfile:
    """Returns a V100's profile for 32 tokens: 1 ms per block, a tenth of that per ramp; `changes` override fields."""
    block_s_NB, ramp_s_EB = np.full((num_blocks, 2), 0.001), np.full((len(ramps), 2), 1e-4)
    facts: dict[str, Any] = {
        "model": "m",
        "device": "V100",
        "backend": "torch",
        "dtype": "float16",
        "kind": "measured",
        "tables": {32: LatencyTable(batches=(1, 2), block_s_NB=block_s_NB, ramp_s_EB=ramp_s_EB)},
        "provenance": {},
    }
    return LatencyProfile(num_blocks=num_blocks, ramps=ramps, **facts | changes)
